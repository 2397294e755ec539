"""A Ray node with many faults, which poor_machine.sh makes."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from helpers.cluster.machines import UNSHARE
from helpers.pools import eventually

ADDRESS = "10.79.0.2"


def why_not() -> str:
    """Why such a node can't be made here; "" if it can."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        return "network namespaces can't be made here: it takes root"
    missing = [name for name in ("ip", "nft") if not shutil.which(name, path="/usr/sbin:/usr/bin")]
    return f"{missing} missing: apt-get install iproute2 nftables" if missing else ""


def _node_id() -> str:
    return next((str(node["NodeID"]) for node in ray.nodes() if node["Alive"] and node["NodeName"] == ADDRESS), "")


@contextmanager
def poor_machine(folder: Path, head: str) -> Iterator[Callable[[], str]]:
    """Yields a function that waits until the node has joined, and returns its Ray node id.

    folder: an empty folder. head: address of the Ray cluster.
    """
    script = Path(__file__).with_suffix(".sh")
    with (folder / "log").open("w") as log:
        command = [*UNSHARE, str(script), str(folder), sys.executable, head]
        unshare = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True)
    children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
    first = int(eventually(lambda: children.read_text().strip()))
    try:
        _run(f"ip link add poor type veth peer name cable netns {first}")
        _run("ip address add 10.79.0.1/24 dev poor")
        _run("ip link set poor up")
        assert unshare.stdin
        unshare.stdin.write("plugged in\n")
        unshare.stdin.close()

        def joined() -> str:
            assert unshare.poll() is None, (folder / "log").read_text()
            return _node_id()

        yield lambda: eventually(joined)
        os.kill(first, signal.SIGTERM)  # Ray takes 15 s to notice that a raylet was killed
        eventually(lambda: not _node_id())
    finally:
        unshare.kill()
        unshare.wait()


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)
