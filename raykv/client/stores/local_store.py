"""The node store beside a client: the memory that it maps into this process."""

import weakref
from collections.abc import Callable

import numpy as np
import ray
from numpy.typing import NDArray

from raykv.arena.arena import Arena
from raykv.arena.gpu_arena import GpuArena
from raykv.client.stores.store_client import Locations, StoreClient
from raykv.cluster import named_actors
from raykv.protocol.transfers import StoreDescription

DESCRIBE_DEADLINE_S = 60.0  # a store that has just started waits for the directory


class LocalStore(StoreClient):
    """The store of this process's node. While it is down its memory still serves; only other nodes' blocks are missed.

    name: what the directory calls the memory. index: what locations call it.
    arena: the memory, mapped.
    """

    def __init__(self, pool: str, node_id: str, gpu: str | None, on_failure: Callable[[], None]) -> None:
        """gpu: UUID of the GPU whose memory is meant, where that has a tier; None: the node's memory.

        on_failure: see StoreClient.
        Raises ValueError where the node has no store, RayError where it does not answer, and ArenaMismatch where this
        process sees other shared memory than the store.
        """
        super().__init__(named_actors.find(named_actors.node_store_name(pool, node_id)), on_failure)
        described = StoreDescription(*ray.get(self.store.describe_arena.remote(gpu), timeout=DESCRIBE_DEADLINE_S))
        self.name = described.name
        self.index = described.node
        if gpu and described.handle:
            self.arena: Arena = GpuArena.map(described.path, described.nonce, gpu, described.handle)
        else:
            self.arena = Arena.attach(described.path, described.nonce)
        weakref.finalize(self, self.arena.close).atexit = False

    def has(self, nodes: NDArray[np.uint32], epoch: int) -> bool:
        """Whether what a directory of this epoch gave is in this memory: else the store has another one by now.

        nodes: of LOCATIONs. A store raises the epoch of its memory before that directory places anything there.
        """
        return bool((nodes == self.index).all()) and epoch <= self.arena.epoch

    def wrong(self, locations: Locations, keys: NDArray[np.uint8]) -> Locations:
        """Of blocks that could not be read, those to report as corrupt.

        Left out are good blocks whose length differs from what this reader expects: there the reader is wrong.
        """
        return locations[~self.arena.holds_other_length(locations, keys)]
