"""vLLM's KV events for chunks in the pool. They tell routers which prefixes an engine need not compute.

When the directory says that the pool has a chunk, an engine that stored or read the chunk publishes it. The engine
publishes a removal when the directory says that the chunk is gone. A thread asks the directory, and the scheduler's
loop only takes finished events. vLLM's own tracker of such events stays off: it keeps every chunk's tokens as Python
objects, and never repeats an event.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from msgspec import msgpack
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_offload.base import get_offload_block_hash, get_offload_group_idx

from raykv.client.cache import KVCache
from raykv.integrations.vllm.compat import event_extra_keys
from raykv.integrations.vllm.events.published import AGAIN_S, Change, Published
from raykv.line.periodic import Pause, Periodic
from raykv.protocol.clients import Stored

log = logging.getLogger("raykv")

BLOCKS_PER_S = 10_000  # maximum engine blocks, stored or removed, in the events of one second; further events wait
BURST_BLOCKS = 1000  # approximate maximum number of blocks in the events of one step
READY_BLOCKS = 4 * BURST_BLOCKS  # approximate maximum number of blocks in events that wait for the scheduler
CHANGES = 256  # maximum number of changes that become events at a time
REMOVED_AT_ONCE = 512  # approximate maximum number of blocks in one removal event
KEYS_ASKED = 4096  # maximum keys in one question to the directory, over all parts; an answer takes about 0.1 ms
ASK_S = 1.0  # seconds between two checks that published chunks are still there, while the engine steps
UNANSWERED_S = 1.0  # seconds until the next question, after the directory did not answer
KEEP_AWAKE_S = 0.5  # seconds that an engine with nothing to compute continues to step, to publish its last chunks
REFRESH_S = 600.0  # seconds after which a chunk is published again


class Sizes(NamedTuple):
    """Sizes, in tokens, of a pool chunk, an engine block, and a block that vLLM hashes. kind: kind of attention."""

    chunk: int
    block: int
    hash: int
    kind: str


class Offer(NamedTuple):
    """Chunks of a request that the engine stored or read: vLLM's keys, and the chunks' numbers in the request."""

    keys: list[bytes]
    numbers: list[int | None]
    request: Any


class Ready(NamedTuple):
    """Events for one step. blocks: number of blocks in the events. news: False if they only repeat announcements."""

    events: tuple[Any, ...]
    blocks: int
    news: bool


class KVEvents:
    """One engine's KV events about a pool. One thread asks the directory, and makes the events.

    The scheduler's loop calls `offer`, `reset`, `take` and `pending`, which never wait.
    """

    def __init__(self, caches: Callable[[], Mapping[int, KVCache]], sizes: Sizes, refresh_steps: int) -> None:
        """caches: returns the current caches, by part. refresh_steps: steps after which a chunk is published again."""
        self._caches, self._sizes = caches, sizes
        self._offers: SimpleQueue[Offer | None] = SimpleQueue()  # None: a reset
        self._published = Published(REFRESH_S, refresh_steps)  # used by the thread only
        self._ready: deque[Ready] = deque()
        self._made = self._made_news = 0  # number of blocks in the events of the thread; number of its Ready with news
        self._taken = self._taken_news = 0  # the same numbers for events that the scheduler's loop has taken
        self._works = self._full = False
        self._answers = True
        self._steps, self._allowed = 0, 0.0
        self._taken_at = self._ring_at = self._awake_until = 0.0
        self._ask_at = 0.0
        self._loop = Periodic("raykv-events", self._step, self._failed)
        self._loop.start()

    # ------------------------------------------------------------------ for the scheduler

    def offer(self, keys: list[bytes], numbers: list[int | None], request: Any) -> None:
        """Publish chunks once the pool has them. numbers: the chunks' numbers; None for other requests' chunks."""
        self._awake_until = time.monotonic() + KEEP_AWAKE_S
        self._offers.put(Offer(keys, numbers, request))
        self._loop.wake()

    def reset(self) -> None:
        """Withdraw everything that was published."""
        self._offers.put(None)
        self._loop.wake()

    def take(self) -> list[Any]:
        """Return vLLM's events of this step. vLLM calls this once per step."""
        now = time.monotonic()
        self._steps += 1
        events = self._take(now) if self._ready else []
        if now >= self._ring_at or (self._full and self._made - self._taken < READY_BLOCKS // 2):
            self._ring_at, self._full = now + ASK_S, False
            self._loop.wake()
        return events

    def _take(self, now: float) -> list[Any]:
        self._allowed = min(BURST_BLOCKS, self._allowed + (now - self._taken_at) * BLOCKS_PER_S)
        self._taken_at = now
        events: list[Any] = []
        while self._ready and self._allowed > 0:
            together, blocks, news = self._ready.popleft()
            self._allowed -= blocks
            self._taken += blocks
            self._taken_news += news
            events += together
        return events

    @property
    def pending(self) -> bool:
        """Whether an engine without work must continue to step, so that vLLM takes the events."""
        if self._made_news > self._taken_news:
            return True
        waits = self._works or self._published.waits or not self._offers.empty()
        return waits and self._answers and time.monotonic() < self._awake_until

    def close(self) -> None:
        self._loop.stop()

    # ------------------------------------------------------------------ in the thread

    def _step(self) -> Pause:
        self._works = True
        try:
            return self._work(time.monotonic())
        finally:
            self._works = False

    def _failed(self, error: Exception) -> Pause:
        log.error("no KV events of the pool", exc_info=error)  # routers know less, but the engine continues
        return None

    def _work(self, now: float) -> Pause:
        """Return the seconds until there is more to do, or None to wait until the scheduler's loop wakes the thread."""
        self._read_offers(now)
        if self._made - self._taken >= READY_BLOCKS:
            self._full = True
            return None
        published, due = self._published, now >= self._ask_at
        self._tell(published.withdrawn(CHANGES))
        asked = published.to_ask(max(1, KEYS_ASKED // max(1, len(self._caches()))), due, now)
        if asked:
            answer = self._ask(asked)
            self._answers = answer is not None
            if answer is None:
                return UNANSWERED_S if published.waits else None
            self._tell(published.answered(asked, answer.found, answer.epoch, self._steps, now))
        if due:
            self._ask_at = now + ASK_S
            self._tell(published.refresh(CHANGES, self._steps, now), news=False)
        if published.leaves:
            return 0.0
        return AGAIN_S if published.waits else None

    def _read_offers(self, now: float) -> None:
        while not self._offers.empty():
            offer = self._offers.get()
            if offer is None:
                self._published.withdraw_all()
                continue
            for key, number in zip(offer.keys, offer.numbers, strict=True):
                if number is not None and not self._published.knows(key):
                    event = stored_event(offer.request, number, self._sizes, get_offload_group_idx(key))
                    self._published.offer(key, msgpack.encode(event), now)

    def _ask(self, chunks: Sequence[bytes]) -> Stored | None:
        """Ask which chunks the pool has with all parts. Returns None if the directory can't answer now."""
        hashes, found = [get_offload_block_hash(chunk) for chunk in chunks], np.ones(len(chunks), np.uint8)
        epochs = set()
        for cache in self._caches().values():
            answer = cache.session.directory.stored(cache.rekey(hashes).tobytes())
            if answer is None or len(answer.found) != len(chunks):
                return None
            epochs.add(answer.epoch)
            found &= np.frombuffer(answer.found, np.uint8)
        return Stored(epochs.pop(), found.tobytes()) if len(epochs) == 1 else None

    def _tell(self, changes: Sequence[Change], news: bool = True) -> None:
        for events in events_of(changes):
            blocks = sum(len(event.block_hashes) for event in events)
            self._made += blocks
            self._made_news += news
            self._ready.append(Ready(events, blocks, news))


def stored_event(request: Any, number: int, sizes: Sizes, group: int) -> BlockStored:
    """Return the event for a request's chunk. Except for the medium, vLLM makes the same event for its own blocks."""
    start, stop = number * sizes.chunk, (number + 1) * sizes.chunk
    first, last, a_block = start // sizes.hash, stop // sizes.hash, sizes.block // sizes.hash
    extra = [
        generate_block_hash_extra_keys(request, at, at + sizes.block, 0)[0] for at in range(start, stop, sizes.block)
    ]
    lora = request.lora_request
    return BlockStored(
        block_hashes=[*map(maybe_convert_block_hash, request.block_hashes[first + a_block - 1 : last : a_block])],
        parent_block_hash=maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None,
        token_ids=list(request.all_token_ids[start:stop]),
        block_size=sizes.block,
        lora_id=lora.adapter_id if lora else None,
        medium=MEDIUM_CPU,
        lora_name=lora.name if lora else None,
        extra_keys=event_extra_keys(extra) if any(extra) else None,
        group_idx=group,
        kv_cache_spec_kind=sizes.kind,
    )


def events_of(changes: Sequence[Change]) -> Iterator[tuple[Any, ...]]:
    """Yield tuples of vLLM's events for changes, in order. One step gets all of a tuple. Merges adjacent removals."""
    removed: dict[int | None, list[Any]] = {}
    for change in changes:
        stored = msgpack.decode(change.event, type=BlockStored)
        blocks = stored.block_hashes * change.removed
        if change.stored:  # removal and event in one step: otherwise some routers would lack the block for a step
            yield from _removals(removed)
            yield (*(_removal(blocks, stored.group_idx) for _ in blocks[:1]), stored)
        else:
            removed.setdefault(stored.group_idx, []).extend(blocks)
            if len(removed[stored.group_idx]) >= REMOVED_AT_ONCE:
                yield from _removals(removed)
    yield from _removals(removed)


def _removals(removed: dict[int | None, list[Any]]) -> Iterator[tuple[Any, ...]]:
    for group, blocks in removed.items():
        yield (_removal(blocks, group),)
    removed.clear()


def _removal(blocks: list[Any], group: int | None) -> Any:
    return BlockRemoved(block_hashes=blocks, medium=MEDIUM_CPU, group_idx=group)
