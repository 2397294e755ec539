"""Whether raykv is as fast as it was: an earlier commit and this checkout, in turn, in one run.

    python benchmarks/ratchet.py [BEFORE] [--turns 12] [--json]

BEFORE: a commit; by default the one that benchmarks/released names. Each side has a Ray cluster of two raylets and a
pool, whose actors come from its own files, and is asked by raykv's public API: what 512 keys take to match; what a key
takes that four clients look up at once; what 1, 16 and 64 blocks of 2 MiB take to store and to read; what 16 take from
the other node; a start; and, of a directory of a million entries, what 512 take to find and 1024 to insert. Each figure
is a time, divided by the other side's of the same turn: above 1 this checkout is slower. It exits with 1 where the
median is above 1.05, and nine tenths of the turns are above 1. --slower-match US: have matches of this checkout take so
much longer, to see that it is found.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RELEASED = ROOT / "benchmarks" / "released"
MIB = 1 << 20
BLOCK_BYTES, KEYS, CLIENTS = 2 * MIB, 512, 4
MEMORY = 1024 * MIB  # of a node: what CALLS store last is there when it is read
MATCHES, TRIES, PHASE_S, CALLS = 100, 10, 0.5, 4
ENTRIES = 1_000_000
OFTEN = ("match", "lookup", "store 1", "store 16", "store 64", "read 1", "read 16", "read 64", "cross 16", "find")
LAST = {"insert": 12, "start": 8}  # turns; what is inserted evicts what is found
WORSE = 1.05


class Client:
    """A client in a process of its own."""

    def __init__(self, slower_s: float) -> None:
        import raykv

        self.pool, self.slower_s, self.number = raykv.attach("ratchet"), slower_s, 0
        self.small = self.pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=4096)
        self.large = self.pool.cache(model="l", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK_BYTES)
        self.rows = np.random.default_rng(0).integers(0, 255, (64, BLOCK_BYTES), np.uint8)
        self.known = self.small.keys(np.arange(KEYS * 16))

    def keep(self) -> None:
        """Store again what the large blocks have driven out."""
        self.small.store(self.known, np.zeros((KEYS, 4096), np.uint8), wait=True)

    def match(self) -> float:
        """Seconds of a match of KEYS keys: the median."""
        self.keep()
        times = list[float]()
        for _ in range(TRIES * MATCHES):
            if len(times) == MATCHES:
                break
            begin = time.perf_counter()
            with self.small.match(self.known) as match:
                end = time.perf_counter() + self.slower_s
                while self.slower_s and time.perf_counter() < end:  # no sleep is so short
                    pass
            if match.num_blocks == KEYS:  # else it was late: the machine is busy with something else
                times.append(time.perf_counter() - begin)
        assert len(times) == MATCHES, f"{len(times)} of {TRIES * MATCHES} matches found all {KEYS} keys"
        return statistics.median(times)

    def lookups(self) -> int:
        """Keys that were found in PHASE_S."""
        self.keep()
        end, found = time.perf_counter() + PHASE_S, 0
        while time.perf_counter() < end:
            with self.small.match(self.known) as match:
                found += match.num_blocks
        return found

    def store(self, blocks: int) -> tuple[float, Any]:
        """Seconds to store blocks that are new, and their keys. None are late in the end: it is tried again."""
        for _ in range(TRIES):
            self.number += 1
            keys = self.large.keys(np.arange(blocks * 16), salt=f"{os.getpid()}-{self.number}")
            begin = time.perf_counter()
            stored = self.large.store(keys, self.rows[:blocks])
            seconds = time.perf_counter() - begin
            if stored == blocks:
                return seconds, keys
        raise RuntimeError(f"{stored} of {blocks} blocks stored, the last of {TRIES} times")

    def read(self, keys: Any) -> float:
        """Seconds to read these."""
        begin = time.perf_counter()
        with self.large.match(keys) as match:
            read = match.read(self.rows[: len(keys)])
        seconds = time.perf_counter() - begin
        return seconds if read == len(keys) else math.inf  # late, which a median leaves out


class Side:
    """One of the two: its cluster, its pool and its clients."""

    def __init__(self, slower_s: float) -> None:
        import ray
        from ray.cluster_utils import Cluster
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        import raykv

        self.cluster = Cluster()
        room: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 * MIB, "include_dashboard": False}
        nodes = [self.cluster.add_node(**room).node_id for _ in range(2)]
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level=40)
        self.pool = raykv.start(raykv.PoolConfig(name="ratchet", cpu_memory=MEMORY))
        made: Any = ray.remote(num_cpus=0)(Client)
        places = [NodeAffinitySchedulingStrategy(nodes[at], soft=False) for at in (1, 0, 0, 0)]
        self.clients: list[Any] = [made.options(scheduling_strategy=place).remote(slower_s) for place in places]
        self.here, self.get = Client(slower_s), ray.get  # here: on the head, as nodes[0]
        self.get([client.match.remote() for client in self.clients])

    def ask(self, figure: str) -> dict[str, float]:
        """Seconds, by name."""
        name, _, blocks = figure.partition(" ")
        answer: dict[str, float] = getattr(self, f"_{name}")(int(blocks or 0))
        return answer

    def _match(self, _: int) -> dict[str, float]:
        return {"match": self.here.match()}

    def _lookup(self, _: int) -> dict[str, float]:
        return {"lookup": CLIENTS * PHASE_S / sum(self.get([client.lookups.remote() for client in self.clients]))}

    def _store(self, blocks: int) -> dict[str, float]:
        times = [self.here.store(blocks)[0] for _ in range(1 + CALLS)]  # the first takes memory of another size
        return {f"store {blocks}": statistics.median(times[1:])}

    def _read(self, blocks: int) -> dict[str, float]:
        keys = [self.here.store(blocks)[1] for _ in range(CALLS)]
        return {f"read {blocks}": statistics.median(map(self.here.read, keys))}

    def _cross(self, blocks: int) -> dict[str, float]:
        keys = [self.get(self.clients[0].store.remote(blocks))[1] for _ in range(CALLS)]
        return {f"cross {blocks}": statistics.median(map(self.here.read, keys))}

    def _start(self, _: int) -> dict[str, float]:
        import raykv

        begin = time.perf_counter()
        pool = raykv.start(raykv.PoolConfig(name="ratchet-start", cpu_memory=64 * MIB))
        seconds = time.perf_counter() - begin
        pool.stop()
        return {"start": seconds}

    @cached_property
    def _load(self) -> Any:
        """A directory that is full, without Ray."""
        from raykv.bench import directory

        load = directory._Load(directory._Pool(ENTRIES, directory.MIN_NODES), ENTRIES, directory.MIN_NODES)
        load.fill()
        return load

    def _find(self, _: int) -> dict[str, float]:
        for call in range(1 + CALLS):
            self._load.match(KEYS, call > 0)  # the first finds others' data in the caches
        return {"find": statistics.median(self._load.match_s[KEYS][-CALLS:])}

    def _insert(self, _: int) -> dict[str, float]:
        for call in range(1 + CALLS):
            self._load.store(call > 0)
        return {"insert": statistics.median(self._load.store_s[-CALLS:])}

    def close(self) -> None:
        import ray

        self.pool.stop()
        ray.shutdown()
        self.cluster.shutdown()


class Paired(NamedTuple):
    """Ratios of one figure: this checkout's time to the other's."""

    low: float
    median: float
    high: float
    lowest_tenth: float
    seconds: float  # this checkout's, the median

    @classmethod
    def of(cls, turns: list[tuple[float, float]]) -> Paired:
        """turns: (the other's seconds, this checkout's) of each."""
        ratios = sorted(after / before for before, after in turns)
        low, median, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
        return cls(low, median, high, ratios[len(ratios) // 10], statistics.median(after for _, after in turns))

    @property
    def is_worse(self) -> bool:
        return self.median > WORSE and self.lowest_tenth > 1


def compare(before: Callable[[str], dict[str, float]], after: Callable[[str], dict[str, float]], turns: int) -> Any:
    """Paired figures by name. before, after: what the two sides answer."""
    found: dict[str, list[tuple[float, float]]] = {}
    plan = [(figure, turn) for turn in range(1 + turns) for figure in OFTEN]
    plan += [(figure, turn) for figure, count in LAST.items() for turn in range(1, 1 + min(count, turns))]
    for figure, turn in plan:
        first, second = (before, after) if turn % 2 else (after, before)
        answers = {side: side(figure) for side in (first, second)}
        for name in answers[before] if turn else ():  # the first turn warms up
            found.setdefault(name, []).append((answers[before][name], answers[after][name]))
    return {name: Paired.of(pairs) for name, pairs in found.items()}


@contextmanager
def side(files: Path, slower_us: float = 0.0, **environment: str) -> Iterator[Callable[[str], dict[str, float]]]:
    """A Side in a process of its own, whose raykv is in that folder."""
    environment = {**os.environ, "PYTHONPATH": str(files), "RAY_AUTH_MODE": "disabled", **environment}
    command = [sys.executable, __file__, "--side", "--slower-match", str(slower_us)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, env=environment, cwd=files, text=True) as process:
        assert process.stdin and process.stdout
        asked, answers = process.stdin, process.stdout
        assert answers.readline() == f"{files}\n", "raykv comes from elsewhere"

        def ask(figure: str) -> dict[str, float]:
            print(figure, file=asked, flush=True)
            answer: dict[str, float] = json.loads(answers.readline())
            return answer

        yield ask
        asked.close()


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The files of a commit."""
    with tempfile.TemporaryDirectory(prefix="ratchet") as folder:
        files = Path(folder) / "raykv"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(files), commit], check=True)
        try:
            yield files
        finally:
            subprocess.run([*git, "remove", "--force", str(files)], check=True)


