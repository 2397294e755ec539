"""Tells whether raykv is as fast as before: times an earlier commit and this checkout alternately in one run.

    python benchmarks/ratchet.py [BEFORE] [--starts 3] [--worse 1.05] [--json]

BEFORE is a commit; by default, the commit that benchmarks/released names. Each of the two sides has its own Ray cluster
of two raylets, and a pool that runs from the side's files. Calls of raykv's public API are timed: a match of 512 keys;
the look-up of a key while four clients look up keys; a store and a read of 1, 16 and 64 blocks of 2 MiB; a read of
16 blocks of the other node; a start. Two calls of a directory of a million entries are also timed: finding 512 entries,
and inserting 1024 entries.

A figure is the time of this checkout divided by the other side's time. Above 1, this checkout is slower. Memory
placement makes the times of equal processes differ by a third, and the times of copies by a factor of three. Other work
on the machine only adds time. So both sides are started several times, and the 10th percentile of a start's times
counts. The ratchet exits with 1 if this checkout takes more than --worse (1.05) times as long, both by the fastest
start of each side and by the median of the starts. --slower-match US makes this checkout's matches slower by US
microseconds, to check that the ratchet detects it. As root, the ratchet lets the kernel compact memory before each
start, since a side without huge pages is slower.
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
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parent.parent
RELEASED = ROOT / "benchmarks" / "released"
MIB = 1 << 20
BLOCK_BYTES, KEYS, CLIENTS = 2 * MIB, 512, 4
OWN = 1e9  # a locality so high that stored blocks stay on the writer's node and evict other blocks there
MEMORY = 1024 * MIB  # bytes per node: enough to keep the blocks of the last CALLS stores until they are read
MATCHES, TRIES, PHASE_S, CALLS = 100, 10, 0.5, 4
OFFERED_S = 60.0
TURNS, FASTEST = 4, 10  # turns per start; the time that counts is longer than 1 / FASTEST of a start's times
ENTRIES = 1_000_000
OFTEN = ("match", "lookup", "store 1", "store 16", "store 64", "read 1", "read 16", "read 64", "cross 16", "find")
LAST = ("insert", "start")  # inserts evict the blocks that "find" looks for
WORSE = 1.05
CORES = sorted(os.sched_getaffinity(0))


class Client:
    """A client in a process of its own."""

    def __init__(self, slower_s: float, directories: list[int]) -> None:
        """directories: process ids of the directories."""
        import raykv

        self.pool, self.slower_s, self.number = raykv.attach("ratchet"), slower_s, 0
        self.pids = [os.getpid(), *directories]
        self.small = self.pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=4096)
        self.large = self.pool.cache(model="l", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK_BYTES)
        self.rows = np.random.default_rng(0).integers(0, 255, (64, BLOCK_BYTES), np.uint8)
        self.known = self.small.keys(np.arange(KEYS * 16))

    def keep(self) -> None:
        """Store the small blocks again, as large blocks may have evicted them."""
        self.small.store(self.known, np.zeros((KEYS, 4096), np.uint8), wait=True)

    def match(self) -> float:
        """Median seconds of a match of KEYS keys."""
        self.keep()
        with on_one_core(self.pids):
            return self._match()

    def _match(self) -> float:
        times = list[float]()
        for _ in range(TRIES * MATCHES):
            if len(times) == MATCHES:
                break
            begin = time.perf_counter()
            with self.small.match(self.known) as match:
                end = time.perf_counter() + self.slower_s
                while self.slower_s and time.perf_counter() < end:  # a sleep would take longer
                    pass
            if match.num_blocks == KEYS:  # a match that is late on a busy machine finds fewer keys
                times.append(time.perf_counter() - begin)
        assert len(times) == MATCHES, f"{len(times)} of {TRIES * MATCHES} matches found all {KEYS} keys"
        return statistics.median(times)

    def fill(self) -> None:
        """Fill this node's memory, so that writers on the other node find no free slots here."""
        stored, end = 0, time.monotonic() + OFFERED_S
        while stored < 2 * MEMORY // BLOCK_BYTES:
            assert time.monotonic() < end, f"{stored} blocks stored in {OFFERED_S:.0f} s"
            now = self.large.store(self._fresh(len(self.rows)), self.rows)
            stored += now
            time.sleep(0.0 if now == len(self.rows) else 0.05)  # the store offers memory slab by slab

    def _fresh(self, blocks: int) -> Any:
        """Return keys of new blocks."""
        self.number += 1
        return self.large.keys(np.arange(blocks * 16), salt=f"{os.getpid()}-{self.number}")

    def lookups(self) -> int:
        """Return the number of keys found in PHASE_S."""
        self.keep()
        end, found = time.perf_counter() + PHASE_S, 0
        while time.perf_counter() < end:
            with self.small.match(self.known) as match:
                found += match.num_blocks
        return found

    def store(self, blocks: int) -> tuple[float, Any]:
        """Store new blocks. Returns (seconds, keys). Repeats a store that is late."""
        for _ in range(TRIES):
            keys = self._fresh(blocks)
            begin = time.perf_counter()
            stored = self.large.store(keys, self.rows[:blocks])
            seconds = time.perf_counter() - begin
            if stored == blocks:
                return seconds, keys
        raise RuntimeError(f"{stored} of {blocks} blocks stored, the last of {TRIES} times")

    def read(self, keys: Any) -> float:
        """Return the seconds to read blocks; inf if the read is late."""
        begin = time.perf_counter()
        with self.large.match(keys) as match:
            read = match.read(self.rows[: len(keys)])
        seconds = time.perf_counter() - begin
        return seconds if read == len(keys) else math.inf  # a late read is never among the fastest


