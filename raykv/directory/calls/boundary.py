"""Up to which token a reader can continue: the longest prefix of which every part has the blocks that it needs."""

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Runs(NamedTuple):
    """A part of which only the last `window` blocks are needed.

    tokens: of a block. ready: (n,) int64, how many blocks up to each are ready, without a gap, as far as they matter.
    """

    window: int
    tokens: int
    ready: NDArray[np.int64]


def boundary(prefix: int, step: int, runs: Sequence[Runs]) -> int:
    """The last token, a multiple of `step`, at most `prefix`, before which every part with a window has its blocks.

    step: tokens; a multiple of each part's block. 0 where there is none.
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
    """Tokens after which blocks of all parts end together. tokens: of a block of each part."""
    return lcm(*tokens)
