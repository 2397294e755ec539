"""What raykv hands to Ray's metrics: names, totals and ages."""

import sys
from types import ModuleType
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from docs.write_metrics import PAGE, page
from raykv.metrics import tick_clock
from raykv.metrics.exporter import Exporter
from raykv.metrics.metric import METRICS
from raykv.metrics.span import OFF, span
from raykv.metrics.tick_clock import TickClock


def test_the_page_is_written_from_the_table() -> None:
    assert PAGE.read_text() == page(), "run: python -m docs.write_metrics"


def test_names_say_their_units_as_prometheus_has_them() -> None:
    for name, metric in METRICS.items():
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert metric.text.endswith("."), name


class Recorded:
    """A stand-in for Ray's metric, which keeps what was recorded."""

    def __init__(self) -> None:
        self.sum, self.tags = 0.0, {}  # type: float, dict[str, str]

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses it"
        self.sum, self.tags = self.sum + value, tags


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30))
def test_a_total_is_told_once(steps: list[tuple[int, bool]]) -> None:
    exporter, counter, total = Exporter("p"), Recorded(), 0
    exporter._metrics["evicted_blocks_total"] = counter
    for grown, flush in steps:
        total += grown
        exporter.total("evicted_blocks_total", total)
        if flush:
            exporter.flush()
            assert counter.sum == total and not exporter.waits
    exporter.flush()
    assert counter.sum == total and counter.tags in ({}, {"pool": "p"})


class Refusing(Recorded):
    """A metric that fails, as Ray's do while Ray shuts down or has not started."""

    refuses = True

    def inc(self, value: float, tags: dict[str, str]) -> None:
        if self.refuses:
            raise RuntimeError("not now")
        super().inc(value, tags)

    set = observe = inc


def test_what_ray_does_not_take_is_told_the_next_time() -> None:
    exporter, names = Exporter("p"), ("saved_tokens_total", "clients", "read_seconds")
    refusing, taking = Refusing(), Recorded()
    exporter._metrics = {**dict.fromkeys(names, refusing), "evicted_blocks_total": taking}
    exporter.add("saved_tokens_total", 1.0)
    exporter.set("clients", 10.0)
    exporter.observe("read_seconds", 100.0)
    exporter.observe("read_seconds", 200.0)
    exporter.add("evicted_blocks_total", 5)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="not now"):
            exporter.flush()
        assert taking.sum == 5, "nothing that others took is told again, or held up"
    exporter.add("saved_tokens_total", 2.0)
    exporter.set("clients", 20.0)
    refusing.refuses = False
    exporter.flush()
    assert refusing.sum == 1 + 2 + 20 + 100 + 200 and not exporter.waits
    exporter.flush()
    assert refusing.sum == 323


def test_totals_of_a_node_that_left_are_forgotten() -> None:
    exporter, counter = Exporter("p"), Recorded()
    exporter._metrics["pulled_bytes_total"], exporter._node = counter, "here"
    for peer in ("gone", "there"):
        exporter.total("pulled_bytes_total", 7, **{"from": peer, "transport": "tcp"})
    exporter.forget("from", "gone")
    assert [dict(tags)["from"] for _, tags in exporter._totals] == ["there"]
    exporter.flush()
    assert counter.sum == 14


def test_an_age_is_that_of_the_first_sample_after_the_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = TickClock()
    assert clock.age(5) == 0.0
    for tick, now in ((10, 100.0), (20, 105.0), (20, 110.0), (35, 115.0)):
        clock.sample(tick, now)
    assert [clock.age(tick) for tick in (5, 10, 19, 20, 34, 35)] == [15.0, 10.0, 10.0, 0.0, 0.0, 0.0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=400))
def test_many_samples_are_thinned_out_and_ages_stay_about_right(growth: list[int]) -> None:
    clock, dense, tick = TickClock(), [], 0
    limit, tick_clock.SAMPLES_MAX = tick_clock.SAMPLES_MAX, 64
    try:
        for now, grown in enumerate(growth):
            tick += grown
            clock.sample(tick, float(now))
            dense.append(tick)
            assert len(clock._ticks) <= 64
        for wanted in set(dense):
            after = next((at for at, t in enumerate(dense) if t > wanted), len(dense) - 1)
            right: Any = len(dense) - 1 - after
            assert clock.age(wanted) <= right and clock.age(wanted) >= 0
    finally:
        tick_clock.SAMPLES_MAX = limit


def test_a_process_that_left_ray_starts_none_for_its_metrics() -> None:
    assert not ray.is_initialized()
    exporter = Exporter("p")
    exporter.add("saved_tokens_total", 1, model="m")
    with pytest.raises(AttributeError):
        exporter.flush()
    assert not ray.is_initialized()


def test_a_tracer_that_is_being_imported_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another thread imports OpenTelemetry, its module exists without its names."""
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", ModuleType("opentelemetry.trace"))
    assert span("match", pool="p") is OFF
