"""The raylets of all Ray clusters on this machine, as far as this process can see the machine's processes."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

CLUSTER_BYTES = 8


def cluster_id(session: str) -> bytes:
    """Return an id of CLUSTER_BYTES for a Ray cluster. session: Ray's name for the cluster's session."""
    return hashlib.sha256(session.encode()).digest()[:CLUSTER_BYTES]


def clusters() -> set[bytes]:
    """Return the `cluster_id` of each Ray cluster that has nodes on this machine."""
    return {cluster_id(options(process).get("session-name", "")) for process in processes()}


def nodes() -> set[str]:
    """Return the Ray node ids of all raylets on this machine."""
    return {options(process).get("node_id", "") for process in processes()}


def processes(proc: str = "/proc") -> Iterator[Path]:
    """Yield the /proc folder of each raylet."""
    for process in Path(proc).iterdir():
        try:
            if process.name.isdigit() and (process / "comm").read_bytes().strip() == b"raylet":
                yield process
        except OSError:  # the process has just ended
            continue


def options(process: Path) -> dict[str, str]:
    """Return a raylet's options `--name=value`; empty if the raylet has just ended."""
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(word.lstrip("-").split("=", 1) for word in words if word.startswith("--") and "=" in word)
