"""A vLLM request for followers and in OpenTelemetry. Its look-up and its load are in two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
from helpers.pools import MIB, Worker, eventually, other_node, worker

import raykv
from raykv.arena.buffers import rows_of
from raykv.cli.trace import Follower

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

import torch
from helpers.engines.vllm.request import request
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext, make_offload_key

from raykv.integrations.vllm.identity.groups import Group, Layers
from raykv.integrations.vllm.scheduler.manager import RayKVManager
from raykv.integrations.vllm.worker.pages import Pages
from raykv.integrations.vllm.worker.ranks import Rank
from raykv.integrations.vllm.worker.worker import RayKVWorker

CHUNK, CHUNKS = 4096, 4
HASHES = [bytes([i]) * 32 for i in range(CHUNKS + 2)]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


def a_cache(pool: raykv.KVPool) -> raykv.KVCache:
    return pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=CHUNK, part=0)


class Scheduler(Worker):
    """vLLM's scheduler side and worker side in one process, which has set up OpenTelemetry."""

    def serve(self) -> tuple[int, list[tuple[str, str, str]]]:
        """Look a request up and load it. Returns (bytes read, (name, trace id, parent's id) of each span)."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        keys = [make_offload_key(each, 0) for each in HASHES]
        context = request("a request", keys, HEADERS, "acme")
        manager = RayKVManager(raykv.attach(self.pool.name), {"model": "m", "dtype": "uint8", "layout": "rows"})
        manager.set_ranks([Rank(self.pool.session.memory_name, (0,), (CHUNK,))], [Group(0, 0, 16, 0)])
        found = [eventually(lambda key=key: _answer(manager, key, context)) for key in keys]  # type: ignore[misc]
        assert found == [LookupResult.HIT] * CHUNKS + [LookupResult.MISS] * 2
        load = manager.prepare_load(keys[:CHUNKS], context)
        pages = torch.zeros((8, CHUNK), dtype=torch.uint8)
        cache = a_cache(self.pool)
        reader = RayKVWorker(self.pool, [{0: cache}], 0, [Pages(Layers(0), rows_of([pages]))], 1)
        reader.submit_load(1, load, GPULoadStoreSpec([*range(CHUNKS)], [CHUNKS], [0]))
        (result,) = eventually(reader.get_finished)
        manager.complete_load(keys[:CHUNKS], context)
        manager.on_request_finished(context)
        assert (pages[:CHUNKS] == 7).all()
        spans = [
            (span.name, f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}" if span.parent else "")
            for span in exporter.get_finished_spans()
        ]
        return int(result.transfer_size), spans


def _answer(manager: RayKVManager, key: bytes, context: ReqContext) -> LookupResult | None:
    found = manager.lookup(key, context)
    return None if found is LookupResult.RETRY else found


def test_a_request_is_followed_through_both_processes(start: Callable[..., raykv.KVPool]) -> None:
    pool = start(cpu_memory=32 * MIB)
    cache = a_cache(pool)
    keys = cache.rekey(HASHES[:CHUNKS])
    assert cache.store(keys, np.full((CHUNKS, CHUNK), 7, np.uint8), wait=True) == CHUNKS
    follower, seen = Follower(pool.name), list[dict[str, Any]]()
    assert not follower.poll()
    scheduler = worker(pool, other_node(pool), Scheduler)
    asked = scheduler.serve.remote()

    def told() -> bool:
        seen.extend(follower.poll())
        return len(seen) >= 2

    eventually(told)
    read, spans = ray.get(asked)
    by_kind = {line["kind"]: line for line in seen}
    match, load = by_kind["match"], by_kind["read"]
    assert len(seen) == 2 and match["id"] == load["id"]
    assert {(line["request"], line["tenant"]) for line in seen} == {("a request", pool.tenant_of("acme"))}
    assert (match["asked_tokens"], match["hit_tokens"], match["read_tokens"]) == (16 * (CHUNKS + 2), 16 * CHUNKS, 0)
    assert match["sources"] == load["sources"] == {"memory": 0, "node": 16 * CHUNKS, "external": 0}
    assert (load["read_tokens"], load["bytes"]) == (16 * CHUNKS, read) == (16 * CHUNKS, CHUNKS * CHUNK)
    assert match["short"] and not load["short"] and load["pull_ms"] > 0 and load["lookup_ms"] is None
    assert [(name, trace) for name, trace, _ in spans] == [
        (f"raykv.{name}", TRACE) for name in ("match", "pull", "read")
    ]
    assert [parent == PARENT for _, _, parent in spans] == [True, False, True]