def serve(slower_us: float) -> None:
    """Answer figures that are asked for on stdin."""
    import raykv

    answers, sys.stdout = sys.stdout, sys.stderr  # what else prints
    made = Side(slower_us / 1e6)
    print(Path(raykv.__file__).parent.parent, file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(made.ask(line.strip())), file=answers, flush=True)
    made.close()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("before", nargs="?")
    options.add_argument("--turns", type=int, default=12)
    options.add_argument("--slower-match", type=float, default=0.0, metavar="US")
    options.add_argument("--json", action="store_true")
    options.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.side:
        serve(given.slower_match)
        return 0
    commit = given.before or RELEASED.read_text(encoding="utf-8").strip()
    with ExitStack() as stack:
        files = stack.enter_context(worktree(commit))
        before = stack.enter_context(side(files, NUMBA_CACHE_DIR=f"{files}.kernels"))
        figures = compare(before, stack.enter_context(side(ROOT, given.slower_match)), given.turns)
    if given.json:
        print(json.dumps({name: paired._asdict() for name, paired in figures.items()}))
    else:
        print(f"{'':24}{'now':>12}   to {commit[:10]} (quartiles)")
        for name, paired in figures.items():
            quartiles = f"{paired.low:.3f} {paired.median:.3f} {paired.high:.3f}"
            print(f"{name:24}{paired.seconds * 1e6:10,.1f} us   {quartiles}{'   WORSE' * paired.is_worse}")
    return int(any(paired.is_worse for paired in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
