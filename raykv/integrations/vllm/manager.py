"""The scheduler's side of vLLM on a pool: which chunks of a request are there, and where. Never waits for Ray."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
    get_offload_block_hash,
)

from raykv.client.cache import KVCache
from raykv.client.joint_match import JointMatch, Part
from raykv.client.lease import Leased
from raykv.client.pool import KVPool
from raykv.integrations.vllm.ranks import Rank
from raykv.integrations.vllm.waiting import Wait
from raykv.keys import Keys, tenant_of
from raykv.metrics.span import under
from raykv.protocol import LOCATION

log = logging.getLogger("raykv")

THREADS = 16  # requests that ask, or wait for a pull, at a time
NOT_ASKED = 1 << 62
ASKED, HITS, FAILED = "vllm:raykv_asked_chunks", "vllm:raykv_hit_chunks", "vllm:raykv_failed_loads"
WAITED = "vllm:raykv_waits"
METRICS = {
    ASKED: OffloadingCounterMetadata("Chunks that requests asked the raykv pool for."),
    HITS: OffloadingCounterMetadata("Of them, chunks that were leased in the memory of any node."),
    FAILED: OffloadingCounterMetadata("Requests that were computed because a load from the raykv pool failed."),
    WAITED: OffloadingCounterMetadata("Requests that waited for chunks which another engine computed or stored."),
}


class Origin(NamedTuple):
    """Where a request comes from: vLLM's id of it, of its caller the trace headers and the salt, and the weights of the
    LoRA adapter that it asks for (see `adapters`)."""

    id: str
    headers: Mapping[str, str] | None = None
    salt: str | None = None
    weights: bytes = b""


@dataclass
class Chain:
    """A request's chunks, by vLLM's hashes. keys: in order, the scheduler's own list, which grows with the request."""

    keys: list[bytes]
    origin: Origin
    numbers: dict[bytes, int] = field(default_factory=dict)

    def number(self, key: bytes) -> int | None:
        """Of a chunk, from 0 on; None for one that is not the request's."""
        for number in range(len(self.numbers), len(self.keys)):
            self.numbers[self.keys[number]] = number
        return self.numbers.get(key)


class PartToLoad(NamedTuple):
    """A part of chunks that are leased, for the rank that reads it. away: some of them are on other nodes."""

    away: bool
    leased: list[Leased]


@dataclass
class ChunksToLoad(LoadStoreSpec):  # type: ignore[misc]
    """Where chunks lie. ranks: by rank, the parts that it has, in its order. origin: of the request."""

    ranks: list[list[PartToLoad]]
    origin: Origin


@dataclass
class ChunksToStore(LoadStoreSpec):  # type: ignore[misc]
    """Chunks that the workers are to offer. keys: by part, as bytes. position: of the first in its chain."""

    keys: dict[int, bytes]
    position: int


class Found(NamedTuple):
    """What the pool has of a request, and how many leading chunks in memory."""

    match: JointMatch
    chunks: int


@dataclass
class Ask:
    """A request's question to the pool. numbers: of the chunks that it asked for, in order.

    wait: for others, which compute some of them.
    """

    numbers: dict[bytes, int]
    origin: Origin
    answer: Future[Found]
    wait: Wait | None = None
    loading: bool = False
    counted: bool = False


@dataclass
class Computing:
    """What a request has to compute, and since when: chunks that the pool does not have.

    match: by which others wait for them. missed: those that were not offered yet. offered: `complete_store` will tell.
    """

    since: float
    match: JointMatch
    missed: set[bytes]
    offered: set[bytes] = field(default_factory=set)
    measured: bool = False


