"""The store of a node, which pulls blocks to that node for the node's readers."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.exceptions import RayError, RaySystemError

from raykv.client.directory_client import DirectoryClient
from raykv.client.stores.silence import PING_S, Silence
from raykv.client.stores.workers import giving_way
from raykv.cluster import ray_calls
from raykv.protocol.location import Locations
from raykv.protocol.transfers import PULLED, data_deadline, verdicts_of


class StoreClient:
    """The store of this process's node, or of another node.

    store: handle of the actor. silence: which nodes were late, and whether the store is silent.
    """

    def __init__(self, store: Any, on_failure: Callable[[], None]) -> None:
        """on_failure: called when blocks are late or do not arrive, since another actor may have become the store."""
        self.store, self._on_failure = store, on_failure
        self.silence = Silence()

    def reaches(self, nodes: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """(n,) bool: whether this store can pull from and push to each node or tier, by index in locations.

        False for nodes that were late in the last SUSPECT_AFTER_S, and for all nodes while this store does not answer.
        """
        silent = self.silence.of_store(self.store)
        return np.zeros(len(nodes), np.bool_) if silent else ~self.silence.of_nodes(nodes)

    def pull(self, source: Locations, keys: NDArray[np.uint8], target: Locations, external: bool = False) -> Any:
        """Start to fetch blocks into slots of this store's node.

        `first` waits for the answer, and `verdicts` reads the answer. source, target: (n,) LOCATION. keys: (n, 16)
        uint8. external: whether the source is an external tier.
        """
        pull = self.store.pull.options(concurrency_group="promote") if external else self.store.pull
        return pull.remote(_transfer(source, keys, target))

    def first(self, answers: list[Any], seconds: float) -> Any | None:
        """Return the pull that finishes first, or None if no pull finishes in time: see `gave_up`."""
        with giving_way(), contextlib.suppress(RaySystemError):  # after ray.shutdown()
            patience = max(0.0, seconds - PING_S)
            ready, _ = ray_calls.wait(answers, timeout=patience)
            if not ready and patience > 0.0:  # a wait of PING_S or less is for a tier, so the store is not late
                self.silence.ask(self.store)
            if not ready:
                ready, _ = ray_calls.wait(answers, timeout=seconds - patience)
            return ready[0] if ready else None
        return None

    def gave_up(self, nodes: NDArray[np.integer[Any]]) -> None:
        """Note late transfers from or to these nodes. The nodes count as late, unless this store itself is silent."""
        self._on_failure()
        if not self.silence.of_store(self.store):
            self.silence.note_late(nodes)

    def push(
        self, source: Locations, keys: NDArray[np.uint8], target: Locations, directory: DirectoryClient
    ) -> NDArray[np.uint8]:
        """Make other nodes fetch blocks from staging slots of this store's node. Returns `verdicts`.

        The arguments are as for `pull`.
        """
        answer = self.store.push.remote(_transfer(source, keys, target))
        if self.first([answer], data_deadline(int(target["bytes"].sum()))) is None:
            self.gave_up(target["node"])
        return self.verdicts(answer, target, directory)

    def verdicts(self, answer: Any, target: Locations, directory: DirectoryClient) -> NDArray[np.uint8]:
        """Return FAILED, PULLED or ALTERED for each block of a pull or push: (n,) uint8. Call `first` before.

        All blocks are FAILED if the store has not answered. Blocks that did not arrive count as a fault.
        """
        try:
            data = ray_calls.get(answer, timeout=0)
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
    """Return the fields of a Transfer, as a plain tuple, which Ray pickles fastest."""
    return source.tobytes(), keys.tobytes(), target.tobytes()
