"""The comment of each column names the kernels that write the column."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from raykv.directory.kernels import columns

FOLDER = Path(columns.__file__).parent
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")}
RECORDS = {"rows": "ROW", "lists": "LIST", "size_classes": "SIZE_CLASS", "slabs": "SLAB", "quotas": "TENANT"}


def _columns() -> set[str]:
    """All columns: "rows.state" for a field of an array of records, "table" for a plain array."""
    fields = {f"{name}.{field}" for name, record in RECORDS.items() for field in getattr(columns, record).names}
    return fields | set(columns.Columns._fields) - set(RECORDS)


def _named(source: str) -> dict[str, set[str]]:
    """By column, the modules that its comment names, on its line or on the line before."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "Columns":
            fields = {ast.unparse(item.target): item.lineno for item in node.body if isinstance(item, ast.AnnAssign)}
            found.update({name: _modules(lines, at) for name, at in fields.items() if name not in RECORDS})
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in RECORDS.values():
            array = next(name for name, record in RECORDS.items() if record == ast.unparse(node.targets[0]))
            for item in ast.walk(node):
                if isinstance(item, ast.Tuple) and isinstance(name := item.elts[0], ast.Constant):
                    found[f"{array}.{name.value!s}"] = _modules(lines, item.lineno)
    return found


def _modules(lines: list[str], at: int) -> set[str]:
    where = [lines[at - 1], *([before] if (before := lines[at - 2]).strip().startswith("#") else [])]
    said = [match for line in where if (match := re.search(r"#.*ritten by ([\w, ]+)$", line))]
    assert said, f"no comment says who writes what is in line {at} of columns.py: {lines[at - 1]}"
    return set(said[0][1].split(", ")) - {"no kernel"}


def _written(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """By column, the modules of kernels that write it."""
    found = defaultdict(set)
    for module, source in sources.items():
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef):
                for column in _written_by(function):
                    found[column].add(module)
    return found


def _written_by(function: ast.FunctionDef) -> Iterator[str]:
    """The columns that a function writes, through `c` or through a name for a part of `c`."""
    assigned = [pair for node in ast.walk(function) for pair in _assigned(node)]
    names = {target.id: ast.unparse(value) for target, value in assigned if isinstance(target, ast.Name)}
    for target, _ in assigned:
        if not isinstance(target, ast.Name):
            yield from _columns_of(target, names)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) for each target of an assignment."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            items = target.elts if isinstance(target, ast.Tuple) else [target]
            values = node.value.elts if isinstance(node.value, ast.Tuple) else []
            yield from zip(items, values if len(values) == len(items) > 1 else [node.value] * len(items), strict=True)


def _columns_of(target: ast.expr, names: Mapping[str, str]) -> Iterator[str]:
    text = ast.unparse(target)
    for _ in range(5):  # a name may stand for another name
        root = re.match(r"\w+", text)
        if root and root[0] in names:
            text = names[root[0]] + text[root.end() :]
    if (path := re.match(r"c\.(\w+)", text)) and path[1] in columns.Columns._fields:
        fields = getattr(columns, RECORDS[path[1]]).names if path[1] in RECORDS else ()
        field = target.attr if isinstance(target, ast.Attribute) else None
        yield from [f"{path[1]}.{name}" for name in fields if field in (None, name)] or [path[1]]


def _wrong(sources: Mapping[str, str]) -> dict[str, tuple[set[str], set[str]]]:
    """By column, (modules that its comment names, modules that write it), if the two differ."""
    named, written = _named(sources["columns"]), _written(sources)
    assert named.keys() == _columns() and written.keys() <= named.keys()
    return {name: (said, written[name]) for name, said in named.items() if said != written[name]}


def test_a_column_names_the_kernels_that_write_it() -> None:
    assert not _wrong(SOURCES)


@pytest.mark.parametrize(
    ("line", "column"),
    [
        ("c.rows[row].state = 3", "rows.state"),
        ("c.rows[row].holds += 1", "rows.holds"),
        ("a, c.rows[row].last = 1, 2", "rows.last"),
        ("own = c.size_classes[0]; own.staging -= 1", "size_classes.staging"),
        ("rows = c.rows; a, one = 1, rows[row]; one.same = 1", "rows.same"),
        ("c.table[row] = 0", "table"),
        ("c.state[ENTRIES] += 1", "state"),
        ("c.pages[row >> 6] = 0", "pages"),
    ],
)
def test_a_module_that_a_comment_does_not_name_is_found(line: str, column: str) -> None:
    more = f"{SOURCES['quotas']}\n\n@kernel\ndef more(c, row):\n    {line}\n"
    assert _wrong({**SOURCES, "quotas": more}).keys() == {column}


def test_a_record_that_is_written_whole_is_all_of_its_columns() -> None:
    more = f"{SOURCES['sole_copies']}\n\n@kernel\ndef more(c, row):\n    c.rows[row] = c.rows[0]\n"
    assert {f"rows.{field}" for field in columns.ROW.names or ()} == _wrong({**SOURCES, "sole_copies": more}).keys()


def test_a_comment_that_names_a_module_that_does_not_write_is_found() -> None:
    said = SOURCES["columns"].replace(
        '("state", "u1"),  # written by lists', '("state", "u1"),  # written by lists, table'
    )
    assert said != SOURCES["columns"] and _wrong({**SOURCES, "columns": said}).keys() == {"rows.state"}
