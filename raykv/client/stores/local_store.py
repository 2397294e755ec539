"""The store of a client's own node, and the store's memory, which this process maps."""

import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from raykv.arena.arena import Arena
from raykv.arena.gpu_arena import GpuArena
from raykv.client.stores.store_client import StoreClient
from raykv.cluster import named_actors, ray_calls
from raykv.protocol.location import Locations
from raykv.protocol.transfers import StoreDescription

DESCRIBE_DEADLINE_S = 60.0  # deadline for a store to describe its arena: a new store waits for the directory


class LocalStore(StoreClient):
    """The store of this process's node.

    While the store is down, its memory stays in use, and other nodes' blocks are misses.
    name: the directory's name for the memory. index: index of the memory in locations. arena: the mapped memory.
    """

    def __init__(self, pool: str, node_id: str, gpu: str | None, on_failure: Callable[[], None]) -> None:
        """gpu: UUID of a GPU, or None. Maps the memory of the GPU's tier if the GPU has one, else the node's memory.

        on_failure: see StoreClient.
        Raises ValueError if the node has no store, RayError if the store does not answer, and ArenaMismatch if this
        process sees other shared memory than the store.
        """
        super().__init__(named_actors.find_store(pool, node_id), on_failure)
        described = StoreDescription(*ray_calls.get(self.store.describe_arena.remote(gpu), timeout=DESCRIBE_DEADLINE_S))
        self.name = described.name
        self.index = described.node
        if gpu and described.handle:
            self.arena: Arena = GpuArena.map(described.path, described.nonce, gpu, described.handle)
        else:
            self.arena = Arena.attach(described.path, described.nonce)
        weakref.finalize(self, self.arena.close).atexit = False

    def has(self, nodes: NDArray[np.uint32], epoch: int) -> bool:
        """Whether all of the given locations are in this memory. If not, the store was replaced.

        nodes: the field `node` of the locations. epoch: epoch of the directory that gave the locations. A store raises
        its memory's epoch before a new directory places blocks there.
        """
        return epoch <= self.arena.epoch and not np.count_nonzero(nodes != self.index)

    def wrong(self, locations: Locations, keys: NDArray[np.uint8]) -> Locations:
        """Return the corrupt locations. locations: where a reader could not read the blocks of `keys`.

        A block is not corrupt if only its length differs from the reader's block size: then the reader is wrong.
        """
        return locations[~self.arena.holds_other_length(locations, keys)]
