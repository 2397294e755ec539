"""Parts of a node store that need no Ray: the store of an index, pulls that coincide, and a tier's excess."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from raykv.actors.store.demoter import fitting
from raykv.actors.store.peers import Peers
from raykv.actors.store.single_flight import SingleFlight
from raykv.protocol.location import ALIGN
from raykv.protocol.transfers import FAILED, PULLED
from raykv.transports.base import Peer

THREADS, ROUNDS = 8, 400


class Cluster:
    """Successive directories, each with its own store for an index."""

    def __init__(self) -> None:
        self.directory = 0
        self.asked: list[int] = []

    def look_up(self, index: int) -> Peer:
        self.asked.append(index)
        if index < 0:
            raise KeyError(index)
        directory = self.directory
        time.sleep(1e-5)  # lets another thread run: the answer may be old when it arrives
        return Peer(f"{directory}/{index}", None)


def test_a_store_is_looked_up_once_until_it_is_forgotten() -> None:
    cluster = Cluster()
    peers = Peers(cluster.look_up)
    for _ in range(2):
        assert peers.get(2).name == "0/2" and peers.get(4).name == "0/4"
    assert cluster.asked == [2, 4]
    peers.forget(2)
    peers.forget(6)
    assert peers.get(2).name == "0/2" and peers.get(4).name == "0/4" and cluster.asked == [2, 4, 2]
    cluster.directory = 1
    peers.forget_all()
    assert peers.get(2).name == "1/2" and peers.get(4).name == "1/4"
    for _ in range(2):
        with pytest.raises(KeyError):
            peers.get(-1)
    assert cluster.asked.count(-1) == 2


def test_an_answer_of_a_directory_that_was_replaced_meanwhile_is_not_kept() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def look_up(index: int) -> Peer:
        if asked.is_set():
            return Peer("new", None)
        asked.set()
        assert go_on.wait(20.0)
        return Peer("old", None)

    peers = Peers(look_up)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(peers.get, 2)
        assert asked.wait(20.0)
        peers.forget_all()
        go_on.set()
        assert first.result().name == "old"
    assert peers.get(2).name == "new"


def test_no_thread_is_given_a_store_from_before_all_were_forgotten() -> None:
    """Pulls and pushes look stores up, and forget stores that fail, while heartbeats forget all stores."""
    cluster = Cluster()
    peers = Peers(cluster.look_up)
    done = threading.Event()

    def replace_the_directory() -> None:
        while not done.is_set():
            cluster.directory += 1
            peers.forget_all()

    def pull(seed: int) -> None:
        for index in np.random.default_rng(seed).integers(0, 5, ROUNDS).tolist():
            before = cluster.directory - 1  # may not be forgotten yet, as `forget_all` comes after the change
            directory, _, found = peers.get(index).name.partition("/")
            assert int(found) == index and int(directory) >= before
            if index == 0:
                peers.forget(index)

    with ThreadPoolExecutor(THREADS + 1) as threads:
        replacing = threads.submit(replace_the_directory)
        pulls = [threads.submit(pull, seed) for seed in range(THREADS)]
        try:
            for result in pulls:
                result.result(60.0)
        finally:
            done.set()
        replacing.result(60.0)


def unasked(mine: list[int]) -> NDArray[np.uint8]:
    pytest.fail("somebody else pulls it")


def test_a_block_that_two_ask_for_at_once_is_pulled_once() -> None:
    pulls, began, go_on = SingleFlight(), threading.Event(), threading.Event()
    pulled: list[str] = []

    def slow(mine: list[int]) -> NDArray[np.uint8]:
        pulled.extend("abc"[i] for i in mine)
        began.set()
        assert go_on.wait(20.0)
        return np.array([PULLED, FAILED, PULLED], np.uint8)

    def fast(mine: list[int]) -> NDArray[np.uint8]:
        pulled.extend("bcd"[i] for i in mine)
        return np.full(len(mine), PULLED, np.uint8)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(pulls.do, "abc", slow, 20.0)
        assert began.wait(20.0)
        second = threads.submit(pulls.do, "bcd", fast, 20.0)
        while len(pulled) < 4:
            time.sleep(0.001)
        assert not second.done(), "it waits for what the first one pulls"
        go_on.set()
        assert first.result(20.0).tolist() == [PULLED, FAILED, PULLED]
        assert second.result(20.0).tolist() == [FAILED, PULLED, PULLED]
    assert pulled == ["a", "b", "c", "d"]
    assert pulls.do("b", lambda mine: np.full(len(mine), PULLED, np.uint8), 0.0).tolist() == [PULLED], "tried again"


def test_who_waits_for_a_pull_that_raises_or_is_late_gets_failed() -> None:
    pulls, began, go_on = SingleFlight(), threading.Event(), threading.Event()

    def raises(mine: list[int]) -> NDArray[np.uint8]:
        began.set()
        assert go_on.wait(20.0)
        raise OSError("the peer is gone")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(pulls.do, "a", raises, 20.0)
        assert began.wait(20.0)
        assert pulls.do("a", unasked, 0.01).tolist() == [FAILED], "late"
        second = threads.submit(pulls.do, "aa", unasked, 20.0)
        time.sleep(0.02)
        go_on.set()
        with pytest.raises(OSError, match="gone"):
            first.result(20.0)
        assert second.result(20.0).tolist() == [FAILED, FAILED]


def test_a_block_named_twice_in_one_call_is_pulled_once() -> None:
    def pull(mine: list[int]) -> NDArray[np.uint8]:
        assert mine == [0, 2]
        return np.full(2, PULLED, np.uint8)

    assert SingleFlight().do("aab", pull, 20.0).tolist() == [PULLED] * 3


@pytest.mark.parametrize(
    ("capacity", "excess"), ((0, 3), (8191, 3), (8192, 2), (3 * 8192 - 1, 1), (3 * 8192, 0), (1 << 40, 0))
)
def test_the_oldest_blocks_of_a_tier_that_is_too_full_do_not_fit(capacity: int, excess: int) -> None:
    assert fitting([8192 - ALIGN] * 3, capacity) == [False] * excess + [True] * (3 - excess)
    assert fitting([], capacity) == []


def test_a_block_too_large_for_a_tier_costs_no_other_its_place() -> None:
    sizes = [1 << 20] * 3 + [60 << 20] + [1 << 20] * 3 + [(1 << 30) - ALIGN]
    assert fitting(sizes, 64 << 20) == [size == 1 << 20 for size in sizes]
