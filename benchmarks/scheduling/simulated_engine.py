"""An engine without a model, which tells how many tokens a scheduler would compute and how long requests would wait."""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.scheduling import Budget, Request, Scheduled

Policy = Callable[[list[Request], list[Request], Budget, float], list[Scheduled]]  # waiting, running, budget, now


class Job(NamedTuple):
    """A prompt. arrival: time in seconds. keys: (n, k) uint8, keys of its full blocks. output: tokens to generate.

    loaded: number of its leading blocks that were read from a pool. asked: time at which its wait begins; None if that
    is its arrival.
    """

    keys: NDArray[np.uint8]
    tokens: int
    arrival: float
    output: int = 1
    loaded: int = 0
    asked: float | None = None


class Speed(NamedTuple):
    """step_s: seconds of each step. token_s: additional seconds per token. tokens: maximum tokens of a step."""

    step_s: float = 0.005
    token_s: float = 1 / 20_000
    tokens: int = 8192


class BlockPool:
    """Blocks of an engine. Named blocks that no request holds remain cached until they are evicted by LRU."""

    def __init__(self, blocks: int) -> None:
        self.free = blocks  # number of blocks that no request holds
        self._nameless = 0
        self._held: Counter[bytes] = Counter()
        self._resting: OrderedDict[bytes, None] = OrderedDict()

    def cached(self, names: list[bytes]) -> int:
        """Number of names at the start of `names` whose blocks the pool has."""
        return _leading(name in self._held or name in self._resting for name in names)

    def held(self, names: list[bytes]) -> int:
        """Number of names at the start of `names` whose blocks are held by requests."""
        return _leading(name in self._held for name in names)

    def hold(self, names: list[bytes]) -> None:
        """Hold blocks. The pool must have these blocks."""
        for name in names:
            self.free -= name not in self._held
            self._held[name] += 1
            self._resting.pop(name, None)

    def take(self, blocks: int) -> None:
        """Allocate free blocks, which have no names yet."""
        assert blocks <= self.free, f"{blocks} blocks are wanted where {self.free} are free"
        self.free -= blocks
        self._nameless += blocks
        while len(self._resting) > self.free:
            self._resting.popitem(last=False)

    def name(self, names: list[bytes]) -> None:
        """Name allocated blocks, and hold them. If another block already has the name, that block is held instead."""
        self.give_back(len(names))
        self.hold(names)

    def give_back(self, blocks: int) -> None:
        """Free allocated blocks that have no name."""
        self.free += blocks
        self._nameless -= blocks

    def release(self, names: list[bytes]) -> None:
        """End the hold on named blocks. The last block will be evicted first."""
        for name in reversed(names):
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]
                self._resting[name] = None
                self.free += 1


@dataclass(eq=False)
class Running:
    """A job that has started. named: number of its blocks that have names. blocks: total number of its blocks."""

    job: Job
    names: list[bytes]
    tokens: int
    computed: int
    named: int
    blocks: int

    @property
    def request(self) -> Request:
        return Request(self.job.keys, self.tokens, self.job.arrival, self.computed)


