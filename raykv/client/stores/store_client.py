"""The store of a node, which pulls blocks there for whoever reads them on that node."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from raykv.client.directory_client import DirectoryClient, plain
from raykv.client.stores.silence import PING_S, Silence
from raykv.client.stores.workers import giving_way
from raykv.protocol.transfers import PULLED, Transfer, data_deadline, verdicts_of

Locations = NDArray[np.void]


def pieces(indices: NDArray[np.intp], blocks: int) -> Iterator[NDArray[np.intp]]:
    """Indices in runs of at most `blocks`."""
    for first in range(0, len(indices), blocks):
        yield indices[first : first + blocks]


class StoreClient:
    """The store of this process's node, or of another.

    store: handle of the actor.
    """

    def __init__(self, store: Any, on_failure: Callable[[], None]) -> None:
        """on_failure: called where blocks are late or do not arrive: the store may be another actor now."""
        self.store, self._on_failure = store, on_failure
        self._silence = Silence()

    def reaches(self, nodes: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """(n,) bool: whether blocks can come there from, or go to, other nodes or tiers, by the index in locations.

        False for those that did not answer a short while ago, and for all while this store does not answer.
        """
        silent = self._silence.of_store(self.store)
        return np.zeros(len(nodes), np.bool_) if silent else ~self._silence.of_nodes(nodes)

    def pull(self, source: Locations, keys: NDArray[np.uint8], target: Locations, external: bool = False) -> Any:
        """Begin to fetch blocks into slots of its node; `verdicts` waits for the answer.

        source, target: (n,) LOCATION. keys: (n, 16) uint8. external: the source is an external tier.
        """
        pull = self.store.pull.options(concurrency_group="promote") if external else self.store.pull
        return pull.remote(_transfer(source, keys, target))

    def first(self, answers: list[Any], seconds: float) -> Any | None:
        """The first of several pulls to be done. None if none is done in time: see `gave_up`."""
        with giving_way():
            patience = max(0.0, seconds - PING_S)
            ready, _ = ray.wait(answers, timeout=patience)
            if not ready and patience > 0.0:  # else it is a tier that is late
                self._silence.ask(self.store)
            if not ready:
                ready, _ = ray.wait(answers, timeout=seconds - patience)
        return ready[0] if ready else None

    def gave_up(self, nodes: NDArray[np.integer[Any]]) -> None:
        """What was to come from nodes, or go there, is late. If this store answers, it is they who do not."""
        self._on_failure()
        if not self._silence.of_store(self.store):
            self._silence.note_late(nodes)

    def push(
        self, source: Locations, keys: NDArray[np.uint8], target: Locations, directory: DirectoryClient
    ) -> NDArray[np.uint8]:
        """Have other nodes fetch blocks from staging slots of its node; (n,) verdicts. Arguments as of `pull`."""
        answer = self.store.push.remote(_transfer(source, keys, target))
        if self.first([answer], data_deadline(int(target["bytes"].sum()))) is None:
            self.gave_up(target["node"])
        return self.verdicts(answer, target, directory)

    def verdicts(self, answer: Any, target: Locations, directory: DirectoryClient) -> NDArray[np.uint8]:
        """(n,) uint8 FAILED, PULLED or ALTERED: what became of a pull or a push into `target`, after `first`.

        A store that has not answered has fetched nothing. What did not arrive is counted as a fault.
        """
        try:
            data = ray.get(answer, timeout=0)
            verdicts = verdicts_of(data, len(target))
        except (RayError, ValueError) as error:
            directory.fault("pull", type(error).__name__)
            self._on_failure()
            return np.zeros(len(target), np.uint8)
        if (verdicts != PULLED).any():
            self._on_failure()
            directory.fault("pull", f"{int((verdicts != PULLED).sum())} blocks did not arrive")
        return verdicts


def _transfer(source: Locations, keys: NDArray[np.uint8], target: Locations) -> tuple[bytes, bytes, bytes]:
    return plain(Transfer(source.tobytes(), keys.tobytes(), target.tobytes()))
