"""The two ways to the directory, its socket and calls through Ray, behave alike; and clients change between them."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from helpers.line.interrupts import Interrupted, interrupt
from helpers.pools import (
    BLOCK,
    WAYS,
    a_cache,
    both_ways_at_once,
    eventually,
    holds,
    keep,
    kill,
    on_way,
    part,
    pid,
    settled,
    stopped,
    store,
    tokens,
)

import raykv
import raykv.client.session


@pytest.fixture(scope="module", params=WAYS)
def pool(start_for_module: Callable[..., raykv.KVPool], request: pytest.FixtureRequest) -> Iterator[raykv.KVPool]:
    with on_way(request.param, start_for_module) as pool:
        yield pool


# ---------------------------------------------------------------------- faults, on both ways


@pytest.fixture
def faulty(pool: raykv.KVPool) -> Iterator[raykv.KVPool]:
    """A pool for a test of faults. After the test the directory must answer on the same way, and nothing be held."""
    way, epoch = pool.session.directory.line.way, pool.stats()["epoch"]
    yield pool
    directory = pool.session.directory
    eventually(lambda: settled(pool))
    eventually(lambda: directory.nodes() and directory.up)
    assert directory.line.way == way and pool.stats()["epoch"] == epoch
    directory.faults.clear()


@contextmanager
def standing_still(pool: raykv.KVPool) -> Iterator[None]:
    """Stop the directory's process; tests must let it go on before it is replaced."""
    with stopped(pid(part(pool, "directory"))):
        yield


def test_a_call_that_a_signal_interrupts_leaves_no_lease(faulty: raykv.KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call ends at once or, if Ray waits for the answer, when the answer is due."""
    cache = a_cache(faulty)
    keys = cache.keys(tokens(20, 5))
    keep(cache, keys)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with monkeypatch.context() as hasty, standing_still(faulty):
            hasty.setattr(faulty.session.directory, "deadline", 1.0)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(Interrupted):
                cache.match(keys)
    finally:
        signal.signal(signal.SIGALRM, before)
    eventually(lambda: settled(faulty))
    eventually(lambda: holds(cache, keys))


def test_what_a_late_answer_granted_is_not_held(faulty: raykv.KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory executes the calls when nobody waits for the answers any more."""
    cache, directory, node = a_cache(faulty), faulty.session.directory, faulty.node_id
    kept, late = cache.keys(tokens(21, 5)), cache.keys(tokens(22, 5))
    keep(cache, kept)
    lookups = faulty.stats()["lookups"]
    with monkeypatch.context() as hasty, standing_still(faulty), ThreadPoolExecutor(3) as threads:
        hasty.setattr(directory, "deadline", 0.25)
        match = threads.submit(directory.match, node, kept, 0)
        reserve = threads.submit(directory.reserve, node, late, 0)
        pin = threads.submit(directory.pin, kept.tobytes())
        assert (match.result()[1], reserve.result()[1], pin.result()) == (None, None, 0)
        assert directory.faults["directory"] >= 3 and not directory.held
        assert store(cache, late) == 0 and not holds(cache, kept), "all is a miss until it answers"
    eventually(lambda: (faulty.stats().get("lookups"), faulty.stats().get("pinned")) == (lookups + 5, 5))
    eventually(lambda: settled(faulty))
    eventually(lambda: holds(cache, kept))
    cache.unpin(kept)
    assert faulty.stats()["pinned"] == 0
    keep(cache, late)


def test_a_forget_that_the_directory_missed_is_sent_again(
    faulty: raykv.KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.clear()
    cache, directory = a_cache(faulty), faulty.session.directory
    pages = np.ones((40, BLOCK), np.uint8)
    assert cache.swap_out(pages, range(40), "a").result(60) == 40
    missed = directory.faults["directory"]
    with monkeypatch.context() as hasty, standing_still(faulty):
        hasty.setattr(directory, "deadline", 0.02)
        cache.swap_drop("a")
        eventually(lambda: directory.faults["directory"] > missed)
    eventually(lambda: faulty.stats().get("pinned") == 0 == faulty.stats().get("keys"))


@both_ways_at_once
def test_blocks_go_to_a_tier_whose_directory_was_killed(
    start: Callable[..., raykv.KVPool], tmp_path: Path, transport: str
) -> None:
    """Blocks from before are found in the tier. Node stores use the same two ways."""
    tier = f"file://{tmp_path}/{transport}?capacity=1GiB"
    pool = start(transport=transport, external=tier, secret=b"s", write="through")
    cache = pool.cache(
        model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK, recompute_tokens_per_s=20.0
    )

    def demoted() -> int:
        return sum(tier["blocks"] for tier in pool.stats().get("tiers", {}).values())

    before, after = cache.keys(tokens(1, 10)), cache.keys(tokens(2, 10))
    keep(cache, before)
    eventually(lambda: demoted() == 10)
    kill(pool, "directory")
    keep(cache, after)
    eventually(lambda: demoted() == 20)
    eventually(lambda: holds(cache, before))
