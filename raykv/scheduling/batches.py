"""Puts the prompts of a batch in order, and divides them among engines, so that each shared prefix is computed once."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLOCKS_MAX = 1 << 24  # maximum compared keys; in larger batches, only the first keys of each prompt are compared
SLACK = 0.1  # how far an engine's load may be off, as a share of the load, to keep a prefix on one engine

Prompts = Sequence[NDArray[np.uint8]]  # a prompt is (n, k): keys of its n full blocks. A key also covers earlier blocks


def order(prompts: Prompts) -> list[int]:
    """Order prompts depth first in the tree of shared prefixes, so that prompts that share most blocks are neighbours.

    Returns indices of prompts. The subtree that shares most blocks comes first. Equal prompts keep their order. If the
    cache has room for the longest prompt, each shared block is computed once. Takes O(prompts) memory, and a copy of at
    most 16 million keys. In larger batches, only the first blocks of each prompt are compared.
    """
    found = _by_keys(prompts)
    shared = _shared_with_before(prompts, found)
    saved = np.concatenate([[0], np.cumsum(shared)])  # number of shared blocks up to each place
    ranked, todo = [], [(0, len(found))]
    while todo:
        begin, end = todo.pop()
        if end - begin < 2:
            ranked += found[begin:end]
            continue
        inside = shared[begin + 1 : end]
        cuts = [begin, *(begin + 1 + np.flatnonzero(inside == inside.min())).tolist(), end]
        subtrees = list(itertools.pairwise(cuts))
        subtrees.sort(key=lambda subtree: saved[subtree[0] + 1] - saved[subtree[1]])
        todo += reversed(subtrees)
    return ranked


def split(prompts: Prompts, engines: int) -> list[list[int]]:
    """Divide prompts among engines. Returns the indices of each engine's prompts, in the order to run them.

    The prompts are in `order`. The order is cut where neighbours share least, near the places that give all engines
    equally many blocks to compute. Raises ValueError if `engines` is below 1.
    """
    if engines < 1:
        raise ValueError(f"engines={engines}: a batch needs one at least")
    ranked = order(prompts)
    shared = _shared_with_before(prompts, ranked)
    blocks = np.array([1 + len(prompts[i]) for i in ranked], np.int64)  # 1 for the last tokens, which fill no block
    done = np.concatenate([[0], np.cumsum(blocks - shared)])
    cuts = [0, *(_cut(done, shared, done[-1] * engine / engines, engines) for engine in range(1, engines)), len(ranked)]
    return [ranked[begin:end] for begin, end in itertools.pairwise(cuts)]


def _shared_with_before(prompts: Prompts, indices: Sequence[int]) -> NDArray[np.int64]:
    """Return the number of leading blocks that each prompt shares with its predecessor: (len(indices),) int64."""
    pairs = itertools.pairwise(indices)
    return np.array([0, *(_shared(prompts[one], prompts[other]) for one, other in pairs)][: len(indices)], np.int64)


def _by_keys(prompts: Prompts) -> list[int]:
    depth = _depth([len(keys) for keys in prompts])
    names = [keys[:depth].tobytes() for keys in prompts]
    return sorted(range(len(prompts)), key=names.__getitem__)


def _depth(lengths: list[int]) -> int:
    """Return how many blocks of each prompt to compare, so that all prompts together have at most BLOCKS_MAX."""
    depth = max(lengths, default=0)
    while depth and sum(min(length, depth) for length in lengths) > BLOCKS_MAX:
        depth //= 2
    return depth


def _shared(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> int:
    """Return the number of leading keys that are equal.

    A key also identifies all earlier blocks, so a binary search finds the first difference.
    """
    begin, end = 0, min(len(one), len(other))
    while begin < end:
        middle = (begin + end) // 2
        if np.array_equal(one[middle], other[middle]):
            begin = middle + 1
        else:
            end = middle
    return begin


def _cut(done: NDArray[np.int64], shared: NDArray[np.int64], wanted: float, engines: int) -> int:
    """Return the index of the prompt that begins the next engine's part.

    Considers the prompts that have about `wanted` blocks before them, within SLACK. Returns the prompt that shares the
    fewest blocks with its predecessor. If there is no such prompt, returns the place nearest to `wanted`.

    done: (n + 1,), done[i] is the number of blocks to compute for the first i prompts. shared: (n,), shared[i] is the
    number of blocks that prompt i shares with its predecessor.
    """
    slack = SLACK * done[-1] / engines
    begin, end = np.searchsorted(done, [wanted - slack, wanted + slack]).tolist()
    nearest = int(np.abs(done - wanted).argmin())
    if begin >= min(end, len(shared)):
        return nearest
    return int(begin + shared[begin:end].argmin())
