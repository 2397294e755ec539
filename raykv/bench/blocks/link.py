"""`raykv bench cross --link`: blocks over a link of a given rate, delay and loss, beside iperf3 on the same link.

A virtual cable joins two network namespaces of this machine. In each namespace, a process has an arena and a node
store's transport. The bench needs root, iproute2, nftables and iperf3.

One process runs `python -m raykv.bench.blocks.link serve`, the other `... read OFFER`. Each answers on stdout.
"""

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.arena.arena import Arena
from raykv.bench.blocks import networks
from raykv.config import MIB
from raykv.protocol.location import COUNTER_BITS, LOCATION, Address
from raykv.protocol.transfers import PULLED
from raykv.system.jit import compile_all
from raykv.transports.base import Peer, PullRequest
from raykv.transports.tcp import Tcp

BLOCK_BYTES, SLAB_BYTES = 2 * MIB, 64 * MIB
LARGE, SMALL = 512 * MIB, 8 * MIB  # bytes of a large and of a small pull
WARM, PAIRS = 3, 6
IPERF_S = 2
THERE, HERE = "10.78.0.1", "10.78.0.2"
EXAMPLE = "--link 10gbit or --link 10gbit,1ms,0.1%"


class Link(NamedTuple):
    """rate: Gbit/s. delay: milliseconds in one direction. loss: percent of packets. 0 sets no rate, delay or loss."""

    rate: float = 0.0
    delay: float = 0.0
    loss: float = 0.0


def parse(text: str) -> Link:
    """Parse a link such as "10gbit,1ms,0.1%". Parts may be missing. Raises ValueError for other texts."""
    units = {"gbit": "rate", "ms": "delay", "%": "loss"}
    parts = [re.fullmatch(r"(\d+(?:\.\d+)?)(gbit|ms|%)", part.strip()) for part in text.split(",")]
    found = {units[part[2]]: float(part[1]) for part in parts if part}
    if len(found) < len(parts):
        raise ValueError(f"link {text!r}: give a rate, a delay, a loss, or some of them, as in {EXAMPLE}")
    return Link(**found)


# ---------------------------------------------------------------------- the link


@contextmanager
def ends(link: Link) -> Iterator[tuple[int, int]]:
    """Run two processes in network namespaces at the two ends of the link. Yields their process ids."""
    with networks.namespaces(2, ("nft", "iperf3")) as (there, here):
        networks.run("ip", "link", "add", "lane", "netns", there, "type", "veth", "peer", "name", "lane", "netns", here)
        for pid, address in ((there, THERE), (here, HERE)):
            networks.inside(pid, "ip", "address", "add", f"{address}/24", "dev", "lane")
            networks.inside(pid, "ip", "link", "set", "lane", "up")
            networks.inside(pid, "ip", "link", "set", "lo", "up")
            _shape(pid, link)
        yield there, here


def _shape(pid: int, link: Link) -> None:
    """Apply the link's rate, delay and loss to packets that leave a namespace."""
    if link.delay:
        networks.inside(
            pid, "tc", "qdisc", "add", "dev", "lane", "root", "netem", "delay", f"{link.delay}ms", "limit", 100_000
        )
    if link.rate:
        where = ["parent", "1:"] if link.delay else ["root"]
        limits = ["burst", "1mb", "latency", "4ms"]  # limits of the queue before the link
        networks.inside(pid, "tc", "qdisc", "add", "dev", "lane", *where, "tbf", "rate", f"{link.rate}gbit", *limits)
    if link.loss:
        networks.inside(pid, "nft", "add", "table", "ip", "lane")
        networks.inside(pid, "nft", "add", "chain", "ip", "lane", "out", "{ type filter hook output priority 0; }")
        share = f"{round(link.loss * 1000)}"
        networks.inside(
            pid, "nft", "add", "rule", "ip", "lane", "out", "numgen", "random", "mod", 100_000, "<", share, "drop"
        )


# ---------------------------------------------------------------------- the two ends


def _arena(name: str) -> Any:
    """Return (arena of LARGE bytes, location of each slot, key of each slot). Each turn raises the locations' `gen`."""
    compile_all("raykv.arena")
    slabs, slots = LARGE // SLAB_BYTES, SLAB_BYTES // BLOCK_BYTES
    arena = Arena.create(f"/dev/shm/raykv-bench-{name}", b"raykv bench link", SLAB_BYTES, slabs)
    while arena.offered < slabs:
        arena.offer_next()
    arena.raise_epoch(1)
    where = np.zeros(slabs * slots, LOCATION)
    where["slab"], where["slot"] = np.divmod(np.arange(len(where)), slots)
    where["bytes"], where["slab_gen"] = BLOCK_BYTES, (1 << COUNTER_BITS) + 1
    where["gen"] = (1 << COUNTER_BITS) + 2
    return arena, where, np.random.default_rng(0).integers(0, 256, (len(where), 16), np.uint8)


