"""Where a reader can go on: the last token at which every part has the blocks that the reader needs."""

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Runs(NamedTuple):
    """A part of which the reader needs only the last `window` blocks. The next `ahead` blocks must be ready too.

    tokens: of a block. ready: (n,) int64; entry i counts the ready blocks without a gap up to block i, at most
    `window + ahead`.
    """

    window: int
    ahead: int
    tokens: int
    ready: NDArray[np.int64]


def boundary(prefix: int, step: int, runs: Sequence[Runs]) -> int:
    """The last multiple of `step`, at most `prefix`, where every part in `runs` has the blocks of its window.

    Each part also has the blocks ahead of that token.
    step: tokens; a multiple of each part's block. Returns 0 where there is no such token.
    """
    if not runs or step > prefix:
        return prefix - prefix % step
    ends = np.arange(step, prefix + 1, step)
    for part in runs:
        ends = ends[ends <= (len(part.ready) - part.ahead) * part.tokens]
        blocks = ends // part.tokens
        ends = ends[part.ready[blocks + part.ahead - 1] >= np.minimum(blocks, part.window) + part.ahead]
    return int(ends[-1]) if len(ends) else 0


def step_of(tokens: Sequence[int]) -> int:
    """The number of tokens after which blocks of all parts end together. tokens: of a block of each part."""
    return lcm(*tokens)
