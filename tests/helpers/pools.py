"""Tests of a running pool share this, in pytest's process and in Ray's workers."""

import contextlib
import functools
import inspect
import logging
import math
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raykv
from raykv.cluster import named_actors
from raykv.config import METADATA_DEADLINE_S
from raykv.keys import Keys
from raykv.protocol.location import LOCATION

T = TypeVar("T")
MIB = 1 << 20
BLOCK = 256 << 10
# Found, not imported: NIXL imports torch, and every worker of a test imports this module.
WITH_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed here")
TRANSPORTS = [pytest.param("nixl", marks=WITH_NIXL), "tcp", "object_store"]
WAYS = {"socket": "auto", "ray": "object_store"}  # ways to the directory, each with the transport that selects it
both_ways = pytest.mark.parametrize("transport", WAYS.values(), ids=WAYS)
PATIENCE_S = 5.0  # deadline of the tests' pools: long, as a busy machine must not change results
ROUTED_S = 10.0  # deadline of pools that routers ask, as routers wait only a fifth of it


def both_ways_at_once(test: Callable[..., None]) -> Callable[..., None]:
    """Like `both_ways`, for a test that mostly waits: it runs in two threads at once, each with a pool."""

    @functools.wraps(test)
    def at_once(**fixtures: Any) -> None:
        with ThreadPoolExecutor(len(WAYS)) as threads:
            running = {way: threads.submit(test, **fixtures, transport=WAYS[way]) for way in WAYS}
        for way, done in running.items():
            if error := done.exception():
                error.add_note(f"on the way {way!r}")
                raise error

    asked = inspect.signature(test)
    others = [parameter for name, parameter in asked.parameters.items() if name != "transport"]
    at_once.__signature__ = asked.replace(parameters=others)  # type: ignore[attr-defined]
    return at_once


@contextlib.contextmanager
def on_way(way: str, start: Callable[..., raykv.KVPool]) -> Iterator[raykv.KVPool]:
    """A pool whose directory is called on one of the WAYS. Checks that no call went another way or failed."""
    pool = start(transport=WAYS[way])
    pool.session.directory.faults.clear()
    yield pool
    stats, directory = pool.stats(), pool.session.directory
    assert directory.line.way == way and not directory.faults
    if way == "ray":
        assert (stats["socket"], stats["connections"]) == (None, 0)
    else:
        assert stats["socket"].rpartition(":")[0] == ray.util.get_node_ip_address()
        eventually(lambda: pool.stats()["connections"] >= 3)  # of this client, and of both stores
    eventually(lambda: settled(pool))


