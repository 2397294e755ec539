"""The scheduler's side of vLLM on a pool: which chunks of a request the pool has, and where. Never waits for Ray."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from itertools import takewhile
from math import lcm
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

from raykv.client.cache import KVCache
from raykv.client.leases.joint_match import JointMatch, Part
from raykv.client.leases.match import Match
from raykv.client.pool import KVPool
from raykv.integrations.vllm.chunks.chain import Chain
from raykv.integrations.vllm.chunks.chunks import ChunksOfLayers, ChunksToLoad, ChunksToStore, Origin, PartToLoad
from raykv.integrations.vllm.chunks.hints import Sessions
from raykv.integrations.vllm.events.kv_events import KVEvents
from raykv.integrations.vllm.identity.groups import Group, first_parts
from raykv.integrations.vllm.identity.weights import Weights
from raykv.integrations.vllm.scheduler.answers import Answers
from raykv.integrations.vllm.scheduler.ask import Ask, Computing, Found, RankPart
from raykv.integrations.vllm.scheduler.counters import ASKED, FAILED, HITS, LEFT_OUT, WAITED
from raykv.integrations.vllm.scheduler.outbox import Outbox
from raykv.integrations.vllm.scheduler.pool_keys import by_group, pool_keys
from raykv.integrations.vllm.scheduler.queue import Queue, ahead_bytes
from raykv.integrations.vllm.scheduler.threshold import Threshold
from raykv.integrations.vllm.scheduler.waiting import PATIENCE, UNMEASURED, Wait
from raykv.integrations.vllm.worker.ranks import Rank
from raykv.keys import Keys
from raykv.metrics.span import under

log = logging.getLogger("raykv")

THREADS = 16  # maximum number of requests that ask, or wait for a pull, at the same time


class RayKVManager(OffloadingManager):  # type: ignore[misc]
    """Asks the directory once per request, in threads beside the scheduler's loop. vLLM calls its methods.

    caches: caches by place and part; none before `set_ranks`. events: KV events for routers, or None. weights: the name
    of the weights. resets: number of possible changes of the weights. queue: requests that wait in the engine's queue.
    """

    def __init__(
        self,
        pool: KVPool,
        arguments: dict[str, Any],
        stores: bool = True,
        patience: float = PATIENCE,
        drafter: dict[str, Any] | None = None,
        answers: Answers | None = None,
        threshold: Threshold | None = None,
    ) -> None:
        """arguments: for `KVPool.cache`, without part, block_tokens and block_bytes, which depend on groups and ranks.

        stores: whether the workers store computed chunks, so that other engines may wait for these chunks. patience:
        see Wait. drafter: arguments for a drafter's layers. answers: learns when not to store answers; None: all
        answers are stored. threshold: counts offers of chunks; None: chunks are stored at the first offer.
        """
        self._pool, self._stores, self._patience, self._answers = pool, stores, patience, answers
        self._threshold = threshold
        self._arguments, self._drafter = arguments, drafter or arguments
        self._ranks: list[Rank] = []
        self._groups: list[Group] = []
        self.caches: dict[int, dict[int, KVCache]] = {}
        self.events: KVEvents | None = None
        self.weights, self.resets = Weights(None), 0
        self._asks: dict[str, Ask] = {}
        self._failed: set[str] = set()  # requests whose load failed; they are not looked up again
        self._counts: Counter[str] = Counter()
        self._computing: dict[str, Computing] = {}
        self._sessions, self._outbox = Sessions(), Outbox(pool.session.directory)
        self._rate = 0.0  # tokens per second that requests computed recently
        self._held_until = 0.0
        self.queue = Queue()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="raykv-ask")

    def set_ranks(self, ranks: list[Rank], groups: list[Group]) -> None:
        """Set the engine's ranks, and the groups of its layers. Before this call, nothing is looked up or stored."""
        self._ranks, self._groups = ranks, groups
        self.caches = self._make_caches()

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Look up a chunk, without waiting for Ray, as the scheduler's loop calls this. key: vLLM's hash of the chunk.

        Returns RETRY while the look-up runs or the request waits for another engine, HIT for a leased chunk, else MISS.
        """
        request = req_context.req_id
        self.queue.leave(request)
        if request in self._failed or not self.caches or time.monotonic() < self._held_until:
            return LookupResult.MISS
        ask, chain = self._asks.get(request), req_context.get_state(Chain)
        if not chain.is_named:
            return LookupResult.MISS
        number = chain.number(key)
        if ask is None:
            if number is None:  # vLLM also asks for states within a chunk, which are never stored
                return LookupResult.MISS
            ask = self._asks[request] = self._ask(get_offload_group_idx(key), number, chain, request)
        if not ask.answer.done():
            return LookupResult.RETRY
        found = ask.answer.result()
        if found.match.pending:
            self._wait(ask, found.match.pending)
            return LookupResult.RETRY
        if not ask.counted:
            self._count(request, ask, found, chain)
        return LookupResult.HIT if ask.has(key, number) else LookupResult.MISS

    def _count(self, request: str, ask: Ask, found: Found, chain: Chain) -> None:
        """Count an answer that is used: its hits, and the chunks that the request must compute."""
        group = self._groups[0].group_idx
        hits = found.chunks[group].stop - ask.first[group] if found.chunks else 0
        ask.counted = True
        if not found.failed and not chain.hint.limited:
            chain.start = (ask.first[group] + hits) * self._groups[0].tokens
            self._sessions.begin(chain.hint, chain.origin.salt, chain.start)
            self._outbox.asked(chain.hint, chain.origin.salt)
        self._counts[HITS] += hits
        self._computing[request] = Computing(time.monotonic(), ask, set(ask.keys[group][hits:]))

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> ChunksToLoad:
        """Return where workers read the chunks that `lookup` found. The chunks stay leased until `complete_load`."""
        ask, chain = self._asks[req_context.req_id], req_context.get_state(Chain)
        ask.loading = True
        groups = by_group(keys)
        wanted = {index: chain.run(of_group) for index, of_group in groups.items()}
        first = groups.get(self._groups[0].group_idx, [])
        saved = sum(not chain.is_tail(key) for key in first) * self._groups[0].tokens
        ask.answer.result().match.count_saved(saved)
        ranks: list[list[PartToLoad]] = [[] for _ in self._ranks]
        for number, of in enumerate(self._rank_parts()):
            part = ask.part_to_load(of, number, wanted.get(of.group.group_idx, range(0)))
            if part.leased:
                ranks[of.rank].append(part)
        return ChunksToLoad(ranks, chain.origin)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Release the leases of the request."""
        self._forget(req_context.req_id)
        self._publish(keys, req_context)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput:
        """Give the keys to the workers, which skip chunks that the pool has.

        This does not ask the pool, as the scheduler would have to wait.
        """
        chain: Chain = req_context.get_state(Chain)
        wanted = self.caches and chain.resets == self.resets and chain.is_named
        keys = offered = [key for key in keys if chain.number(key) is not None] if wanted else []
        if self._answers is not None and self._answers.are_dropped:
            keys = self._of_prompt(keys, req_context)
        if self._threshold is not None:
            keys = self._threshold.passed(keys)
        if left_out := len(offered) - len(keys):
            self._counts[LEFT_OUT] += left_out
        if computing := self._computing.get(req_context.req_id):
            computing.offer(keys)
        groups, places = by_group(keys), {}
        for group in self._groups:
            if of_group := groups.get(group.group_idx):
                rows = pool_keys(self.caches[group.place], of_group, chain.origin)
                parts = {part: of_part.tobytes() for part, of_part in rows.items()}
                places[group.place] = ChunksOfLayers(parts, chain.run(of_group).start)
        return PrepareStoreOutput(keys, ChunksToStore(places, chain.origin.salt, chain.origin.adapter), [])

    def _of_prompt(self, keys: list[bytes], req_context: Any) -> list[bytes]:
        """Return the chunks that a request's prompt fills, and the prompt's tail.

        keys: keys for which `Chain.number` is not None.
        """
        chain: Chain = req_context.get_state(Chain)
        prompt = chain.request.num_prompt_tokens
        filled = {group: prompt // tokens for group, tokens in self._chunk_tokens.items()}
        return [key for key in keys if chain.is_tail(key) or chain.number(key) < filled[get_offload_group_idx(key)]]

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """Measure this engine's speed, which limits how long requests wait for other engines and an external tier."""
        self._publish(keys, req_context)
        computing = self._computing.get(req_context.req_id)
        if computing is None or not (offered := computing.offered.intersection(keys)):
            return
        computing.offered -= offered
        chain = req_context.get_state(Chain)
        chunks = sum(not chain.is_tail(key) for key in offered)
        if chunks and not computing.measured:
            computing.measured = True
            self._measure(chunks, computing.since)
        self._end_if_done(req_context.req_id)

    def _publish(self, keys: Collection[bytes], req_context: Any) -> None:
        """Announce stored or loaded chunks to routers, once the pool has these chunks."""
        if self.events is not None:  # only the first group's chunks, as routers count no others
            chain, group = req_context.get_state(Chain), self._groups[0].group_idx
            keys = [key for key in by_group(keys).get(group, []) if not chain.is_tail(key)]
            names = [make_offload_key(get_offload_block_hash(key) + chain.origin.weights, group) for key in keys]
            self.events.offer(names, [chain.number(key) for key in keys], chain.request)

    def has_pending_work(self) -> bool:
        """Whether an engine without work must continue to step, to publish events."""
        return self.events is not None and self.events.pending

    def _measure(self, chunks: int, since: float) -> None:
        rate = chunks * self._groups[0].tokens / max(1e-3, time.monotonic() - since)
        self._rate = rate if not self._rate else 0.8 * self._rate + 0.2 * rate
        for parts in self.caches.values():
            for cache in parts.values():
                cache.recompute_tokens_per_s = self._rate

    def on_request_finished(self, req_context: Any) -> None:
        """Forget the request, and release what it holds. Send its hint to the pool."""
        self._failed.discard(req_context.req_id)
        self.release_unused(req_context.req_id)
        if computing := self._computing.get(req_context.req_id):
            computing.missed.clear()  # nothing more will be offered
            self._end_if_done(req_context.req_id)
        chain: Chain | None = req_context.get_state(Chain)
        if chain is None:
            return
        if self._answers is not None and self._groups:
            group, prompt = self._groups[0], chain.request.num_prompt_tokens
            self._answers.learn(chain.behind(0, group.group_idx, group.tokens), prompt // group.tokens)
        if chain.is_named and self.caches:
            self._send_hint(chain)

    def _send_hint(self, chain: Chain) -> None:
        """Make the pool keep a request's chunks, or tell the pool that the session is done with its own chunks."""
        start = self._sessions.hinted(chain.hint, chain.origin.salt, chain.start)
        if start is None:
            return
        parts = list[Keys]()
        for group in self._groups:
            if own := chain.behind(start, group.group_idx, group.tokens):
                parts += pool_keys(self.caches[group.place], own, chain.origin).values()
        self._outbox.put(parts, chain.hint, chain.origin.salt)

    def _end_if_done(self, request: str) -> None:
        """End a request's intent if the request has no more chunks to store, so that nobody waits for it."""
        computing = self._computing[request]
        if not computing.missed and not computing.offered:
            self._computing.pop(request).ask.end_intent()

    def release_unused(self, request: str) -> None:
        """Release a request's leases, unless it loads the leased chunks. Called once it has blocks, and at its end."""
        self.queue.leave(request)
        ask = self._asks.get(request)
        if ask is None or ask.loading:
            return
        if not ask.counted:  # another request of this engine computes the chunks of this request's intent
            missed = set(ask.keys[self._groups[0].group_idx])
            self._computing[request] = Computing(time.monotonic(), ask, missed, measured=True)
        self._forget(request)

    def on_load_failed(self, request: str) -> None:
        """Note that a request's load failed. From now on, the request is computed."""
        self._failed.add(request)
        self._counts[FAILED] += 1

    def hold(self, seconds: float) -> None:
        """Let look-ups find nothing for `seconds`, as vLLM can't reset its cache while a request loads."""
        self._held_until = time.monotonic() + seconds

    def give_up(self) -> None:
        """Stop looking up and storing chunks."""
        self._ranks, self.caches = [], {}

    def reset_cache(self) -> None:
        """Handle a possible change of the weights. From now on, use caches for the current name of the weights.

        Without a name, no other engine uses these caches. Leases of running loads are released too, as nobody will
        report the end of these loads. If a block is overwritten meanwhile, its reader notices that.
        """
        self.weights.reset()
        self.resets += 1
        self.caches = self._make_caches()
        for computing in self._computing.values():
            computing.ask.end_intent()
        self._computing.clear()
        for request, ask in list(self._asks.items()):
            ask.end_intent()
            self._forget(request)
        if self.events is not None:
            self.events.reset()

    def fetch_ahead(self, own: Any) -> None:
        """Fetch chunks of requests that have waited in the engine's queue for a whole step.

        own: vLLM's block pool, whose chunks are left out; None: fetch all chunks.
        """
        if self.caches:
            self.queue.step(partial(self._fetch_ahead, own))

    def _fetch_ahead(self, own: Any, chain: Chain) -> None:
        """Start to fetch chunks. Windows are left out, as their chunks depend on the length of the found prefix."""
        session = self._pool.session
        here = {part for rank in self._ranks if rank.memory == session.memory_name for part in rank.parts}
        wanted, chunk_bytes = [], 0
        for group in self._groups:
            caches = {part: cache for part, cache in self.caches[group.place].items() if part in here}
            if caches and not group.window:
                wanted.append((caches, _behind_own(chain.keys[group.group_idx], group.group_idx, own)))
                chunk_bytes += sum(cache.block_bytes for cache in caches.values())
        if not wanted:
            return
        room = ahead_bytes(session.local) // chunk_bytes
        with suppress(RuntimeError):  # the system can't start a thread
            self.in_background(self._fetch, [(caches, keys[:room]) for caches, keys in wanted], chain.origin)

    def _fetch(self, wanted: list[tuple[dict[int, KVCache], list[bytes]]], origin: Origin) -> None:
        """Bring chunks to this node. wanted: the caches of the chunks' parts, and vLLM's keys of the chunks."""
        with under(origin.headers), ExitStack() as held:
            matches = []
            for caches, keys in wanted:
                for part, rows in pool_keys(caches, keys, origin).items():
                    match = Match(self._pool.session, rows, caches[part].recompute_tokens_per_s, prefetch=True)
                    matches.append(held.enter_context(match.ask()))
            for match in matches:
                match.fetch()

    def in_background(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function` in a thread beside the scheduler's loop. Its error is logged."""
        self._threads.submit(function, *arguments).add_done_callback(_log_failure)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the counts since the last call for vLLM's metrics, or None if there are none."""
        if not self._counts:
            return None
        stats = OffloadingConnectorStats()
        for name, count in self._counts.items():
            stats.increase_counter(name, count)
        self._counts.clear()
        return stats

    def shutdown(self) -> None:
        if self.events is not None:
            self.events.close()
        self._outbox.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()

    @property
    def first_cache(self) -> KVCache | None:
        """The cache of the first group's first part; None without ranks. Groups that read all chunks come first."""
        return _first(self.caches) if self.caches else None

    @property
    def _chunk_tokens(self) -> dict[int, int]:
        """Number of tokens per chunk, by group."""
        return {group.group_idx: group.tokens for group in self._groups}

    def _make_caches(self) -> dict[int, dict[int, KVCache]]:
        if not self._ranks:
            return {}
        places = sorted(self._groups, key=lambda group: group.place)
        firsts = first_parts((group.of_drafter for group in places), [rank.parts for rank in self._ranks])
        return {
            group.place: {
                part: self._pool.cache(
                    **self._arguments_of(group),
                    block_tokens=group.tokens,
                    block_bytes=rank.part_bytes[group.place],
                    part=firsts[group.place] + part,
                )
                for rank in self._ranks
                for part in rank.parts
            }
            for group in self._groups
        }

    def _arguments_of(self, group: Group) -> dict[str, Any]:
        arguments = self._drafter if group.of_drafter else self._arguments
        if cut := self._ranks[0].cut:
            arguments = arguments | {"parallel": cut}
        return {**arguments, "revision": arguments.get("revision", "") + self.weights.name}

    def _ask(self, group: int, number: int, chain: Chain, request: str) -> Ask:
        """Ask for a group's chunks from `number` on, and for the other groups' chunks of the same tokens.

        If all groups have windows, ask for all chunks, as vLLM looks up the last chunk first, then earlier chunks.
        """
        tokens = self._chunk_tokens
        # groups with equally long chunks must ask for the same number of chunks
        ahead = max(group.ahead for group in self._groups)
        start = 0 if self._groups[0].window else number * tokens[group]
        step = lcm(*tokens.values())
        begin = {index: start // step * step // of_chunk for index, of_chunk in tokens.items()}
        keys = {index: chain.since(index, begin[index], of_chunk, ahead) for index, of_chunk in tokens.items()}
        self._counts[ASKED] += len(keys[self._groups[0].group_idx])
        if computing := self._computing.pop(request, None):  # vLLM preempted the request, so no engine may wait for it
            computing.ask.end_intent()
        computes = self._stores and self._threshold is None and chain.resets == self.resets and not chain.limited
        ask = Ask(keys, begin, chain.origin, computes)
        self._submit(ask, wait=self._patience > 0)
        return ask

    def _submit(self, ask: Ask, wait: bool) -> None:
        ask.answer = self._threads.submit(self._find, dict(self.caches), ask, wait)

    def _find(self, caches: dict[int, dict[int, KVCache]], ask: Ask, wait: bool) -> Found:
        """Lease the chunks that the pool has for all ranks. Fetches blocks from an external tier. An error is a miss.

        wait: whether to lease nothing if other engines compute the next chunks.
        """
        cache, tokens, failed = _first(caches), 0, False
        match = JointMatch(cache.session, self._parts(caches, ask), cache.recompute_tokens_per_s, ask.origin.id)
        try:
            with under(ask.origin.headers):
                tokens = match.ask(computes=ask.computes, wait=wait).fetch_external()
        except Exception:
            log.exception("a look-up failed")
            match.end_intent()
            failed = True
        if not tokens:
            match.release()
            return Found(match, {}, {}, failed or not match.answered)
        chunks, ready = dict[int, range](), dict[int, range]()
        for number, of in enumerate(self._rank_parts()):
            index = of.group.group_idx
            if index not in chunks:  # the group's other parts have the same chunks
                start, stop = ask.first[index] + match.first(number), ask.first[index] + tokens // of.group.tokens
                chunks[index], ready[index] = range(start, stop), range(start, stop + of.group.ahead)
        return Found(match, chunks, ready)

    def _rank_parts(self) -> list[RankPart]:
        """Return every rank's parts, in the order of a match's parts.

        The drafter's parts are first, so that no request waits for an engine without this drafter.
        """
        groups = sorted(self._groups, key=lambda group: not group.of_drafter)
        return [
            RankPart(rank, group, number)
            for rank, of_rank in enumerate(self._ranks)
            for group in groups
            for number in range(len(of_rank.parts))
        ]

    def _parts(self, caches: dict[int, dict[int, KVCache]], ask: Ask) -> list[Part]:
        """Return the parts to ask for, in the order of `_rank_parts`."""
        by_place = {
            group.place: pool_keys(caches[group.place], ask.keys[group.group_idx], ask.origin) for group in self._groups
        }
        parts = []
        for of in self._rank_parts():
            rank, of_place = self._ranks[of.rank], by_place[of.group.place]
            parts.append(Part(rank.memory, of_place[rank.parts[of.number]], of.group.window, of.group.ahead))
        return parts

    def _wait(self, ask: Ask, pending: int) -> None:
        """Let a request wait for `pending` chunks that other engines compute. Asks again after a while."""
        if ask.wait is None:
            ask.wait = Wait(pending * self._groups[0].tokens / (self._rate or UNMEASURED), self._patience)
            self._counts[WAITED] += 1
        if ask.wait.is_due():
            self._submit(ask, wait=not ask.wait.is_over)

    def _forget(self, request: str) -> None:
        if ask := self._asks.pop(request, None):
            ask.release()


def _behind_own(keys: list[bytes], group: int, own: Any) -> list[bytes]:
    """Return a group's chunks after the leading chunks that vLLM's block pool has."""
    hashes = map(get_offload_block_hash, keys)
    first = 0 if own is None else sum(1 for _ in takewhile(lambda block: own.get_cached_block(block, [group]), hashes))
    return keys[first:]


def _log_failure(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()):
        log.warning("a call in the background failed: %r", error)


def _first(caches: dict[int, dict[int, KVCache]]) -> KVCache:
    return next(iter(next(iter(caches.values())).values()))
