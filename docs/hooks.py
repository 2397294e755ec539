"""What mkdocs does with these pages beside its plugins: it fills in the table of settings from the code."""

import dataclasses
import inspect
import re

from raykv.config import PoolConfig

TABLE = "<!-- generated: settings -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs for every page."""
    return markdown.replace(TABLE, settings()) if TABLE in markdown else markdown


def settings() -> str:
    """PoolConfig's fields as a Markdown table. ValueError for a field that its docstring does not describe."""
    rows = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(PoolConfig):
        kind = inspect.formatannotation(field.type).replace("|", "\\|")
        rows.append(f"| `{field.name}` | `{kind}` | `{field.default!r}` | {_meaning(field.name)} |")
    return "\n".join(rows)


def _meaning(name: str) -> str:
    """What PoolConfig's docstring says of a field: from `name: ` to the next field's."""
    names = "|".join(field.name for field in dataclasses.fields(PoolConfig))
    found = re.search(rf"(?ms)^{name}: (.*?)(?=^(?:{names}): |\n\n|\Z)", inspect.getdoc(PoolConfig) or "")
    if not found:
        raise ValueError(f"PoolConfig's docstring does not describe {name!r}: add a line `{name}: ...`")
    return " ".join(found[1].split()).replace("|", "\\|")
