"""The token up to which a reader can go on: every part has the blocks that the reader needs there."""

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Runs(NamedTuple):
    """A part of which the reader needs only the last `window` blocks.

    tokens: of a block. ready: (n,) int64; entry i counts the ready blocks without a gap up to block i, at most
    `window`.
    """

    window: int
    tokens: int
    ready: NDArray[np.int64]


def boundary(prefix: int, step: int, runs: Sequence[Runs]) -> int:
    """The last multiple of `step`, at most `prefix`, before which every part in `runs` has the blocks of its window.

    step: tokens; a multiple of each part's block. Returns 0 where there is no such token.
    """
    if not runs or step > prefix:
        return prefix - prefix % step
    ends = np.arange(step, prefix + 1, step)
    for part in runs:
        ends = ends[ends <= len(part.ready) * part.tokens]
        blocks = ends // part.tokens
        ends = ends[part.ready[blocks - 1] >= np.minimum(blocks, part.window)]
    return int(ends[-1]) if len(ends) else 0


def step_of(tokens: Sequence[int]) -> int:
    """The number of tokens after which blocks of all parts end together. tokens: of a block of each part."""
    return lcm(*tokens)
