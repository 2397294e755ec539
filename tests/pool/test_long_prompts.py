"""Hits that are longer than the staging window of the reader's node."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.client.long_prompts import LONG, WINDOW, full
from helpers.pools import (
    BLOCK,
    TRANSPORTS,
    Reading,
    eventually,
    other_node,
    payload,
    read,
    settled,
    totals,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import raykv
import raykv.client.leases.joint_match
import raykv.client.leases.lease
import raykv.client.leases.match
from raykv.client.leases.joint_match import JointMatch, Part
from raykv.client.leases.lease import Lease
from raykv.keys import Keys


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_prompts_of_ten_windows_are_read_whole_by_several_at_a_time(
    start: Callable[..., raykv.KVPool], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    pool, cache, prompts = full(start, transport)
    for piece in (raykv.client.leases.stream.PIECE_BYTES, 2 * BLOCK):
        monkeypatch.setattr(raykv.client.leases.stream, "PIECE_BYTES", piece)
        for _ in range(2):
            with ThreadPoolExecutor(6) as threads:
                found = list(threads.map(lambda keys: read(cache, keys), 2 * prompts))
            assert found == [Reading(LONG, LONG, 0, [other_node(pool)])] * 6, pool.session.directory.faults
    assert pool.session.directory.faults == {}
    eventually(lambda: settled(pool))


def test_a_lease_is_read_twice_and_fetched(start: Callable[..., raykv.KVPool]) -> None:
    pool, cache, (keys, other, _) = full(start, "tcp")
    with cache.match(keys) as match:
        assert match.fetch(whole=True) == LONG
        for _ in range(2):
            out = np.zeros((LONG, BLOCK), np.uint8)
            assert match.read(out) == LONG and (out == payload(keys, BLOCK)).all()
    with cache.match(other) as match:
        assert match.fetch() == WINDOW
        out = np.zeros((LONG, BLOCK), np.uint8)
        assert match.read(out) == LONG and (out == payload(other, BLOCK)).all()
    assert pool.session.directory.faults == {}
    eventually(lambda: settled(pool))


@pytest.mark.parametrize("examples", [5, pytest.param(25, marks=pytest.mark.full)])
def test_one_reader_alone_reads_all_that_is_there(
    start: Callable[..., raykv.KVPool], monkeypatch: pytest.MonkeyPatch, examples: int
) -> None:
    """For any number of leases and ranks, and any size of pieces."""
    pool, cache, prompts = full(start, "tcp")
    session = pool.session

    @settings(max_examples=examples, deadline=None, database=None)
    @given(
        keys=st.sampled_from(prompts),
        a_call=st.integers(1, LONG),
        piece=st.integers(1, 2 * WINDOW),
        by=st.integers(0, 3),
    )
    def check(keys: Keys, a_call: int, piece: int, by: int) -> None:
        monkeypatch.setattr(raykv.client.leases.stream, "PIECE_BYTES", piece * BLOCK)
        for module in (raykv.client.leases.match, raykv.client.leases.joint_match):
            monkeypatch.setattr(module, "KEYS_PER_CALL", a_call * max(1, by))
        if not by:
            assert read(cache, keys)[:3] == (LONG, LONG, 0)
            with cache.match(keys) as match:
                assert match.fetch(whole=True) == LONG
            return
        joint = JointMatch(session, [Part(session.memory_name, keys)] * by, 1e4).ask()
        for rank in range(by):
            leases = [Lease.borrowed(session, BLOCK, leased) for leased in joint.leased(rank, 0, LONG)]
            read_by_a_worker(leases, keys)
        joint.release()

    check()
    assert session.directory.faults == {}
    eventually(lambda: settled(pool))


def read_by_a_worker(leases: list[Lease], keys: Keys) -> None:
    """Read lease after lease, as vLLM's worker does, while the scheduler's process holds all leases."""
    out, done = np.zeros((LONG, BLOCK), np.uint8), 0
    rows = raykv.arena.buffers.dense("out", out, LONG, BLOCK)
    for lease in leases:
        assert lease.read(rows[done : done + len(lease)], verify=False) == len(lease)
        done += len(lease)
        lease.blocks.give_back_slots()
    assert done == LONG and (out == payload(keys, BLOCK)).all()


def test_another_process_streams_by_a_lease_that_takes_no_staging(start: Callable[..., raykv.KVPool]) -> None:
    """vLLM's workers do this by leases of the scheduler."""
    pool, _, prompts = full(start, "tcp")
    by = raykv.attach(pool.name)
    assert by.session.local and by.session.directory.client != pool.session.directory.client
    matches = [JointMatch(pool.session, [Part(pool.session.memory_name, keys)], 1e4).ask() for keys in prompts]
    assert [match.fetch_external() for match in matches] == [16 * LONG] * len(prompts)
    assert totals(pool)["staging"] == 0
    first, stop = 5, LONG - 3
    for keys, match in zip(prompts, matches, strict=True):
        (leased,) = match.leased(0, first, stop)
        lease = Lease.borrowed(by.session, BLOCK, leased)
        out = np.zeros((stop - first, BLOCK), np.uint8)
        assert lease.read(raykv.arena.buffers.dense("out", out, len(lease), BLOCK), verify=False) == stop - first
        assert (out == payload(keys[first:stop], BLOCK)).all()
        match.release()
        pool.session.directory.heartbeat()
        eventually(lambda: totals(pool)["staging"] == 0)
        assert lease.read(raykv.arena.buffers.dense("out", out, len(lease), BLOCK), verify=False) < stop - first
    by.close()
    eventually(lambda: settled(pool))


def test_a_match_shows_that_the_directory_calls_this_node_otherwise(
    start: Callable[..., raykv.KVPool],
) -> None:
    """After a restart of the directory. Otherwise the reader would wait for slots of an unknown node."""
    pool, cache, (keys, _, _) = full(start, "tcp")
    local = pool.session.local
    assert local
    local.index -= 2
    with cache.match(keys) as match:
        assert match.num_blocks == 0

    def known() -> bool:
        with cache.match(keys) as match:
            return match.num_blocks == LONG

    eventually(known)
    eventually(lambda: settled(pool))
