"""Programs in strings, which another interpreter runs: mypy does not check them."""

import ast
from importlib import import_module
from pathlib import Path
from textwrap import dedent

from helpers.project.pages import ROOT

OURS = ("raykv", "actors", "helpers")


def programs(path: Path) -> list[ast.Module]:
    """The strings of a file that are Python programs and import our modules."""
    texts = [
        node.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import " in node.value
    ]
    found = []
    for text in texts:
        try:
            found.append(ast.parse(dedent(text)))
        except SyntaxError:
            continue  # prose, not Python
    return found


def imported(program: ast.Module) -> list[tuple[str, str]]:
    """(module, name) of each of our names that a program imports."""
    return [
        (node.module, alias.name)
        for node in ast.walk(program)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS
        for alias in node.names
    ] + [
        (alias.name, "__name__")
        for node in ast.walk(program)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] in OURS
    ]


def has(module: str, name: str) -> bool:
    try:
        found = import_module(module)
    except ModuleNotFoundError:
        return False
    if hasattr(found, name):
        return True
    try:
        import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def test_programs_import_what_there_is() -> None:
    files = [path for folder in ("raykv", "actors", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    asked = {(path.relative_to(ROOT), *names) for path in files for each in programs(path) for names in imported(each)}
    assert len(asked) > 20, "some programs are found"
    missing = [f"{file}: {name} of {module}" for file, module, name in sorted(asked) if not has(module, name)]
    assert not missing