def payload(keys: NDArray[np.uint8], block_bytes: int) -> NDArray[np.uint8]:
    """The only right content of the blocks of these keys: (n, block_bytes) uint8."""
    seeds = keys.view(np.uint64).reshape(-1, 2)
    words = np.arange(block_bytes // 8, dtype=np.uint64)[None, :]
    with np.errstate(over="ignore"):
        mixed = (words + seeds[:, :1]) * np.uint64(0x9E3779B97F4A7C15) ^ seeds[:, 1:]
    return mixed.view(np.uint8).reshape(len(keys), block_bytes)


def eventually(
    check: Callable[[], T], deadline: float = 90.0, seen: Callable[[], object] = lambda: "", pause: float = 0.05
) -> T:
    """The first true result of `check`. seen: text for a failure. pause: seconds between two checks."""
    end = time.monotonic() + deadline
    while True:
        answer = check()
        if answer:
            return answer
        assert time.monotonic() < end, f"still {answer!r} after {deadline} s {seen()}"
        time.sleep(pause)


def hurry(pool: raykv.KVPool) -> raykv.KVPool:
    """Give this process the short deadline that engines have by default."""
    pool.session.directory.deadline = METADATA_DEADLINE_S
    return pool


def tokens(seed: int, blocks: int) -> NDArray[np.int64]:
    """Tokens of so many blocks of 16 tokens. Equal seeds give equal prefixes."""
    return np.random.default_rng(seed).integers(0, 50_000, 16 * blocks)


class Reading(NamedTuple):
    """A match and its read: numbers of blocks leased, read, and read wrong, and the nodes that had them."""

    matched: int
    read: int
    wrong: int
    nodes: list[str]


def read(cache: raykv.KVCache, keys: Keys, verify: bool = False) -> Reading:
    with cache.match(keys) as match:
        out = np.zeros((match.num_blocks, cache.block_bytes), np.uint8)
        n = match.read(out, verify=verify)
        wrong = int((out[:n] != payload(keys[:n], cache.block_bytes)).any(axis=1).sum())
        return Reading(match.num_blocks, n, wrong, match.nodes)


def a_cache(pool: raykv.KVPool, model: str = "m", block_bytes: int = BLOCK) -> raykv.KVCache:
    return pool.cache(model=model, dtype="uint8", layout="rows", block_tokens=16, block_bytes=block_bytes)


def store(cache: raykv.KVCache, keys: Keys, start: int = 0) -> int:
    return cache.store(keys, payload(keys[start:], cache.block_bytes), start)


def holds(cache: raykv.KVCache, keys: Keys) -> bool:
    """Whether all blocks can be read. AssertionError if one is wrong."""
    found = read(cache, keys)
    assert not found.wrong
    return found.read == len(keys)


def keep(cache: raykv.KVCache, keys: Keys) -> None:
    """Store until all blocks can be read."""
    eventually(lambda: store(cache, keys) >= 0 and holds(cache, keys))


def come_back(cache: raykv.KVCache, prompts: list[Keys], workers: Sequence[Any] = ()) -> None:
    """Wait until this process and the workers can read all prompts again."""
    for number, keys in enumerate(prompts):

        def seen(keys: Keys = keys, number: int = number) -> str:
            return f"prompt {number}: {read(cache, keys)}, faults {cache.session.directory.faults}"

        eventually(lambda keys=keys: holds(cache, keys), seen=seen)  # type: ignore[misc]
        for there in workers:
            eventually(lambda there=there, keys=keys: ray.get(there.holds.remote(keys)))  # type: ignore[misc]


class Worker:
    """An engine as an actor, which `worker` pins to a node."""

    def __init__(self, pool: str, be_patient: bool = True) -> None:
        self.pool = raykv.attach(pool)
        if not be_patient:
            hurry(self.pool)
        self.matches: dict[bytes, raykv.Match] = {}

    def cache(self, model: str = "m", block_bytes: int = BLOCK) -> raykv.KVCache:
        return a_cache(self.pool, model, block_bytes)

    def pid(self) -> int:
        return os.getpid()

    def store(self, keys: Keys, **cache: Any) -> int:
        return store(self.cache(**cache), keys)

    def read(self, keys: Keys, **cache: Any) -> Reading:
        return read(self.cache(**cache), keys)

    def keep(self, keys: Keys) -> None:
        keep(self.cache(), keys)

    def holds(self, keys: Keys) -> bool:
        return holds(self.cache(), keys)

    def lease(self, keys: Keys, **cache: Any) -> int:
        """Match, and keep the match. Returns how many blocks it leased."""
        match = self.matches[keys.tobytes()] = self.cache(**cache).match(keys)
        return match.num_blocks

    def release(self, keys: Keys) -> None:
        self.matches.pop(keys.tobytes()).release()

    def churn(
        self, seconds: float, seed: int, prompts: int, blocks: int, while_there: str = "/"
    ) -> tuple[int, int, int]:
        """Store and read the same prompts as other workers. Returns (blocks stored, read, read wrong).

        Ends after so many seconds, or when the file `while_there` is gone, but not before a block was read.
        """
        cache, random, end = self.cache(), np.random.default_rng(seed), time.monotonic() + seconds
        stored = readings = wrong = 0
        while (time.monotonic() < end and os.path.exists(while_there)) or not readings:
            keys = cache.keys(tokens(int(random.integers(prompts)), int(random.integers(1, blocks + 1))))
            found = read(cache, keys, verify=bool(random.integers(2)))
            readings, wrong = readings + found.read, wrong + found.wrong
            stored += store(cache, keys, start=found.read)
        return stored, readings, wrong

    def faults(self) -> dict[str, int]:
        return dict(self.pool.session.directory.faults)


@contextlib.contextmanager
def load(workers: Sequence[Any], prompts: int, blocks: int) -> Iterator[None]:
    """The workers store and read meanwhile. In the end each must have read blocks, and no block was wrong."""
    ray.get([there.pid.remote() for there in workers])
    with tempfile.NamedTemporaryFile() as going:
        asked = {"prompts": prompts, "blocks": blocks, "while_there": going.name}
        running = [there.churn.remote(math.inf, seed=i, **asked) for i, there in enumerate(workers)]
        yield
    stored, readings, wrong = zip(*ray.get(running), strict=True)
    assert any(stored) and all(readings) and not any(wrong)


class Attached:
    """A client as an actor, which keeps the messages of its log."""

    def __init__(self, pool: str) -> None:
        self.said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("raykv").addHandler(handler)
        self.pool = raykv.attach(pool)

    def warnings(self) -> list[str]:
        return self.said


def worker(pool: raykv.KVPool, node_id: str, kind: type = Worker, **arguments: Any) -> Any:
    pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(kind).options(num_cpus=0, scheduling_strategy=pinned).remote(pool.name, **arguments)


def other_node(pool: raykv.KVPool) -> str:
    return next(str(node["NodeID"]) for node in ray.nodes() if node["Alive"] and node["NodeID"] != pool.node_id)


def node_store(pool: raykv.KVPool, node_id: str) -> Any:
    return named_actors.find_store(pool.name, node_id)


def pid(actor: Any) -> int:
    return int(ray.get(actor.ping.remote()))


def suspend(process: int) -> None:
    """SIGSTOP a process, and wait until all its threads stand still: until then it may still answer."""
    os.kill(process, signal.SIGSTOP)
    eventually(lambda: all(state in "TX" for state in _states(process)))


@contextlib.contextmanager
def stopped(process: int) -> Iterator[None]:
    """A process stands still meanwhile, and then goes on, unless it has been ended: a directory may be replaced."""
    suspend(process)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def _states(process: int) -> list[str]:
    """The states of a process's threads, by the letters of proc(5)."""
    found = []
    for stat in Path(f"/proc/{process}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found.append(stat.read_text().rpartition(")")[2].split()[0])
    return found


def part(pool: raykv.KVPool, what: str) -> Any:
    """The "directory" in charge, the "supervisor", or a node's store."""
    if what == "directory":
        return named_actors.find_directory(pool.name)
    if what == "supervisor":
        return named_actors.find(named_actors.supervisor_name(pool.name))
    return node_store(pool, what)


def kill(pool: raykv.KVPool, *what: str) -> None:
    """SIGKILL these parts, and wait until new processes have taken their places."""
    pids = {name: pid(part(pool, name)) for name in what}
    for process in pids.values():
        os.kill(process, signal.SIGKILL)
    for name, process in pids.items():
        eventually(lambda name=name, process=process: _answers(pool, name) not in (0, process))  # type: ignore[misc]


def _answers(pool: raykv.KVPool, what: str) -> int:
    """The pid of a part; 0 if the part does not answer now."""
    try:
        return int(ray.get(part(pool, what).ping.remote(), timeout=5))
    except (ValueError, ray.exceptions.RayError):
        return 0


def totals(pool: raykv.KVPool) -> dict[str, int]:
    """Slots of all nodes by state, and their sum as `slots`."""
    nodes = pool.stats().get("nodes", {}).values()
    names = ("slots", "free", "writing", "ready", "replica", "staging", "quarantined", "dropped")
    return {name: sum(node[name] for node in nodes) for name in names} if nodes else {}


def settled(pool: raykv.KVPool) -> bool:
    """Whether no block is held, being written or in quarantine, and no slot is missing."""
    stats, slots = pool.stats(), totals(pool)
    if not slots or stats["leases"] or stats["reservations"]:
        return False
    return slots["free"] + slots["ready"] + slots["replica"] == slots["slots"]


def served(pool: raykv.KVPool, nodes: int) -> bool:
    """Whether so many nodes offer all of their memory, and this client knows the directory in charge."""
    stats = pool.stats()
    found = stats.get("nodes", {})
    assert pool.session.local
    whole = [node for node in found.values() if node["slabs"] + node["spare_slabs"] == node["limit"]]
    if len(whole) != nodes or any(node["state"] != "alive" for node in found.values()):
        return False
    if pool.session.local.index != found[pool.node_id]["index"]:
        pool.session.refresh()  # another directory has taken over since this client attached
        return False
    return bool(pool.session.local.arena.epoch == stats["epoch"])


def locations(pool: raykv.KVPool, cache: raykv.KVCache, keys: Keys) -> NDArray[np.void]:
    lease, answer = pool.session.directory.match(pool.node_id, keys, 0)
    pool.session.directory.release(lease)
    assert answer
    return np.frombuffer(answer.source, LOCATION)


def actor_names(pool: str) -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in named if actor["name"].startswith(f"raykv/{pool}/"))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def shm_files(pool: str) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"raykv-{pool}-{os.getuid()}-")]
