"""Counts and takes the slots of a size class that are available without evicting a primary."""

import numpy as np

from raykv.directory.kernels.columns import FREE_LIST, INT, LISTS_PER_CLASS, REPLICA_LIST, STAGING, C
from raykv.directory.kernels.lists import forget, grant, unlink
from raykv.system.jit import kernel


@kernel
def take(c, size_class):
    """Take a free row, else the row of the oldest replica, without evicting a primary. Returns -1 if there is none."""
    free_list = size_class * LISTS_PER_CLASS + FREE_LIST
    row = np.int64(c.lists[free_list].head)
    if row >= 0:
        unlink(c, free_list, row)
        return row
    row = np.int64(c.lists[size_class * LISTS_PER_CLASS + REPLICA_LIST].tail)
    if row >= 0:
        forget(c, row)
    return row


@kernel(C, INT)
def takeable(c, size_class):
    """Return how many slots `take` can take: free slots, and slots of replicas that nobody holds."""
    first = size_class * LISTS_PER_CLASS
    return c.lists[first + FREE_LIST].count + c.lists[first + REPLICA_LIST].count


@kernel(C, INT)
def room(c, size_class):
    """Return how many slots writers may take without evicting; negative if the staging window lacks slots."""
    return takeable(c, size_class) - max(0, c.size_classes[size_class].window - c.size_classes[size_class].staging)


@kernel
def can_stage(c, size_class):
    """Whether the staging window has a slot left."""
    return c.size_classes[size_class].staging < c.size_classes[size_class].window and takeable(c, size_class) > 0


@kernel
def stage(c, size_class, k0, k1):
    """Grant a key a staging slot, for a reader or for a writer to another node. Returns -1 if no slot is left."""
    if size_class < 0 or not can_stage(c, size_class):
        return np.int64(-1)
    row = take(c, size_class)
    grant(c, row, k0, k1, STAGING, 1)
    return row