def _serve() -> None:
    arena, where, keys = _arena("there")
    try:
        blocks = np.random.default_rng(1).integers(0, 256, (len(where), BLOCK_BYTES), np.uint8)
        assert arena.write(where, keys, blocks).all()
        offer = Tcp(arena, THERE).offer()
        assert offer
        subprocess.Popen(["setpriv", "--pdeathsig=KILL", "iperf3", "-s", "-B", THERE], stdout=subprocess.DEVNULL)
        print(json.dumps([offer.host, offer.port, offer.token.hex()]), flush=True)
        sys.stdin.read()
    finally:
        arena.close(unlink=True)


class Reader:
    """Pulls into an arena of this process."""

    def __init__(self, offer: list[Any]) -> None:
        self.arena, self.where, self.keys = _arena("here")
        self.offer = Address(offer[0], offer[1], bytes.fromhex(offer[2]))
        self.tcp = Tcp(self.arena, HERE)
        self.lane = self.tcp.lane(Peer("there", None), self.offer)
        self.target = self.where.copy()
        self.pull(0, LARGE)  # maps the slots

    def pull(self, start: int, size: int) -> float:
        """Seconds to pull `size` bytes from byte `start` on."""
        part = slice(start // BLOCK_BYTES, (start + size) // BLOCK_BYTES)
        self.target["gen"][part] += 1
        request = PullRequest(self.where[part], self.keys[part], self.arena, self.target[part], time.monotonic() + 60)
        begin = time.perf_counter()
        verdicts: NDArray[np.uint8] = self.tcp.pull(Peer("there", None), self.offer, request)
        assert (verdicts == PULLED).all(), f"{(verdicts != PULLED).sum()} blocks did not come"
        return time.perf_counter() - begin

    def iperf3(self) -> float:
        """Bytes per second that iperf3 transfers with four flows."""
        sizes = ["-P", "4", "-t", str(IPERF_S), "-O", "1"]
        done = networks.run("iperf3", "-c", THERE, "-R", "-J", *sizes)
        return float(json.loads(done)["end"]["sum_received"]["bits_per_second"]) / 8

    def two(self) -> list[float]:
        """Seconds of two concurrent readers, each of which pulls half of the blocks."""
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(lambda start: self.pull(start, LARGE // 2), (0, LARGE // 2)))

    def small_beside_large(self) -> float:
        """Seconds of a small pull that starts during a large pull."""
        with ThreadPoolExecutor(1) as threads:
            large = threads.submit(self.pull, SMALL, LARGE - SMALL)
            time.sleep(LARGE / 8e9)
            seconds = self.pull(0, SMALL)
            assert not large.done(), "the large one was done before"
            large.result()
        return seconds


def _read(offer: list[Any]) -> None:
    reader = Reader(offer)
    try:
        for _ in range(WARM):
            reader.pull(0, LARGE)
        pairs = [(LARGE / reader.pull(0, LARGE), reader.iperf3()) for _ in range(PAIRS)]
        alone = [reader.pull(0, SMALL) for _ in range(4 * PAIRS)]
        beside = [reader.small_beside_large() for _ in range(PAIRS)]
        readers = [reader.two() for _ in range(PAIRS)]
        figures = {
            "read_gbps": statistics.median(ours for ours, _ in pairs) / 1e9,
            "iperf3_gbps": statistics.median(floor for _, floor in pairs) / 1e9,
            "read_of_iperf3": statistics.median(ours / floor for ours, floor in pairs),
            "two_readers_slow_of_fast": statistics.median(max(pair) / min(pair) for pair in readers),
            "small_ms": statistics.median(alone) * 1e3,
            "small_beside_large_ms": statistics.median(beside) * 1e3,
            "streams": reader.lane.streams,
        }
        print(json.dumps(figures), flush=True)
    finally:
        reader.tcp.close()
        reader.arena.close(unlink=True)


def run(text: str) -> dict[str, Any]:
    """Return median GB/s (1e9 bytes) over a link. Raises ValueError for a bad text, RuntimeError if a command fails."""
    link = parse(text)
    command = [sys.executable, "-m", "raykv.bench.blocks.link"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ends(link) as (there, here), ExitStack() as stack:
        server = stack.enter_context(subprocess.Popen([*networks.enter(there), *command, "serve"], **pipes))  # type: ignore[call-overload]
        stack.callback(server.stdin.close)
        offer = server.stdout.readline().strip()
        read = subprocess.run([*networks.enter(here), *command, "read", offer], stdout=subprocess.PIPE, text=True)
    if read.returncode:
        raise RuntimeError(f"the reader ended with {read.returncode}")
    return {"link": text, **json.loads(read.stdout)}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve()
    else:
        _read(json.loads(sys.argv[2]))
