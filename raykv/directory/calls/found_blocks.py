"""The blocks that a node store found in its arena, as arrays. Locations are checked, as any process may change them."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from raykv.directory.state.arrays import KeyArray, key_array
from raykv.protocol.location import GENERATIONS, LOCATION, Locations
from raykv.protocol.stores import Inventory

BLOCKS_MAX = 1 << 40  # upper bound for the number of blocks of a node


class FoundBlocks(NamedTuple):
    """An Inventory as arrays. The first four arrays have equal lengths. left: see Inventory."""

    locations: Locations
    keys: KeyArray
    positions: NDArray[np.uint32]
    stamps: NDArray[np.uint32]
    writing: Locations
    left: int

    @classmethod
    def of(cls, found: Inventory) -> Self:
        """Convert an Inventory. ValueError for unequal lengths, or if `left` is not a possible number of blocks."""
        locations, keys = np.frombuffer(found.locations, LOCATION), key_array(found.keys)
        positions, stamps = np.frombuffer(found.positions, np.uint32), np.frombuffer(found.stamps, np.uint32)
        if not len(locations) == len(keys) == len(positions) == len(stamps):
            lengths = f"{len(locations)} locations, {len(keys)} keys, {len(positions)} positions, {len(stamps)} stamps"
            raise ValueError(f"an inventory of {lengths}: give one of each")
        if not 0 <= found.left < BLOCKS_MAX:
            raise ValueError(f"an inventory of which {found.left} blocks are to follow")
        return cls(locations, keys, positions, stamps, np.frombuffer(found.writing, LOCATION), found.left)

    def in_arena(self, node: int, slabs: int) -> "FoundBlocks":
        """Return only the blocks whose location is possible in the arena of a node with `slabs` slabs."""
        there, writing = _in_arena(self.locations, node, slabs), _in_arena(self.writing, node, slabs)
        return FoundBlocks(
            self.locations[there],
            self.keys[there],
            self.positions[there],
            self.stamps[there],
            self.writing[writing],
            self.left,
        )


def _in_arena(locations: Locations, node: int, slabs: int) -> NDArray[np.bool_]:
    there = (locations["node"] == node) & (locations["slab"] < slabs)
    slab_gens, gens = locations["slab_gen"], locations["gen"]
    sound: NDArray[np.bool_] = there & (slab_gens > 0) & (slab_gens < GENERATIONS) & (gens < GENERATIONS)
    return sound
