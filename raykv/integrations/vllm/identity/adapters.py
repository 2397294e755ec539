"""Which weights a LoRA adapter has: vLLM hashes its name and path (0.29 only its name), and others may have both.

ray.serve.llm keeps every adapter under a path made of its name, whatever bucket it came from and however often it was
trained again; vLLM loads an adapter again in place. So the workers tell which weights they loaded, and the scheduler's
side names no chunk of an adapter before all of them did. See `loads` for the workers' side.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Load(NamedTuple):
    """An adapter as a worker has it. number: of a name's loads; another number may be other weights.

    weights: a digest of the files that it was loaded from; empty where nobody knows (yet) which those were.
    """

    name: str
    number: int
    weights: bytes


class Told(NamedTuple):
    """What a worker has loaded, by vLLM's ids. question: of the scheduler's, the last that this answers."""

    question: int
    loads: dict[int, Load]


class Adapter(NamedTuple):
    """What a request's keys name. id: vLLM's. numbers: by rank, of the loads that had these weights."""

    id: int
    weights: bytes
    numbers: dict[int, int]


class ToldAdapters:
    """What all workers of an engine have loaded, as they told the scheduler's side."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._told: dict[int, Told] = {}  # by rank
        self._newest: dict[tuple[int, str], int] = {}  # by rank and name, the highest number of a load
        self.question = 0  # the last that was asked

    def ask(self) -> int:
        """Have the workers tell what they have loaded after now. Returns the number of the question."""
        self.question += 1
        return self.question

    def answered(self, question: int) -> bool:
        return len(self._told) == self._ranks and all(told.question >= question for told in self._told.values())

    def tell(self, told: dict[int, Told]) -> set[str]:
        """told: by rank. Returns the names of adapters that have other weights than a request may have begun with."""
        self._told |= told
        changed = set()
        for rank, of_rank in told.items():
            for load in of_rank.loads.values():
                newest = self._newest.get((rank, load.name), load.number)
                if load.number > newest:
                    changed.add(load.name)
                self._newest[rank, load.name] = max(load.number, newest)
        return changed

    def numbers(self, adapter: int) -> dict[int, int] | None:
        """By rank, of the loads that are there now; None unless all ranks have one. adapter: vLLM's id."""
        found = {rank: told.loads[adapter].number for rank, told in self._told.items() if adapter in told.loads}
        return found if len(found) == self._ranks else None

    def named(self, adapter: int, numbers: dict[int, int]) -> Adapter | None:
        """With what these loads have for weights; None where they are not there, or do not agree."""
        if self.numbers(adapter) != numbers:
            return None
        found = {told.loads[adapter].weights for told in self._told.values()}
        weights = found.pop()
        return Adapter(adapter, weights, numbers) if weights and not found else None


class OwnCache:
    """vLLM's own prefix cache, which knows an adapter by its name: what it has of other weights is let go of.

    blocks: vLLM's pool of them.
    """

    def __init__(self) -> None:
        self.blocks: Any = None
        self._outdated: dict[str, list[Any]] = {}  # by name, requests that go on with blocks of both weights

    def let_go(self, name: str, requests: list[Any]) -> None:
        """An adapter has other weights now. requests: vLLM's, which began before."""
        self._outdated[name] = [*self._outdated.get(name, []), *requests]
        self._evict()

    def is_mixed(self, name: str) -> bool:
        """Whether what a request finds there now may be of both weights. What the last one left is let go of here."""
        if name not in self._outdated:
            return False
        self._outdated[name] = [request for request in self._outdated[name] if not request.is_finished()]
        if not self._outdated[name]:
            del self._outdated[name]
            self._evict()
        return True

    def _evict(self) -> None:
        self.blocks.evict_blocks(set(range(len(self.blocks.blocks))))
