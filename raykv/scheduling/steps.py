"""Which requests an engine runs in its next step. What is cached costs no tokens, and no blocks where others hold it.

Names are those of vLLM's scheduler, where it has them (vllm/v1/core/sched/scheduler.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt, and what was generated after it.

    keys: (n, k) uint8, of the full blocks of its prompt; each stands for all before it, as those of `KVCache.keys` do.
    num_tokens: of its prompt, and generated. arrival: seconds. num_computed_tokens: of a running request, whose KV it
    has; of a waiting one, whose KV is cached where the engine can read it, so that they need not be computed.
    num_held_blocks: of a waiting one, how many of its first blocks running requests hold. Cached blocks that nobody
    holds are free ones, which are free no more when it starts.
    """

    keys: NDArray[np.uint8]
    num_tokens: int
    arrival: float
    num_computed_tokens: int = 0
    num_held_blocks: int = 0

    @property
    def num_new_tokens(self) -> int:
        """To compute until it can be sampled from: at least one, also where all is cached."""
        return max(1, self.num_tokens - self.num_computed_tokens)


class Budget(NamedTuple):
    """Of one step: tokens to compute, and blocks that are free. block_tokens: tokens of a block."""

    tokens: int
    blocks: int
    block_tokens: int


class Scheduled(NamedTuple):
    """A request that is run in the step, and how many of its tokens are computed."""

    request: Request
    num_new_tokens: int


def plan(
    waiting: Sequence[Request], running: Sequence[Request], budget: Budget, now: float, patience: float
) -> list[Scheduled]:
    """What to run in the next step: running requests first, then waiting ones, those with the least to compute first.

    A waiting request starts if there are blocks for all that it has to compute, in later steps too, and waits while
    another computes its next block. Who has waited `patience` seconds is passed over no more, but while it waits for
    another's block: such requests start in order of arrival, before all others. A running request that needs a block
    where none is free is left out: free some by preempting one. One that needs more blocks than the engine has would
    hold up all others: refuse it at the door. now: seconds, as arrivals are.
    """
    step = _Step(budget)
    for request in sorted(running, key=lambda request: request.num_new_tokens):  # who generates waits for no prompt
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
    """What is left of a budget, and who has which part."""

    def __init__(self, budget: Budget) -> None:
        self.tokens, self._blocks, self._block_tokens = budget.tokens, budget.blocks, budget.block_tokens
        self._computing: set[bytes] = set()  # keys of blocks that requests compute, now or in a later step
        self.scheduled: list[Scheduled] = []

    def run(self, request: Request) -> None:
        """Go on with a running request, as far as there are tokens. Its blocks are kept for it in any case."""
        blocks = self._blocks_of(request.num_tokens) - self._blocks_of(request.num_computed_tokens)
        if blocks <= self._blocks:
            self._take(request)
        self._blocks = max(0, self._blocks - blocks)

    def start(self, request: Request) -> bool:
        """Run a waiting request, or leave it to wait for another that computes its next block. False: no blocks."""
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
