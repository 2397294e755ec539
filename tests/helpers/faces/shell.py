"""Runs commands as a user types them: with this environment's programs, and without the tests' PYTHONPATH."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIG_DFL, SIGINT, signal
from typing import Any

from helpers.pools import eventually


def typed(command: str, folder: Path, **environment: str) -> str:
    """Run lines of the shell. Returns their output; all lines must succeed."""
    done = subprocess.run(_bash(command), env=_surroundings(environment), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def running(command: str, folder: Path, ready: Callable[[], bool], **environment: str) -> Iterator[None]:
    """Start a command that runs until Ctrl-C, and wait until it is ready."""
    with tempfile.TemporaryFile("w+") as said:
        whole: dict[str, Any] = {
            "env": _surroundings(environment),
            "cwd": folder,
            "stdout": said,
            "stderr": subprocess.STDOUT,
        }
        # In the background of a shell, tests and the commands that they start would ignore Ctrl-C.
        process = subprocess.Popen(_bash(f"exec {command}"), **whole, preexec_fn=lambda: signal(SIGINT, SIG_DFL))
        try:
            eventually(lambda: process.poll() is not None or ready(), deadline=600)
            said.seek(0)
            assert process.poll() is None, f"{command}\n{said.read()}"
            yield
        finally:
            process.send_signal(SIGINT)
            process.wait(timeout=120)


def _bash(command: str) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", command]


def _surroundings(more: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    return {**kept, "PATH": path, **more}