class RayKVManager(OffloadingManager):  # type: ignore[misc]
    """Asks the directory once a request, in threads beside the scheduler's loop. Its methods are vLLM's to call.

    caches: by part of a chunk; none before `set_ranks`.
    """

    def __init__(self, pool: KVPool, arguments: dict[str, Any]) -> None:
        """arguments: of `KVPool.cache`, less the part and its block_bytes, which the ranks tell."""
        self._pool, self._arguments = pool, arguments
        self._ranks: list[Rank] = []
        self.caches: dict[int, KVCache] = {}
        self._asks: dict[str, Ask] = {}
        self._failed: set[str] = set()  # requests whose load failed: they are computed, not looked up again
        self._counts: Counter[str] = Counter()
        self._computing: dict[str, Computing] = {}
        self._rate = 0.0  # tokens a second that requests got computed, lately
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="raykv-ask")

    def set_ranks(self, ranks: list[Rank]) -> None:
        """Where the ranks are, and what they have of a chunk. Until then nothing is looked up, nor stored."""
        self._ranks = ranks
        self.caches = self._make_caches()

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """RETRY while the request's look-up runs, or it waits for others; HIT for a chunk that is leased; else MISS.

        Called by the scheduler: it never waits for Ray. key: vLLM's hash of a chunk.
        """
        request = req_context.req_id
        if request in self._failed or not self.caches:
            return LookupResult.MISS
        ask = self._asks.get(request)
        if ask is None:
            ask = self._asks[request] = self._ask(key, req_context)
        if not ask.answer.done():
            return LookupResult.RETRY
        found = ask.answer.result()
        if found.match.pending:
            self._wait(ask, found.match.pending)
            return LookupResult.RETRY
        if not ask.counted:
            ask.counted = True
            self._counts[HITS] += found.chunks
            missed = {key for key, number in ask.numbers.items() if number >= found.chunks}
            self._computing[request] = Computing(time.monotonic(), found.match, missed)
        return LookupResult.HIT if ask.numbers.get(key, NOT_ASKED) < found.chunks else LookupResult.MISS

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> ChunksToLoad:
        """What the workers need to read chunks that `lookup` found: a run. Leases last until `complete_load`."""
        ask = self._asks[req_context.req_id]
        ask.loading = True
        first = ask.numbers[next(iter(keys))]
        match = ask.answer.result().match
        match.count_saved(len(keys))
        parts = (_part(match.leased(i, first, first + len(keys))) for i in itertools.count())
        ranks = [list(itertools.islice(parts, len(rank.parts))) for rank in self._ranks]
        return ChunksToLoad(ranks, req_context.get_state(Chain).origin)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Release the leases of the request."""
        self._forget(req_context.req_id)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput:
        """Hand all keys to the workers, which leave out what is stored already: asking here would hold up the loop."""
        keys = list(keys) if self.caches else []
        if computing := self._computing.get(req_context.req_id):
            offered = computing.missed.intersection(keys)
            computing.missed -= offered
            computing.offered |= offered
        chain = req_context.get_state(Chain)
        position = (chain.number(keys[0]) or 0) if keys else 0
        rows = {part: of_part.tobytes() for part, of_part in _keys(self.caches, keys, chain.origin).items()}
        return PrepareStoreOutput(keys, ChunksToStore(rows, position), [])

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """Measure how fast this engine computes, which says how long it waits for others, and for an external tier."""
        computing = self._computing.get(req_context.req_id)
        if computing is None or not (chunks := len(computing.offered.intersection(keys))):
            return
        computing.offered.difference_update(keys)
        if not computing.measured:
            computing.measured = True
            self._measure(chunks, computing.since)
        self._end_if_done(req_context.req_id)

    def _measure(self, chunks: int, since: float) -> None:
        rate = chunks * self._chunk_tokens / max(1e-3, time.monotonic() - since)
        self._rate = rate if not self._rate else 0.8 * self._rate + 0.2 * rate
        for cache in self.caches.values():
            cache.recompute_tokens_per_s = self._rate

    def on_request_finished(self, req_context: Any) -> None:
        """Forget the request, and release what it holds."""
        self._failed.discard(req_context.req_id)
        if computing := self._computing.get(req_context.req_id):
            computing.missed.clear()  # nothing more will be offered
            self._end_if_done(req_context.req_id)
        self.release_unused(req_context.req_id)

    def _end_if_done(self, request: str) -> None:
        """Others need not wait for a request that has stored what it was to compute, or will not."""
        computing = self._computing[request]
        if not computing.missed and not computing.offered:
            computing.match.end_intent()
            del self._computing[request]

    def release_unused(self, request: str) -> None:
        """The request has its blocks, or is done: release the leases of what it found and does not load."""
        ask = self._asks.get(request)
        if ask is not None and not ask.loading:
            self._forget(request)

    def on_load_failed(self, request: str) -> None:
        """The request is to be computed from now on."""
        self._failed.add(request)
        self._counts[FAILED] += 1

    def reset_cache(self) -> None:
        """Start an empty cache for this engine alone: its weights may be others now.

        Leases of loads under way are released too: nobody will report those, and a reader sees an overwritten block.
        """
        self.caches = self._make_caches(f"/{secrets.token_hex(16)}")
        for computing in self._computing.values():
            computing.match.end_intent()
        self._computing.clear()
        for request in list(self._asks):
            self._forget(request)

    def in_background(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call it in a thread, beside the scheduler's loop. What it raises is logged."""
        self._threads.submit(function, *arguments).add_done_callback(_log_failure)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call, for vLLM's metrics; None if nothing was."""
        if not self._counts:
            return None
        stats = OffloadingConnectorStats()
        for name, count in self._counts.items():
            stats.increase_counter(name, count)
        self._counts.clear()
        return stats

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()

    @property
    def _chunk_tokens(self) -> int:
        return int(self._arguments["block_tokens"])

    def _make_caches(self, revision: str = "") -> dict[int, KVCache]:
        """revision: added to the model's: the cache is another then."""
        part_bytes = {part: rank.part_bytes for rank in self._ranks for part in rank.parts}
        arguments = {**self._arguments, "revision": self._arguments.get("revision", "") + revision}
        return {part: self._pool.cache(**arguments, part=part, block_bytes=part_bytes[part]) for part in part_bytes}

    def _ask(self, first: bytes, req_context: Any) -> Ask:
        """Ask for the request's chunks from `first` on."""
        chain: Chain = req_context.get_state(Chain)
        number = chain.number(first)
        keys = [] if number is None else chain.keys[number:]
        self._counts[ASKED] += len(keys)
        if computing := self._computing.pop(req_context.req_id, None):  # preempted: who waits has no intent
            computing.match.end_intent()
        numbers = {key: i for i, key in enumerate(keys)}
        return Ask(numbers, chain.origin, self._submit(keys, chain.origin, wait=True))

    def _submit(self, keys: list[bytes], origin: Origin, wait: bool) -> Future[Found]:
        return self._threads.submit(_find, self.caches, self._ranks, keys, origin, wait)

    def _wait(self, ask: Ask, pending: int) -> None:
        """Others compute so many chunks that the request asked for: ask again after a while."""
        if ask.wait is None:
            rate = next(iter(self.caches.values())).recompute_tokens_per_s
            ask.wait = Wait(pending * self._chunk_tokens / rate)
            self._counts[WAITED] += 1
        if ask.wait.is_due():
            ask.answer = self._submit(list(ask.numbers), ask.origin, wait=not ask.wait.is_over)

    def _forget(self, request: str) -> None:
        ask = self._asks.pop(request, None)
        if ask is not None and not ask.answer.cancel():
            ask.answer.add_done_callback(lambda answer: answer.result().match.release())
            if not ask.counted:
                ask.answer.add_done_callback(lambda answer: answer.result().match.end_intent())


