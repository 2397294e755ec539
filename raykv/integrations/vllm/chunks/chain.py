"""A request's chunks. A chunk is a run of engine blocks, stored as one or several blocks of the pool (see `ranks`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_offload.base import get_offload_group_idx

from raykv.integrations.vllm.chunks.chunks import Origin
from raykv.integrations.vllm.chunks.hints import NO_HINT, Hint
from raykv.integrations.vllm.chunks.tail import Tail


@dataclass
class Chain:
    """A request's chunks.

    keys: vLLM's hashes in order, by group. These are the scheduler's own lists, which grow.
    resets: number of resets when the request began. Chunks computed before a later reset have old weights.
    tail: the prompt's tail, if tails are stored or read. limited: whether vLLM offers only some of the chunks to store.
    hint: the request's hint about its session. most: maximum number of tokens to load, see `loadable`.
    start: the first token that neither the engine's own cache nor the pool had. trusted: whether the keys name the KV
    that the request computes. adapter: vLLM's id of the LoRA adapter. question: number of the request's question to the
    workers, see `ToldAdapters.ask`. loads: by rank, the `number` of the adapter's Load that the request uses.
    request: vLLM's request, whose tokens and hashes do not change once they are computed.
    """

    keys: dict[int, list[bytes]]
    origin: Origin
    resets: int = 0
    tail: Tail | None = None
    limited: bool = False
    hint: Hint = NO_HINT
    most: int | None = None
    start: int | None = None
    adapter: int | None = None
    question: int = 0
    loads: dict[int, int] | None = None
    trusted: bool = True
    request: Any = None
    numbers: dict[bytes, int] = field(default_factory=dict, init=False)
    _known: Counter[int] = field(default_factory=Counter, init=False)

    @property
    def is_named(self) -> bool:
        """Whether the keys name the KV that the request computes, including its adapter's weights."""
        return self.trusted and (self.adapter is None or self.origin.adapter is not None)

    def number(self, key: bytes) -> int | None:
        """Return a chunk's number in its group, from 0, or the tail's number. None for a chunk of another request."""
        if self.tail is not None and self.is_tail(key):
            return self.tail.number
        group = get_offload_group_idx(key)
        keys = self.keys.get(group, [])
        chunks = len(keys) - bool(keys and self.is_tail(keys[-1]))  # while the tail is loaded, its key is last
        for number in range(self._known[group], chunks):
            self.numbers[keys[number]] = number
        self._known[group] = chunks
        return self.numbers.get(key)

    def run(self, keys: list[bytes]) -> range:
        """Return the numbers of consecutive chunks of a group."""
        first = self.number(keys[0])
        assert first is not None
        return range(first, first + len(keys))

    def behind(self, start: int, group: int, tokens: int) -> list[bytes]:
        """Return the chunks of a group that begin at token `start` or later. tokens: number of tokens per chunk."""
        return [key for key in self.keys.get(group, [])[-(-start // tokens) :] if not self.is_tail(key)]

    def is_tail(self, key: bytes) -> bool:
        return self.tail is not None and self.tail.key == key

    @property
    def tail_now(self) -> Tail | None:
        """The tail if it comes right after `keys`, else None. Generated tokens turn the tail into a full chunk."""
        if self.tail is None or self.tail.number != len(self.keys[get_offload_group_idx(self.tail.key)]):
            return None
        return self.tail

    def since(self, group: int, first: int, tokens: int, ahead: int) -> list[bytes]:
        """Return a group's chunks from number `first` on, and then the tail if `tail_now` belongs to the group.

        Includes only `ahead` of the chunks that begin after `most` tokens. tokens: number of tokens per chunk.
        """
        stop = None if self.most is None else -(-self.most // tokens) + ahead
        keys, tail = self.keys[group][first:stop], self.tail_now
        return [*keys, tail.key] if tail and get_offload_group_idx(tail.key) == group else keys