@contextmanager
def on_one_core(pids: list[int]) -> Iterator[None]:
    """Run processes on one core, since the time that one core takes to wake another varies."""
    for pid in pids:
        _pin(pid, {CORES[0]})
    try:
        yield
    finally:
        for pid in pids:
            _pin(pid, set(CORES))


def _pin(pid: int, cores: set[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)


class Side:
    """One of the two compared sides: its cluster, its pool and its clients."""

    def __init__(self, slower_s: float) -> None:
        import ray
        from ray.cluster_utils import Cluster
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        import raykv

        self.cluster = Cluster()
        room: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 * MIB, "include_dashboard": False}
        nodes = [self.cluster.add_node(**room).node_id for _ in range(2)]
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level=40)
        self.pool = raykv.start(raykv.PoolConfig(name="ratchet", cpu_memory=MEMORY, locality=OWN))
        made: Any = ray.remote(num_cpus=0)(Client)
        places = [NodeAffinitySchedulingStrategy(nodes[at], soft=False) for at in (1, 0, 0, 0)]
        ours = [(process.pid, process.cmdline()) for process in psutil.Process().children(recursive=True)]
        directories = [pid for pid, words in ours if words and words[0].startswith("ray::Directory")]
        self.clients: list[Any] = [
            made.options(scheduling_strategy=place).remote(slower_s, directories) for place in places
        ]
        self.here, self.get = Client(slower_s, directories), ray.get  # here: this process, on the head (nodes[0])
        self.here.fill()
        self.get([self.clients[0].fill.remote(), *(client.match.remote() for client in self.clients[1:])])

    def ask(self, figure: str) -> list[float]:
        """Return the seconds of several measurements of a figure."""
        name, _, blocks = figure.partition(" ")
        answer: list[float] = getattr(self, f"_{name}")(int(blocks or 0))
        return answer

    def _match(self, _: int) -> list[float]:
        return [self.here.match(), *(self.get(client.match.remote()) for client in self.clients[1:])]

    def _lookup(self, _: int) -> list[float]:
        return [CLIENTS * PHASE_S / sum(self.get([client.lookups.remote() for client in self.clients]))]

    def _store(self, blocks: int) -> list[float]:
        return [self.here.store(blocks)[0] for _ in range(1 + CALLS)][1:]  # the first store may need other slabs

    def _read(self, blocks: int) -> list[float]:
        keys = [self.here.store(blocks)[1] for _ in range(CALLS)]
        return [self.here.read(each) for each in keys]

    def _cross(self, blocks: int) -> list[float]:
        keys = [self.get(self.clients[0].store.remote(blocks))[1] for _ in range(CALLS)]
        return [self.here.read(each) for each in keys]

    def _start(self, _: int) -> list[float]:
        import raykv

        begin = time.perf_counter()
        pool = raykv.start(raykv.PoolConfig(name="ratchet-start", cpu_memory=64 * MIB))
        seconds = time.perf_counter() - begin
        pool.stop()
        return [seconds]

    @cached_property
    def _load(self) -> Any:
        """A full directory, without Ray."""
        try:
            from raykv.bench.directory import directory
        except ImportError:  # an older commit, whose benches are in one folder
            from raykv.bench import directory  # type: ignore[no-redef]

        load = directory._Load(directory._Pool(ENTRIES, directory.MIN_NODES), ENTRIES, directory.MIN_NODES)
        load.fill()
        return load

    def _find(self, _: int) -> list[float]:
        for call in range(1 + CALLS):
            self._load.match(KEYS, call > 0)  # the first call does not count: the CPU caches hold other data
        return list(self._load.match_s[KEYS][-CALLS:])

    def _insert(self, _: int) -> list[float]:
        for call in range(1 + CALLS):
            self._load.store(call > 0)
        return list(self._load.store_s[-CALLS:])

    def close(self) -> None:
        import ray

        self.pool.stop()
        ray.shutdown()
        self.cluster.shutdown()


