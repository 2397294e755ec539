"""The node store beside a client: the memory that it maps into this process, and the pulls that it is asked for."""

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from raykv import registry
from raykv.arena.arena import Arena
from raykv.arena.gpu_arena import GpuArena
from raykv.client.directory_client import DirectoryClient, plain
from raykv.client.silence import PING_S, Silence
from raykv.client.workers import giving_way
from raykv.protocol import FAILED, PULLED, StoreDescription, Transfer, data_deadline, verdicts_of

DESCRIBE_DEADLINE_S = 60.0  # a store that has just started waits for the directory

Locations = NDArray[np.void]


def pieces(indices: NDArray[np.intp], blocks: int) -> Iterator[NDArray[np.intp]]:
    """Indices in runs of at most `blocks`."""
    for first in range(0, len(indices), blocks):
        yield indices[first : first + blocks]


class LocalStore:
    """The store of this process's node. While it is down its memory still serves; only other nodes' blocks are missed.

    store: handle of the actor. name: what the directory calls the memory. index: what locations call it.
    arena: the memory, mapped.
    """

    def __init__(self, pool: str, node_id: str, gpu: str | None = None) -> None:
        """gpu: UUID of the GPU whose memory is meant, where that has a tier; None: the node's memory.

        Raises ValueError where the node has no store, RayError where it does not answer, and ArenaMismatch where this
        process sees other shared memory than the store (rule 12).
        """
        self.store = registry.find(registry.node_store_name(pool, node_id))
        described = StoreDescription(*ray.get(self.store.describe_arena.remote(gpu), timeout=DESCRIBE_DEADLINE_S))
        self.name = described.name
        self.index = described.node
        if gpu and described.handle:
            self.arena: Arena = GpuArena.map(described.path, described.nonce, gpu, described.handle)
        else:
            self.arena = Arena.attach(described.path, described.nonce)
        weakref.finalize(self, self.arena.close).atexit = False
        self._silence = Silence()

    def reaches(self, nodes: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """(n,) bool: whether blocks can come here from, or go to, other nodes or tiers, by the index in locations.

        False for those that did not answer a short while ago, and for all while the store here does not answer.
        """
        silent = self._silence.of_store(self.store)
        return np.zeros(len(nodes), np.bool_) if silent else ~self._silence.of_nodes(nodes)

    def pull(self, source: Locations, keys: NDArray[np.uint8], target: Locations, external: bool = False) -> Any:
        """Begin to fetch blocks into slots of this node; `verdicts` waits for the answer.

        source, target: (n,) LOCATION. keys: (n, 16) uint8. external: the source is an external tier.
        """
        pull = self.store.pull.options(concurrency_group="promote") if external else self.store.pull
        return pull.remote(_transfer(source, keys, target))

    def wrong(self, locations: Locations, keys: NDArray[np.uint8]) -> Locations:
        """Of blocks that could not be read, those to report as corrupt.

        Left out are good blocks whose length differs from what this reader expects: there the reader is wrong.
        """
        return locations[~self.arena.holds_other_length(locations, keys)]

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
        """What was to come from nodes, or go there, is late. If the store here answers, it is they who do not."""
        if not self._silence.of_store(self.store):
            self._silence.note_late(nodes)

    def push(
        self, source: Locations, keys: NDArray[np.uint8], target: Locations, directory: DirectoryClient
    ) -> NDArray[np.uint8]:
        """Have other nodes fetch blocks from staging slots of this node; (n,) verdicts. Arguments as of `pull`."""
        if not self.reaches(target["node"]).all():
            directory.fault("silent", f"{len(target)} blocks are for nodes that do not answer")
            return np.full(len(target), FAILED, np.uint8)
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
            return np.zeros(len(target), np.uint8)
        if (verdicts != PULLED).any():
            directory.fault("pull", f"{int((verdicts != PULLED).sum())} blocks did not arrive")
        return verdicts


def _transfer(source: Locations, keys: NDArray[np.uint8], target: Locations) -> tuple[bytes, bytes, bytes]:
    return plain(Transfer(source.tobytes(), keys.tobytes(), target.tobytes()))
