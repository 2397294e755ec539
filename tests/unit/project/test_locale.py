"""In any locale, raykv reads its own files, /proc and Ray's files as UTF-8, and a terminal shows what it can."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.project.pages import ROOT

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "RAY_ADDRESS": "127.0.0.1:1"}


@pytest.mark.parametrize(("command", "says"), [("--help", "A KV-cache pool"), ("status", "no Ray cluster answers")])
def test_commands_run_in_a_locale_of_ascii(command: str, says: str) -> None:
    words = [sys.executable, "-m", "raykv.cli", command]
    ran = subprocess.run(words, capture_output=True, text=True, env=os.environ | ASCII, timeout=120)
    assert says in ran.stdout + ran.stderr and "Traceback" not in ran.stderr


def test_what_a_terminal_lacks_is_replaced() -> None:
    code = "import sys; from raykv.cli.main import main; main.callback(); print(chr(0x2581))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=os.environ | ASCII, timeout=120)
    assert (ran.stdout, ran.returncode) == (b"?\n", 0)


def test_every_text_file_is_read_and_written_by_a_named_encoding() -> None:
    folders = ("raykv", "examples", "benchmarks", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200 and not [place for path in files for place in unnamed(path)]


def unnamed(path: Path) -> list[str]:
    """Calls in a file that open another file by the locale's encoding."""
    return [
        f"{path}:{call.lineno}"
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and is_text(call) and not {"encoding"} & {word.arg for word in call.keywords}
    ]


def is_text(call: ast.Call) -> bool:
    """Whether a call opens a file as text: `open(...)`, or a path's `read_text` and `write_text`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in ("read_text", "write_text")
    modes = [word.value for word in call.keywords if word.arg == "mode"] + call.args[1:2]
    binary = any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in modes)
    return isinstance(call.func, ast.Name) and call.func.id == "open" and not binary
