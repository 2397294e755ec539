"""Time that several nodes take to read one node's blocks at the same time, over links of a given rate.

    python benchmarks/fan_out.py [--readers 4] [--gbit 1] [--turns 3] [--json]

Each node of a Ray cluster is a network namespace with a cable to a switch. A cable carries --gbit Gbit/s in each
direction. One node stores 512 MiB of blocks. In one turn, one reader copies all blocks to its node. In the next turn,
all readers copy all blocks concurrently. The figure is the time of the last reader divided by the time of a single
reader. If all readers read from the first node, the figure equals the number of readers. Some reads may also be
incomplete, since a pull may take only 2 s plus 1 s per 100 MB. In a chain, each reader reads the copies of the previous
reader. The bench needs root, iproute2, 2 GiB of memory per node, and two processors per 8 Gbit/s of all links together.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from raykv.bench.blocks.networks import enter, inside, namespaces, run

MIB = 1 << 20
BLOCK_BYTES, BLOCKS = 2 * MIB, 256
MEMORY = 1024 * MIB  # bytes of memory per node
OWN = 1e9  # a locality that stores blocks on the writer's node
PORT = 6399
RAY = Path(sys.executable).with_name("ray")
ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    **os.environ,
    **{"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)},
}
READY_S = 120.0


def address(node: int) -> str:
    return f"10.79.0.{node + 1}"


@contextmanager
def plugged(nodes: int, gbit: float) -> Iterator[list[int]]:
    """Start a process in the network namespace of each node. The switch has its own namespace. Yields process ids."""
    with namespaces(1 + nodes) as (switch, *ends):
        inside(switch, "ip", "link", "add", "switch", "type", "bridge")
        inside(switch, "ip", "link", "set", "switch", "up")
        shape = ["root", "tbf", "rate", f"{gbit}gbit", "burst", "1mb", "latency", "50ms"]
        for node, pid in enumerate(ends):
            port = f"port{node}"
            run("ip", "link", "add", "eth0", "netns", pid, "type", "veth", "peer", "name", port, "netns", switch)
            inside(switch, "ip", "link", "set", port, "master", "switch", "up")
            inside(switch, "tc", "qdisc", "add", "dev", port, *shape)
            inside(pid, "ip", "link", "set", "lo", "up")
            inside(pid, "ip", "address", "add", f"{address(node)}/24", "dev", "eth0")
            inside(pid, "ip", "link", "set", "eth0", "up")
            inside(pid, "tc", "qdisc", "add", "dev", "eth0", *shape)
        yield ends


@contextmanager
def cluster(ends: list[int]) -> Iterator[None]:
    """Run a raylet in each network namespace. The first raylet is the head's."""
    room = ["--num-cpus=2", f"--object-store-memory={100 * MIB}", "--block"]
    with ExitStack() as stack:
        for node, pid in enumerate(ends):
            head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
            where = [f"--address={address(0)}:{PORT}"] if node else head
            words = [*enter(pid), str(RAY), "start", *where, f"--node-ip-address={address(node)}", *room]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            raylet = stack.enter_context(subprocess.Popen(words, env=ENVIRONMENT, cwd=ROOT, **pipes))
            stack.callback(raylet.terminate)
            said = list[str]()
            assert raylet.stdout is not None
            while not any("Ray runtime started" in line for line in said):  # else raylets may share a socket
                said.append(raylet.stdout.readline())
                if not said[-1]:
                    raise RuntimeError(f"{' '.join(map(str, words))}: {''.join(said)}")
        yield