class SimulatedEngine:
    """Simulates continuous batching step by step, with a prefix cache of limited size.

    computed: number of computed prompt tokens. waits: seconds until the first token, by the job's number.
    """

    def __init__(self, jobs: Sequence[Job], blocks: int, block_tokens: int, policy: Policy, speed: Speed) -> None:
        """Raises ValueError if a job does not fit."""
        self._blocks, self._block_tokens, self._policy, self._speed = blocks, block_tokens, policy, speed
        self._jobs: list[Job] = []
        self._names: list[list[bytes]] = []
        self._pool, self._now = BlockPool(blocks), 0.0
        self._coming: list[tuple[float, int]] = []  # heap of (arrival, job number)
        self._waiting: list[int] = []
        self._running: dict[int, Running] = {}
        self.computed, self.preempted = 0, 0
        self.waits: list[float] = []  # NaN before the first token
        self.answering: list[int] = []  # jobs whose prompts were computed, in order
        self.done: list[int] = []  # jobs that have ended, in order
        for job in jobs:
            self.add(job)

    def add(self, job: Job) -> int:
        """Add a job. Returns the job's number. Raises ValueError if the job does not fit."""
        if job.tokens + job.output > self._blocks * self._block_tokens:
            raise ValueError(f"a prompt and its output need more than the {self._blocks} blocks of the engine")
        number = len(self._jobs)
        self._jobs.append(job)
        self._names.append([key.tobytes() for key in job.keys])
        self.waits.append(np.nan)
        heapq.heappush(self._coming, (job.arrival, number))
        return number

    def cached(self, names: list[bytes]) -> int:
        """Number of names at the start of `names` whose blocks the engine's own cache has."""
        return self._pool.cached(names)

    def tokens_to_compute(self) -> int:
        """Number of prompt tokens that the engine still has to compute, for all jobs."""
        waiting = [*self._waiting, *(number for _, number in self._coming)]
        tokens = sum(
            self._jobs[number].tokens - self.cached(self._names[number]) * self._block_tokens for number in waiting
        )
        return tokens + sum(max(0, running.job.tokens - running.computed) for running in self._running.values())

    def blocks_in_use(self, names: list[bytes]) -> int:
        """Number of blocks that running jobs would hold if one more job, with blocks of these names, ran."""
        return self._blocks - self._pool.free + len(names) - self._pool.held(names)

    def run(self, until: float = np.inf) -> None:
        """Run steps until this time, or until all jobs are done."""
        while self._coming or self._waiting or self._running:
            if not self._waiting and not self._running:
                self._now = max(self._now, min(until, self._coming[0][0]))
            if self._now >= until:
                break
            while self._coming and self._coming[0][0] <= self._now:
                self._waiting.append(heapq.heappop(self._coming)[1])
            if not self._waiting and self._generate(min(until, self._coming[0][0] if self._coming else np.inf)):
                continue
            self._step()

    def _generate(self, until: float) -> bool:
        """Run all steps up to `until` at once if every running job only generates, so that no policy has a choice.

        Returns whether the steps were run.
        """
        jobs = self._running.values()
        step = self._speed.step_s + self._speed.token_s * len(jobs)
        left = min(running.job.tokens + running.job.output - running.tokens for running in jobs)
        steps = min(left, int((until - self._now) / step) if until < np.inf else left)
        needed = sum(-(-(running.computed + steps) // self._block_tokens) - running.blocks for running in jobs)
        if steps < 2 or any(running.computed < running.job.tokens for running in jobs) or needed > self._pool.free:
            return False
        self._advance({place: steps for place in self._running}, steps)
        return True

    def _step(self) -> None:
        waiting = {self._as_request(place): place for place in self._waiting}
        running = {running.request: place for place, running in self._running.items()}
        budget = Budget(self._speed.tokens, self._pool.free, self._block_tokens)
        scheduled = self._policy(list(waiting), list(running), budget, self._now)
        for request, _ in scheduled:
            if request in waiting:
                self._start(waiting[request])
        new = {{**waiting, **running}[request]: tokens for request, tokens in scheduled}
        if not new:
            return self._preempt()
        return self._advance(new)

    def _advance(self, new: dict[int, int], steps: int = 1) -> None:
        """Compute tokens in `steps` steps. new: number of tokens by job."""
        for place, tokens in new.items():
            self._take_blocks(self._running[place], tokens)
        self._now += self._speed.step_s * steps + self._speed.token_s * sum(new.values())
        for place, tokens in new.items():
            self._compute(place, tokens)

    def _as_request(self, place: int) -> Request:
        job, names = self._jobs[place], self._names[place]
        computed = max(self._pool.cached(names), job.loaded) * self._block_tokens
        return Request(job.keys, job.tokens, job.arrival, computed, self._pool.held(names))

    def _start(self, place: int) -> None:
        job, names = self._jobs[place], self._names[place]
        cached = self._pool.cached(names)
        self._pool.hold(names[:cached])
        loaded = max(cached, job.loaded)
        self._pool.take(loaded - cached)
        self._pool.name(names[cached:loaded])
        self._waiting.remove(place)
        computed = min(loaded * self._block_tokens, job.tokens - 1)
        self._running[place] = Running(job, names, job.tokens, computed, loaded, loaded)

    def _take_blocks(self, running: Running, tokens: int) -> None:
        blocks = -(-(running.computed + tokens) // self._block_tokens)
        self._pool.take(max(0, blocks - running.blocks))
        running.blocks = max(blocks, running.blocks)

    def _compute(self, place: int, tokens: int) -> None:
        running = self._running[place]
        self.computed += max(0, min(tokens, running.job.tokens - running.computed))
        running.computed += tokens
        full = min(running.computed // self._block_tokens, len(running.names))
        if full > running.named:
            self._pool.name(running.names[running.named : full])
            running.named = full
        if running.computed < running.tokens:
            return
        if np.isnan(self.waits[place]):
            self.waits[place] = self._now - (running.job.arrival if running.job.asked is None else running.job.asked)
            self.answering.append(place)
        running.tokens = running.computed + 1
        if running.tokens - running.job.tokens >= running.job.output:
            self._stop(place)
            self.done.append(place)

    def _stop(self, place: int) -> None:
        running = self._running.pop(place)
        self._pool.release(running.names[: running.named])
        self._pool.give_back(running.blocks - running.named)

    def _preempt(self) -> None:
        """Preempt the job that started last, as no job can continue. Its evicted blocks must be computed again."""
        place = next(reversed(self._running))
        self._stop(place)
        self._waiting.insert(0, place)
        self.preempted += 1


def _leading(found: Iterable[bool]) -> int:
    return sum(1 for _ in takewhile(bool, found))
