"""A request's chunks, as vLLM's scheduler and the pool call them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import get_offload_group_idx

from raykv.integrations.vllm.chunks.chunks import Origin
from raykv.integrations.vllm.chunks.tail import Tail


@dataclass
class Chain:
    """A request's chunks, by vLLM's hashes. keys: by group, in order, the scheduler's own lists, which grow with it.

    resets: how many there had been when the request began. What it computed before a later one is of other weights.
    adapter: vLLM's id of the LoRA adapter that it asks for. question: to the workers, of what they have loaded.
    loads: by rank, the numbers of those that it computes with. trusted: its keys name what it computes.
    tail: of its prompt, where that is stored or read. limited: not all that it computes is offered. most: how many of
    its tokens are loaded at most, see `loadable`.
    """

    keys: dict[int, list[bytes]]
    origin: Origin
    resets: int = 0
    tail: Tail | None = None
    limited: bool = False
    most: int | None = None
    adapter: int | None = None
    question: int = 0
    loads: dict[int, int] | None = None
    trusted: bool = True
    numbers: dict[bytes, int] = field(default_factory=dict, init=False)
    _known: Counter[int] = field(default_factory=Counter, init=False)

    @property
    def is_named(self) -> bool:
        """Whether its keys name what it computes, with the weights of its adapter."""
        return self.trusted and (self.adapter is None or self.origin.adapter is not None)

    def number(self, key: bytes) -> int | None:
        """Of a chunk in its group, from 0 on, or of the tail; None for one that is not the request's."""
        if self.tail is not None and self.is_tail(key):
            return self.tail.number
        group = get_offload_group_idx(key)
        keys = self.keys.get(group, [])
        chunks = len(keys) - bool(keys and self.is_tail(keys[-1]))  # it lies there while it is loaded
        for number in range(self._known[group], chunks):
            self.numbers[keys[number]] = number
        self._known[group] = chunks
        return self.numbers.get(key)

    def is_tail(self, key: bytes) -> bool:
        return self.tail is not None and self.tail.key == key

    @property
    def tail_now(self) -> Tail | None:
        """The tail, if it is what follows the chunks: a request outgrows its prompt."""
        if self.tail is None or self.tail.number != len(self.keys[get_offload_group_idx(self.tail.key)]):
            return None
        return self.tail

    def since(self, group: int, first: int, tokens: int) -> list[bytes]:
        """A group's chunks from this number on, up to `most`, and the tail if it follows them. tokens: of a chunk."""
        stop = None if self.most is None else -(-self.most // tokens)
        keys, tail = self.keys[group][first:stop], self.tail_now
        return [*keys, tail.key] if tail and get_offload_group_idx(tail.key) == group else keys