class Compared(NamedTuple):
    """Seconds of one figure, by start. before: the other side's seconds. after: this checkout's seconds."""

    before: list[float]
    after: list[float]

    @property
    def ratios(self) -> list[float]:
        return sorted(after / before for before, after in zip(self.before, self.after, strict=True))

    @property
    def best(self) -> float:
        """The ratio of this checkout's fastest start to the other side's fastest start."""
        return min(self.after) / min(self.before)

    def is_worse(self, limit: float) -> bool:
        return min(self.best, statistics.median(self.ratios)) > limit


Ask = Callable[[str], list[float]]  # takes a figure's name, returns seconds of several measurements
Sides = tuple[Ask, Ask]  # (the other commit's, this checkout's)


def compare(sides: Callable[[bool], AbstractContextManager[Sides]], starts: int) -> dict[str, Compared]:
    """Compare all figures. sides: starts both sides; its argument tells whether this checkout starts first."""
    figures = {figure: Compared([], []) for figure in (*OFTEN, *LAST)}
    for start in range(starts):
        with sides(bool(start % 2)) as both:
            for figure, times in _turns(both).items():
                for kept, tries in zip(figures[figure], times, strict=True):
                    kept.append(sorted(tries)[len(tries) // FASTEST])
    return figures


def _turns(both: Sides) -> dict[str, tuple[list[float], list[float]]]:
    """Return the seconds of both sides, by figure."""
    found: dict[str, tuple[list[float], list[float]]] = {figure: ([], []) for figure in (*OFTEN, *LAST)}
    plan = [(figure, turn) for turn in range(1 + TURNS) for figure in OFTEN]
    plan += [(figure, turn) for figure in LAST for turn in range(1, 1 + TURNS // 2)]
    for figure, turn in plan:
        for side in (0, 1) if turn % 2 else (1, 0):
            times = both[side](figure)
            found[figure][side].extend(times if turn else ())  # the first turn is a warm-up
    return found


@contextmanager
def side(files: Path, slower_us: float = 0.0, **environment: str) -> Iterator[Ask]:
    """Run a Side in its own process, which imports raykv from a folder."""
    environment = {**os.environ, "PYTHONPATH": str(files), "RAY_AUTH_MODE": "disabled", **environment}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a worktree has no bytecode yet
    with suppress(OSError):
        Path("/proc/sys/vm/compact_memory").write_text("1", encoding="ascii")
    command = [sys.executable, __file__, "--side", "--slower-match", str(slower_us)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, env=environment, cwd=files, text=True) as process:
        assert process.stdin and process.stdout
        asked, answers = process.stdin, process.stdout
        assert answers.readline() == f"{files}\n", "raykv comes from elsewhere"

        def ask(figure: str) -> list[float]:
            print(figure, file=asked, flush=True)
            answer: list[float] = json.loads(answers.readline())
            return answer

        yield ask
        asked.close()


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit."""
    with tempfile.TemporaryDirectory(prefix="ratchet") as folder:
        files = Path(folder) / "raykv"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(files), commit], check=True)
        try:
            yield files
        finally:
            subprocess.run([*git, "remove", "--force", str(files)], check=True)


def serve(slower_us: float) -> None:
    """Read names of figures from stdin, and print each figure's times."""
    import raykv

    answers, sys.stdout = sys.stdout, sys.stderr  # other prints go to stderr
    made = Side(slower_us / 1e6)
    print(Path(raykv.__file__).parent.parent, file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(made.ask(line.strip())), file=answers, flush=True)
    made.close()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("before", nargs="?")
    options.add_argument("--starts", type=int, default=3)
    options.add_argument("--worse", type=float, default=WORSE, metavar="RATIO")
    options.add_argument("--slower-match", type=float, default=0.0, metavar="US")
    options.add_argument("--json", action="store_true")
    options.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.side:
        serve(given.slower_match)
        return 0
    commit = given.before or RELEASED.read_text(encoding="utf-8").strip()
    with worktree(commit) as files:

        @contextmanager
        def sides(ours_first: bool) -> Iterator[Sides]:
            made = [side(files, NUMBA_CACHE_DIR=f"{files}.kernels"), side(ROOT, given.slower_match)]
            with ExitStack() as stack:
                asks = [stack.enter_context(each) for each in (reversed(made) if ours_first else made)]
                yield (asks[1], asks[0]) if ours_first else (asks[0], asks[1])

        figures = compare(sides, given.starts)
    if given.json:
        print(json.dumps({name: compared._asdict() for name, compared in figures.items()}))
    else:
        print(f"{'':12}{'now':>13}   to {commit[:10]}   by start")
        for name, compared in figures.items():
            ratios = " ".join(f"{ratio:.3f}" for ratio in compared.ratios)
            now, best, worse = min(compared.after) * 1e6, compared.best, "   WORSE" * compared.is_worse(given.worse)
            print(f"{name:12}{now:13,.1f} us   {best:5.3f}   {ratios}{worse}")
    return int(any(compared.is_worse(given.worse) for compared in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