def _find(caches: dict[int, KVCache], ranks: list[Rank], keys: list[bytes], origin: Origin, wait: bool) -> Found:
    """Lease what all ranks have of the keys, and bring what only an external tier has. An error is a miss.

    wait: lease nothing where others compute the next chunks.
    """
    cache, by_part = next(iter(caches.values())), _keys(caches, keys, origin)
    parts = [Part(rank.memory, by_part[part]) for rank in ranks for part in rank.parts]
    match, chunks = JointMatch(cache.session, parts, cache.recompute_tokens_per_s, origin.id), 0
    try:
        with under(origin.headers):
            chunks = match.ask(computes=True, wait=wait).fetch_external()
    except Exception:
        log.exception("a look-up failed")
        match.end_intent()
    if not chunks:
        match.release()
    return Found(match, chunks)


def _log_failure(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()):
        log.warning("a call in the background failed: %r", error)


def _part(leased: list[Leased]) -> PartToLoad:
    return PartToLoad(any((np.frombuffer(part.source, LOCATION)["node"] != part.node).any() for part in leased), leased)


def _keys(caches: dict[int, KVCache], keys: list[bytes], origin: Origin) -> dict[int, Keys]:
    """By part. vLLM's hashes have the salt already: here it names the tenant."""
    hashes, tenant = [get_offload_block_hash(key) + origin.weights for key in keys], tenant_of(origin.salt)
    return {part: Keys(cache.rekey(hashes), cache.id._replace(tenant=tenant)) for part, cache in caches.items()}
