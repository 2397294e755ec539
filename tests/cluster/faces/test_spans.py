"""The OpenTelemetry spans of a client's look-ups, reads and stores."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
from helpers.pools import BLOCK, MIB, Worker, eventually, other_node, read, store, tokens, totals, worker

import raykv


class Traced(Worker):
    """A client whose process has set up OpenTelemetry."""

    def trace(self, own: int, others: int) -> list[tuple[str, str, dict[str, Any]]]:
        """Store a prompt, read it and another one. Returns (name, parent, attributes) of each span, in order of end."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        cache = self.cache()
        with provider.get_tracer("an engine").start_as_current_span("request"):
            store(cache, cache.keys(tokens(own, 4)))
            for seed in (own, others):
                assert read(cache, cache.keys(tokens(seed, 4))).read == 4
        spans = exporter.get_finished_spans()
        names = {span.context.span_id: span.name for span in spans}
        return [(s.name, names[s.parent.span_id] if s.parent else "", dict(s.attributes or {})) for s in spans]

    def await_reads(self, seed: int) -> list[tuple[str, str]]:
        """Read a prompt from an event loop. Returns (name, parent) of each span, in order of end."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        cache = self.cache()

        async def request() -> int:
            async with cache.amatch(cache.keys(tokens(seed, 4))) as match:
                return await match.aread(np.zeros((match.num_blocks, BLOCK), np.uint8))

        with provider.get_tracer("an engine").start_as_current_span("request"):
            assert asyncio.run(request()) == 4
        spans = exporter.get_finished_spans()
        names = {span.context.span_id: span.name for span in spans}
        return [(span.name, names[span.parent.span_id] if span.parent else "") for span in spans]

    def interrupt(self, seed: int) -> int:
        """Match a prompt, and get a signal while its span ends. Returns how many leases this process then holds."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

        class Struck(SpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                raise KeyboardInterrupt

        provider = TracerProvider()
        provider.add_span_processor(Struck())
        trace.set_tracer_provider(provider)
        cache = self.cache()
        with pytest.raises(KeyboardInterrupt):
            cache.match(cache.keys(tokens(seed, 4)))
        return len(self.pool.session.directory.held)


def test_spans_say_what_was_hit_and_where(start: Callable[..., raykv.KVPool]) -> None:
    pool = start(cpu_memory=32 * MIB)
    cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)
    assert store(cache, cache.keys(tokens(2, 4))) == 4
    traced = worker(pool, other_node(pool), Traced)
    eventually(lambda: totals(pool)["ready"] == 4)
    spans = ray.get(traced.trace.remote(1, 2))
    assert [name for name, _, _ in spans] == [
        *("raykv.store", "raykv.match", "raykv.read"),
        *("raykv.match", "raykv.pull", "raykv.read", "request"),
    ]
    assert [parent for _, parent, _ in spans] == ["request"] * 4 + ["raykv.read", "request", ""]
    assert spans[0][2] == {"raykv.pool": pool.name, "raykv.model": "m", "raykv.blocks": 4, "raykv.stored_blocks": 4}
    asked = {"raykv.pool": pool.name, "raykv.model": "m", "raykv.asked_tokens": 64, "raykv.hit_tokens": 64}
    assert spans[1][2] == {**asked, "raykv.memory": 64, "raykv.node": 0, "raykv.external": 0}
    assert spans[3][2] == {**asked, "raykv.memory": 0, "raykv.node": 64, "raykv.external": 0}
    assert spans[5][2]["raykv.bytes"] == 4 * BLOCK and spans[5][2]["raykv.node"] == 4


def test_reads_of_an_event_loop_are_children_of_their_callers_span(start: Callable[..., raykv.KVPool]) -> None:
    pool = start(cpu_memory=32 * MIB)
    cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)
    assert store(cache, cache.keys(tokens(1, 4))) == 4
    eventually(lambda: totals(pool)["ready"] == 4)
    spans = ray.get(worker(pool, other_node(pool), Traced).await_reads.remote(1))
    assert spans == [
        ("raykv.match", "request"),
        ("raykv.pull", "raykv.read"),
        ("raykv.read", "request"),
        ("request", ""),
    ]


def test_a_match_that_a_signal_ends_with_its_span_holds_nothing(start: Callable[..., raykv.KVPool]) -> None:
    pool = start(cpu_memory=32 * MIB)
    cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)
    assert store(cache, cache.keys(tokens(1, 4))) == 4
    struck = worker(pool, pool.node_id, Traced)
    assert ray.get(struck.interrupt.remote(1)) == 0
    eventually(lambda: pool.stats()["leases"] == 0)
