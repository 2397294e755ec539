"""Why a match ended at a block, for whoever follows requests."""

from raykv.directory.kernels import columns
from raykv.directory.kernels.columns import Columns
from raykv.directory.state.state import State

ABSENT = "not in the pool"
WRITTEN = "still being written"
AWAY = "its node does not answer"
TIER_AWAY = "in an external tier that is down"
NO_MEMORY = "on another node, and the reader's has no memory to take it"


def why_missing(state: State, key: bytes) -> str:
    """Why a match ended at this key, in words."""
    return _of_copies(state.c, int(state.find(key)[1][0]))


def _of_copies(c: Columns, first: int) -> str:
    """Of a key's copies, what kept a reader from the best of them. first: the first row of the key; -1: none."""
    found, row = ABSENT, first
    while row >= 0:
        state = int(c.rows[row]["state"])
        offered = c.size_classes[int(c.slabs[int(c.pages[row >> columns.PAGE_BITS])]["size_class"])]["offered"]
        if state in (columns.READY, columns.REPLICA, columns.EXTERNAL):
            if offered:
                return NO_MEMORY
            if found != AWAY:
                found = TIER_AWAY if state == columns.EXTERNAL else AWAY
        elif state in (columns.WRITING, columns.STAGING, columns.DEMOTING) and found == ABSENT:
            found = WRITTEN
        row = int(c.rows[row]["same"])
    return found
