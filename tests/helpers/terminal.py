"""The `raykv` command in a terminal of a given width."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

STYLE = re.compile(r"\x1b\[[0-9;]*m")


def in_terminal(columns: int, *args: str, address: str) -> str:
    """What a command writes to a terminal of so many columns, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "raykv.cli", *args]
    with subprocess.Popen(command, env={**env, "RAY_ADDRESS": address}, stdout=theirs, stderr=subprocess.PIPE) as run:
        os.close(theirs)
        written = b""
        while part := _read(ours):
            written += part
        _, errors = run.communicate(timeout=60)
    os.close(ours)
    assert run.returncode == 0, errors
    return STYLE.sub("", written.decode().replace("\r\n", "\n"))


def _read(terminal: int) -> bytes:
    """Empty once nobody has the other end any more, which Linux says by an error."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""
