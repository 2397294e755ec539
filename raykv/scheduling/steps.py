"""Plans which requests an engine runs in its next step. Cached tokens cost no computing.

If other requests hold the blocks of cached tokens, these tokens cost no free blocks either.

Names are as in vLLM's scheduler (vllm/v1/core/sched/scheduler.py), if that scheduler has the same thing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt, and the tokens that were generated after it.

    keys: (n, k) uint8, keys of the prompt's full blocks. Each key also identifies all earlier blocks, as in
    `KVCache.keys`.
    num_tokens: number of prompt tokens and generated tokens. arrival: time in seconds. num_computed_tokens: for a
    running request, the number of tokens with KV in the engine. For a waiting request, the number of tokens with cached
    KV that the engine can read.
    num_held_blocks: for a waiting request, the number of its first blocks that running requests hold. The other cached
    blocks count as free until the request starts.
    """

    keys: NDArray[np.uint8]
    num_tokens: int
    arrival: float
    num_computed_tokens: int = 0
    num_held_blocks: int = 0

    @property
    def num_new_tokens(self) -> int:
        """Number of tokens to compute before a token can be sampled: at least one, even if all tokens are cached."""
        return max(1, self.num_tokens - self.num_computed_tokens)


class Budget(NamedTuple):
    """The limits of one step: tokens to compute, and free blocks. block_tokens: number of tokens in a block."""

    tokens: int
    blocks: int
    block_tokens: int


class Scheduled(NamedTuple):
    """A request that runs in the step, and the number of its tokens that are computed."""

    request: Request
    num_new_tokens: int


def plan(
    waiting: Sequence[Request], running: Sequence[Request], budget: Budget, now: float, patience: float
) -> list[Scheduled]:
    """Choose the requests for the next step: running before waiting requests, each with the least to compute first.

    A waiting request starts if there are blocks for everything that it must compute, including later steps. It waits
    while another request computes its next block. Requests that have waited `patience` seconds come before other
    waiting requests, in order of arrival. Other requests overtake such a request only while it waits for another
    request's block. A running request is left out if it finds no free block: preempt a request to free blocks.
    Refuse requests that need more blocks than the engine has: they would block all others. now: seconds, on the clock
    of arrivals.
    """
    step = _Step(budget)
    for request in sorted(running, key=lambda request: request.num_new_tokens):  # generation before prompts
        step.run(request)
    for request in _in_turn(waiting, now, patience):
        if not step.tokens or not (step.start(request) or request.arrival > now - patience):
            break
    return step.scheduled


def _in_turn(waiting: Sequence[Request], now: float, patience: float) -> Iterator[Request]:
    late = [request for request in waiting if request.arrival <= now - patience]
    yield from sorted(late, key=lambda request: request.arrival)
    others = [request for request in waiting if request.arrival > now - patience]
    yield from sorted(others, key=lambda request: (request.num_new_tokens, request.arrival))


class _Step:
    """The unused part of a budget, and the requests that use the rest."""

    def __init__(self, budget: Budget) -> None:
        self.tokens, self._blocks, self._block_tokens = budget.tokens, budget.blocks, budget.block_tokens
        self._computing: set[bytes] = set()  # keys of blocks that requests compute, now or in a later step
        self.scheduled: list[Scheduled] = []

    def run(self, request: Request) -> None:
        """Continue a running request, as far as the token budget allows.

        The blocks that the request needs stay reserved even if it can't run.
        """
        blocks = self._blocks_of(request.num_tokens) - self._blocks_of(request.num_computed_tokens)
        if blocks <= self._blocks:
            self._take(request)
        self._blocks = max(0, self._blocks - blocks)

    def start(self, request: Request) -> bool:
        """Run a request, or let it wait for another request's block. Returns False if too few blocks are free."""
        first = request.num_computed_tokens // self._block_tokens
        if first < len(request.keys) and request.keys[first].tobytes() in self._computing:
            return True
        blocks = self._blocks_of(request.num_tokens) - request.num_held_blocks
        if blocks > self._blocks:
            return False
        self._take(request)
        self._blocks -= blocks
        return True

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _take(self, request: Request) -> None:
        new = min(request.num_new_tokens, self.tokens)
        if new:
            self.tokens -= new
            self.scheduled.append(Scheduled(request, new))
        first = request.num_computed_tokens // self._block_tokens
        self._computing.update(key.tobytes() for key in request.keys[first:])
