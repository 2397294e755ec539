"""Where a reader can go on: the last token at which every part has the blocks that the reader needs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Runs(NamedTuple):
    """The ready blocks of a part with a window. A reader needs the last `window` blocks, and the next `ahead` blocks.

    tokens: of a block. ready: (n,) int64; entry i counts the ready blocks without a gap up to block i, at most
    `window + ahead`.
    """

    window: int
    ahead: int
    tokens: int
    ready: NDArray[np.int64]


def boundary(prefix: int, step: int, runs: Sequence[Runs]) -> int:
    """The last multiple of `step`, at most `prefix`, where every part in `runs` has the blocks that its reader needs.

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
