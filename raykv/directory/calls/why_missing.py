"""Explains why a match ended at a block, for people who follow requests."""

from raykv.directory.kernels import columns
from raykv.directory.state.state import State

ABSENT = "not in the pool"
WRITTEN = "still being written"
AWAY = "its node does not answer"
TIER_AWAY = "in an external tier that is down"
NO_MEMORY = "on another node, and the reader's has no memory to take it"


def why_missing(state: State, key: bytes) -> str:
    """Say why a match ended at a key. If the key has copies, say why the reader could not get the best copy."""
    found, row, c = ABSENT, int(state.find(key)[0]), state.c
    while row >= 0:
        role = int(c.rows[row]["state"])
        offered = c.size_classes[int(c.slabs[int(c.pages[row >> columns.PAGE_BITS])]["size_class"])]["offered"]
        if role in (columns.READY, columns.REPLICA, columns.EXTERNAL):
            if offered:
                return NO_MEMORY
            if found != AWAY:
                found = TIER_AWAY if role == columns.EXTERNAL else AWAY
        elif role in (columns.WRITING, columns.STAGING, columns.DEMOTING) and found == ABSENT:
            found = WRITTEN
        row = int(c.rows[row]["same"])
    return found
