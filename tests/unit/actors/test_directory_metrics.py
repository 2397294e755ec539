"""A directory's counters, which its successor continues, with a dict in place of Ray's internal KV."""

import json
import threading

import pytest
from helpers.directory.pool import KEYS, Pool
from hypothesis import given
from hypothesis import strategies as st

from raykv.actors.directory import metrics as of_directory
from raykv.actors.directory.metrics import TIMED_EVERY, DirectoryMetrics, timed_every
from raykv.actors.directory.server import DirectoryServer
from raykv.cluster.internal_kv import InCharge
from raykv.metrics.metric import CALL_SECONDS


def test_a_directory_that_was_replaced_leaves_the_totals_of_the_other_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, bytes] = {}
    in_charge = [InCharge("p/directory-1", None)]
    monkeypatch.setattr("raykv.cluster.internal_kv.get", lambda pool, key: kept.get(key))
    monkeypatch.setattr("raykv.cluster.internal_kv.put", lambda pool, key, value: kept.update({key: value}))
    monkeypatch.setattr("raykv.cluster.internal_kv.in_charge", lambda pool: in_charge[-1])

    def step(name: str, pool: Pool, metrics: DirectoryMetrics) -> None:
        pool.read("a", KEYS[:4])
        metrics.attach(pool.directory, threading.Lock())
        metrics._pool_figures()

    def begin(name: str) -> tuple[str, Pool, DirectoryMetrics]:
        pool, metrics = Pool(), DirectoryMetrics("p", name)
        pool.directory.resume(metrics.saved())
        return name, pool, metrics

    first = begin("p/directory-1")
    step(*first)
    second = begin("p/directory-2")
    in_charge.append(InCharge("p/directory-2", None))
    step(*second)
    step(*second)
    step(*first)  # it goes on after a stop, and does not know yet that it was replaced
    assert json.loads(kept["totals"])["lookups"] == 12


@given(st.lists(st.tuples(st.sampled_from(["match", "nodes"]), st.floats(0, 2.0)), max_size=50), st.integers(1, 9))
def test_calls_are_counted_in_their_buckets(calls: list[tuple[str, float]], folded: int) -> None:
    metrics, before = DirectoryMetrics("p", "a"), of_directory.FOLDED
    of_directory.FOLDED = folded
    try:
        for method, seconds in calls:
            metrics.called(method, seconds)
            assert sum(map(len, metrics._times.values())) < 2 * folded, "it is bounded"
    finally:
        of_directory.FOLDED = before
    metrics.attach(Pool().directory, threading.Lock())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "_keep", lambda totals: None)
        metrics._pool_figures()
    told = metrics._exporter
    for method in {method for method, _ in calls}:
        times = [seconds for name, seconds in calls if name == method]
        for bound in (*CALL_SECONDS, "+Inf"):
            tags = (("method", method), ("le", str(bound)))
            counted = timed_every(method) * sum(t <= float(bound) for t in times)
            assert told._set["directory_call_seconds_bucket", tags] == counted
        seconds = told._added["directory_call_seconds_total", (("method", method),)]
        assert seconds == pytest.approx(timed_every(method) * sum(times))


def test_all_calls_are_counted_and_every_eighth_frequent_one_is_timed() -> None:
    server = DirectoryServer("p", metrics := DirectoryMetrics("p", "a"))
    server.serve(Pool().directory)
    for number in range(2 * TIMED_EVERY + 1):
        server.client_heartbeat((1, number + 1))
        server.nodes()
    with pytest.raises(ValueError):
        server.locate_prefix(b"no key")
    count = 2 * TIMED_EVERY + 1
    assert metrics.calls == {"client_heartbeat": count, "nodes": count, "locate_prefix": 1}
    timed = {method: len(times) for method, times in metrics._times.items()}
    assert timed == {"client_heartbeat": 2, "nodes": count, "locate_prefix": 1}


def test_a_memory_is_looked_at_in_steps_between_which_it_may_change() -> None:
    pool = Pool(nodes="ab", slots=4, slabs=3)
    pool.store("a", KEYS[:9])
    whole, stats_in_steps = pool.directory.stats(pool.now)["nodes"]["a"], pool.directory.allocator.stats_in_steps
    *pauses, found = stats_in_steps(pool.directory.nodes["a"], pool.now, 4)
    assert found == whole and pauses == [None] * 2
    steps = stats_in_steps(pool.directory.nodes["a"], pool.now, 4)
    assert next(steps) is None
    pool.directory.remove_node("a", pool.now)
    assert [*steps][-1] is not None, "what it had"
