"""Writes docs/deadlines.md from the constants of raykv's files: `python -m docs.write_deadlines`."""

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from docs.draw_imports import sources

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "deadlines.md"
SECONDS = re.compile(r"(?!\w*PER_S)\w+_S")  # names of constants in seconds; a name that ends in PER_S is a rate
HEAD = """# Deadlines

This page lists, in seconds, how long raykv waits, polls or remembers, except in `raykv bench`. These times are
constants. Users can set only `deadline` in `PoolConfig` and `patience` in `kv_connector_extra_config`. `python -m
docs.write_deadlines` writes this page from constants whose names end in `_S`, and their comments.
"""


def page() -> str:
    """Return the page's text. Raises ValueError for a constant without a comment."""
    parts = [HEAD]
    found = [file.relative_to(ROOT) for name, file in sources() if not name.startswith("raykv.bench.")]
    for folder, files in groupby(sorted(found, key=lambda file: (_folder(file), file)), key=_folder):
        if rows := [row for file in files for row in _rows(file)]:
            parts += [f"\n## `{folder}`\n", "| seconds | what for | constant |", "| --- | --- | --- |", *rows]
    return "\n".join(parts) + "\n"


def _folder(file: Path) -> Path:
    """Return the folder that names a section of the page: `actors`, `raykv`, or a folder of `raykv`."""
    return file.parents[-3] if file.parts[0] == "raykv" and len(file.parts) > 2 else file.parents[-2]


def _rows(file: Path) -> Iterator[str]:
    text = (ROOT / file).read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.parse(text).body:
        for name, seconds in _assigned(node):
            if SECONDS.fullmatch(name):
                _, _, comment = lines[node.lineno - 1].partition("  # ")
                if not comment:
                    raise ValueError(f"{file}: {name}: say in a comment what these seconds are for")
                yield f"| {seconds} | {comment} | `{str(file).removeprefix('raykv/')}: {name}` |"


def _assigned(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each target of an assignment, as source text."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield ast.unparse(target), ast.unparse(node.value).strip("()")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
