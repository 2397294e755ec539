"""Hooks of mkdocs: what mkdocs does with these pages, in addition to its plugins.

The hooks write the tables of settings and commands from the code. They also make a page of CHANGELOG.md, which is
outside of docs/.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import raykv
from raykv.cli.main import main
from raykv.config import PoolConfig

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def on_files(files: Any, config: Any) -> Any:
    """mkdocs calls this with all files that it found."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "changelog.md", content=changelog()))
    return files


def changelog() -> str:
    """Return the page of the changelog. Its title and its navigation entry contain the version."""
    text = CHANGELOG.read_text(encoding="utf-8").replace("# Changelog", f"# Version {raykv.__version__}: changelog", 1)
    return text.replace("](docs/", "](")


def on_page_markdown(markdown: str, **_: object) -> str:
    """mkdocs calls this for every page."""
    for marker, generate in (("<!-- generated: settings -->", settings), ("<!-- generated: commands -->", commands)):
        if marker in markdown:
            markdown = markdown.replace(marker, generate())
    return markdown


def settings() -> str:
    """Return PoolConfig's fields as a Markdown table. Raises ValueError for a field that the docstring lacks."""
    rows = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(PoolConfig):
        kind = inspect.formatannotation(field.type).replace(" | ", " or ").replace("pathlib.", "")
        rows.append(f"| `{field.name}` | {kind} | `{field.default!r}` | {_meaning(field.name)} |")
    return "\n".join(rows)


def _meaning(name: str) -> str:
    """Return the text of a field in PoolConfig's docstring: from `name: ` to the next field's name."""
    names = "|".join(field.name for field in dataclasses.fields(PoolConfig))
    found = re.search(rf"(?ms)^{name}: (.*?)(?=^(?:{names}): |\n\n|\Z)", inspect.getdoc(PoolConfig) or "")
    if not found:
        raise ValueError(f"PoolConfig's docstring does not describe {name!r}: add a line `{name}: ...`")
    return _cell(found[1])


def commands() -> str:
    """Return all commands of `raykv`, each in a section."""
    return "\n\n".join(_sections(main, click.Context(main, info_name="raykv")))


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    rows = [record for param in command.params if (record := param.get_help_record(context))]
    table = [f"| `{names}` | {_cell(text)} |" for names, text in rows]
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"## {context.command_path}\n\n{inspect.cleandoc(command.help or '')}\n\n```text\n{usage}\n```"
    if table:
        yield "\n".join(["| option | meaning |", "| --- | --- |", *table])
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from _sections(child, click.Context(child, info_name=name, parent=context))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
