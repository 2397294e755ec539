"""The `raykv` command in a terminal of a given width."""

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

STYLE = re.compile(r"\x1b\[[0-9;]*m")


def in_terminal(columns: int, *args: str, address: str, typed: str = "", code: int = 0) -> str:
    """The output of a command on a terminal of so many columns, without colours.

    typed: the input that is typed there. code: the exit code that the command must have.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "raykv.cli", *args]
    os.write(ours, typed.encode())
    with subprocess.Popen(
        command, env={**_sizeless(), "RAY_ADDRESS": address}, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE
    ) as run:
        os.close(theirs)
        written = b""
        while part := _read(ours):
            written += part
        _, errors = run.communicate(timeout=60)
    os.close(ours)
    assert run.returncode == code, errors
    return STYLE.sub("", written.decode().replace("\r\n", "\n"))


def _sizeless() -> dict[str, str]:
    """The environment without LINES and COLUMNS of another terminal, which libreadline may have set."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}


def _read(terminal: int) -> bytes:
    """Read; b"" once nobody has the other end open, which Linux reports as an error."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


class Tmux:
    """A command in a terminal of a tmux server of its own. When it ends, `rc=` and `stty -a` are shown."""

    def __init__(self, columns: int, *args: str, address: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        command = shlex.join([sys.executable, "-m", "raykv.cli", *args])
        script = f"trap : INT; echo before; {command}; echo rc=$?; stty -a; exec cat"  # Ctrl-C must not end the shell
        size = ("-x", str(columns), "-y", "24")
        self._ask("-f", os.devnull, "new-session", "-d", *size, "-e", f"RAY_ADDRESS={address}", "sh", "-c", script)

    def __enter__(self) -> "Tmux":
        return self

    def __exit__(self, *_: object) -> None:
        self._ask("kill-server")
        self._folder.cleanup()

    def shown(self) -> str:
        return self._ask("capture-pane", "-p")

    def press(self, key: str) -> None:
        """key: a name of tmux, as "q" or "C-c"."""
        self._ask("send-keys", key)

    def written(self, file: Path) -> None:
        """From now on append all output of the command to a file, unchanged."""
        file.touch()
        self._ask("pipe-pane", f"exec cat >> {shlex.quote(str(file))}")

    def _ask(self, *args: str) -> str:
        command = ["tmux", "-S", f"{self._folder.name}/socket", *args]
        done = subprocess.run(command, env=_sizeless(), capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout
