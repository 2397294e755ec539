"""The files of examples/, and the commands in their docstrings."""

import ast
import re
from pathlib import Path

from helpers.project.pages import ROOT

COMMAND = re.compile(r"(?m)^    (\S(?:.*\\\n)*.*)$")
NAMES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def commands(example: str) -> list[str]:
    return COMMAND.findall(ast.get_docstring(ast.parse(source(example).read_text()), clean=False) or "")


def source(example: str) -> Path:
    return ROOT / "examples" / f"{example}.py"
