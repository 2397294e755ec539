"""Commands as a user types them: with this environment's programs, and without the tests' PYTHONPATH."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT


def typed(command: str, folder: Path, **environment: str) -> str:
    """Lines of the shell, which have to succeed: what they print."""
    done = subprocess.run(_bash(command), env=_surroundings(environment), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def running(command: str, until: str, folder: Path, **environment: str) -> Iterator[None]:
    """A command that goes on until Ctrl-C, which has printed `until`."""
    process = subprocess.Popen(
        _bash(f"exec {command}"),
        env=_surroundings(environment),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if until in line:
                break
        else:
            raise AssertionError(f"{command}\n{''.join(said)}")
        yield
    finally:
        process.send_signal(SIGINT)
        process.communicate(timeout=120)


def _bash(command: str) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", command]


def _surroundings(more: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    return {**kept, "PATH": path, **more}
