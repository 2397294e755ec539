"""Network namespaces of this machine, and commands in them. They need root and iproute2."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

TOOLS = ("ip", "tc", "nsenter", "unshare", "setpriv")
HOLD = ["setpriv", "--pdeathsig=KILL", "unshare", "--net", "sleep", "infinity"]  # a namespace ends with its process


@contextmanager
def namespaces(count: int, tools: Sequence[str] = ()) -> Iterator[list[int]]:
    """Start processes, each in its own network namespace. Yields their process ids.

    tools: programs that the caller needs besides TOOLS. Raises FileNotFoundError if a program is missing.
    """
    missing = [tool for tool in (*TOOLS, *tools) if not shutil.which(tool)]
    if missing:
        raise FileNotFoundError(f"{missing} missing: apt-get install iproute2 nftables iperf3 util-linux")
    with ExitStack() as stack:
        pids = []
        for _ in range(count):
            holder = stack.enter_context(subprocess.Popen(HOLD))
            stack.callback(holder.kill)
            pids.append(holder.pid)
        while any(_namespace(pid) == _namespace("self") for pid in pids):  # until `unshare` has made the namespaces
            time.sleep(0.01)
        yield pids


def _namespace(pid: int | str) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def enter(pid: int) -> list[str]:
    """Return the prefix that runs a command in the network namespace of a process."""
    return ["nsenter", f"--target={pid}", "--net"]


def inside(pid: int, *command: Any) -> str:
    """Like `run`, but in the network namespace of a process."""
    return run(*enter(pid), *command)


def run(*command: Any) -> str:
    """Run a command. Returns its output. Raises RuntimeError if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip() or done.stdout.strip()
        hint = "; delays need the kernel's module sch_netem" if "netem" in command else "; it takes root"
        raise RuntimeError(f"{' '.join(map(str, command))}: {why}{hint}")
    return done.stdout