class Client:
    """A process on one node that stores the blocks, or copies them to its node."""

    def __init__(self) -> None:
        import raykv

        self.cache = raykv.attach("fan-out").cache(
            model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK_BYTES
        )

    def keys(self, turn: int) -> Any:
        return self.cache.keys(np.arange(BLOCKS * 16) + turn * BLOCKS * 16)

    def store(self, turn: int) -> int:
        """Store the blocks. Returns the number of nodes that have the stored blocks."""
        stored = self.cache.store(self.keys(turn), np.full((BLOCKS, BLOCK_BYTES), turn, np.uint8), wait=True)
        assert stored == BLOCKS, f"{stored} of {BLOCKS} blocks were stored"
        with self.cache.match(self.keys(turn)) as match:
            return len(match.nodes)

    def fetch(self, turn: int, at: float) -> tuple[float, int]:
        """Copy the blocks to this node, starting at `at`. Returns (Unix time of the end, number of blocks copied)."""
        keys = self.keys(turn)
        time.sleep(max(0.0, at - time.time()))
        with self.cache.match(keys) as match:
            got = match.fetch(whole=True)
        return time.time(), got


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds. Raises AssertionError after READY_S."""
    end = time.monotonic() + READY_S
    while not condition():
        assert time.monotonic() < end, f"no {what} after {READY_S:.0f} s"
        time.sleep(0.5)


def all_offered(pool: Any) -> bool:
    """Whether the stores offer all their memory, which they prepare slab by slab."""
    return all(node["slabs"] + node["spare_slabs"] == node["limit"] for node in pool.stats()["nodes"].values())


def measure(readers: int, turns: int) -> dict[str, Any]:
    """Return the seconds of one reader and of all readers, in each turn. Runs in the head's network namespace."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    import raykv

    ray.init(address=f"{address(0)}:{PORT}", log_to_driver=False, logging_level=40)
    wait_for(lambda: len(ray.nodes()) == 1 + readers, "raylets")
    pool = raykv.start(raykv.PoolConfig(name="fan-out", cpu_memory=MEMORY, locality=OWN))
    try:
        wait_for(lambda: all_offered(pool), "memory")
        made: Any = ray.remote(num_cpus=0)(Client)
        nodes = [node["NodeID"] for node in sorted(ray.nodes(), key=lambda node: node["NodeManagerAddress"])]
        places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        writer, *others = [made.options(scheduling_strategy=place).remote() for place in places]
        alone: list[float] = []
        together: list[float] = []
        came: list[float] = []

        def stored(turn: int) -> bool:
            """Free the last turn's slots, and store blocks. Returns whether all blocks are on the writer's node."""
            pool.clear()
            return bool(ray.get(writer.store.remote(turn)) == 1)

        for turn in range(2 + 2 * turns):
            some = others if turn % 2 else others[:1]
            wait_for(partial(stored, turn), "room on the writer's node")
            at = time.time() + 1.0
            ends, blocks = zip(*ray.get([reader.fetch.remote(turn, at) for reader in some]), strict=True)
            if turn >= 2:  # the first two turns open the connections
                (together if turn % 2 else alone).append(max(ends) - at)
                came.append(sum(blocks) / (BLOCKS * len(some)))
        route = pool.stats()["transports"][0]["transport"]
    finally:
        pool.stop()
        ray.shutdown()
    ratio = statistics.median(both / one for one, both in zip(alone, together, strict=True))
    return {"alone_s": alone, "together_s": together, "ratio": ratio, "came": min(came), "transport": route}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--readers", type=int, default=4)
    options.add_argument("--gbit", type=float, default=1.0)
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--json", action="store_true")
    options.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.inside:
        print(json.dumps(measure(given.readers, given.turns)), flush=True)
        return
    with plugged(1 + given.readers, given.gbit) as ends, cluster(ends):
        again = [sys.executable, __file__, "--inside", f"--readers={given.readers}", f"--turns={given.turns}"]
        output = subprocess.check_output([*enter(ends[0]), *again], env=ENVIRONMENT, cwd=ROOT, text=True)
    answer = output.splitlines()[-1]
    found = json.loads(answer)
    if given.json:
        print(answer)
        return
    alone, together = (statistics.median(found[name]) for name in ("alone_s", "together_s"))
    print(f"one reader {alone:.2f} s, {given.readers} readers {together:.2f} s, {found['ratio']:.2f} times as long")
    print(f"{found['came']:.0%} of the blocks came, by {found['transport']}")


if __name__ == "__main__":
    main()
