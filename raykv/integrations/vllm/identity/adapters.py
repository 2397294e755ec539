"""The weights of LoRA adapters. vLLM hashes only an adapter's name and path (in 0.29: its name), not its weights.

The weights under a name and path may change. ray.serve.llm keeps an adapter under a path made of its name, even if the
adapter comes from another bucket or was retrained. vLLM can also reload an adapter in place. So the workers report the
weights that they loaded. The scheduler's side does not name an adapter's chunks until all workers have reported. See
`loads` for the workers' side.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Load(NamedTuple):
    """An adapter in a worker. weights: digest of the files from which it was loaded; b"" while unknown.

    number: never lower than the number of an earlier load of the same name. Equal numbers mean equal weights.
    """

    name: str
    number: int
    weights: bytes


class Told(NamedTuple):
    """A worker's report of its adapters, by vLLM's ids. question: number of the last question that it answers."""

    question: int
    loads: dict[int, Load]


class Adapter(NamedTuple):
    """The adapter in a request's keys. id: vLLM's id. numbers: by rank, the number of the load with these weights."""

    id: int
    weights: bytes
    numbers: dict[int, int]


class ToldAdapters:
    """The adapters that all workers of an engine have reported to the scheduler's side."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._told: dict[int, Told] = {}  # by rank
        self._newest: dict[tuple[int, str], int] = {}  # the highest number of a load, by rank and name
        self.question = 0  # number of the last question

    def ask(self) -> int:
        """From now on, ask the workers which adapters they have. Returns the number of the question."""
        self.question += 1
        return self.question

    def answered(self, question: int) -> bool:
        return len(self._told) == self._ranks and all(told.question >= question for told in self._told.values())

    def tell(self, told: dict[int, Told]) -> set[str]:
        """Add reports of workers. told: the reports, by rank.

        Returns the names of adapters whose weights changed, perhaps while requests use these adapters.
        """
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
        """Return the number of the current load by rank, or None if a rank has no load. adapter: vLLM's id."""
        found = {rank: told.loads[adapter].number for rank, told in self._told.items() if adapter in told.loads}
        return found if len(found) == self._ranks else None

    def named(self, adapter: int, numbers: dict[int, int]) -> Adapter | None:
        """Return the adapter with the weights of these loads, or None if the loads are gone or differ in weights."""
        if self.numbers(adapter) != numbers:
            return None
        found = {told.loads[adapter].weights for told in self._told.values()}
        weights = found.pop()
        return Adapter(adapter, weights, numbers) if weights and not found else None


class OwnCache:
    """Evicts the blocks of vLLM's own prefix cache after an adapter's weights changed.

    vLLM's cache knows an adapter by name only. blocks: vLLM's block pool.
    """

    def __init__(self) -> None:
        self.blocks: Any = None
        self._outdated: dict[str, list[Any]] = {}  # unfinished requests that began with the old weights, by name

    def let_go(self, name: str, requests: list[Any]) -> None:
        """Evict all blocks, as an adapter has other weights now. requests: vLLM's requests with old weights."""
        self._outdated[name] = [*self._outdated.get(name, []), *requests]
        self._evict()

    def is_mixed(self, name: str) -> bool:
        """Whether blocks in vLLM's cache may mix old and new weights. Evicts all blocks once no old request is left."""
        if name not in self._outdated:
            return False
        self._outdated[name] = [request for request in self._outdated[name] if not request.is_finished()]
        if not self._outdated[name]:
            del self._outdated[name]
            self._evict()
        return True

    def _evict(self) -> None:
        self.blocks.evict_blocks(set(range(len(self.blocks.blocks))))
