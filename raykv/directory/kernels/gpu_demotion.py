"""Demotion from a GPU to the memory of its node.

A copied block becomes a primary in memory and a replica on the GPU: evicting that replica loses nothing. During the
copy the row in memory is DEMOTING and held, so that nobody evicts or reads it.
"""

import numpy as np

from raykv.directory.kernels.columns import DEMOTING, DROPPED, INT, MASK, READY, REPLICA, ROWS, TENANTS, C
from raykv.directory.kernels.demotion import start_demotion
from raykv.directory.kernels.eviction import evict, near_victim, oldest
from raykv.directory.kernels.leases import has_primary
from raykv.directory.kernels.lists import finish, link_old, list_of, suspend, unhold, unlist_in_role
from raykv.directory.kernels.quotas import is_full, tenant_of
from raykv.directory.kernels.slots import room, take
from raykv.directory.kernels.table import delete, first_of
from raykv.system.jit import kernel


@kernel(C, INT, INT, INT, ROWS, ROWS)
def demote_gpu(c, size_class, host_class, want, source, target):
    """Demote a GPU's oldest primaries that nobody holds, `want` at most.

    Each block takes a slot of the node's memory (`host_class`): a slot that costs nothing, else the slot of the oldest
    block there that may go for the block's tenant. Returns how many were demoted.
    source[i], out: the row on the GPU; it is not held, as the copier checks its generation.
    target[i], out: the DEMOTING row in memory.
    """
    n, row = 0, oldest(c, size_class)
    while row >= 0 and n < want:
        younger = np.int64(c.rows[row].prev)
        if c.rows[row].holds == 0 and not _being_demoted(c, row):
            target_row = _take_in_memory(c, host_class, tenant_of(c, row))
            if target_row >= 0:
                start_demotion(c, row, target_row, 1, source, target, n)
                c.rows[target_row].uses = c.rows[row].uses
                n += 1
            elif c.state[TENANTS] == 1:  # younger blocks would find no slot either
                break
        row = younger
    return n


@kernel
def _take_in_memory(c, host_class, tenant):
    """Take a row of the node's memory for a tenant, or -1."""
    if room(c, host_class) > 0 and not is_full(c, tenant, c.size_classes[host_class].charge):
        return take(c, host_class)
    row = near_victim(c, host_class, tenant)
    return evict(c, row) if row >= 0 else row


@kernel
def _being_demoted(c, row):
    """Whether a row's key is being copied to memory, maybe from another GPU."""
    other = first_of(c, row)
    while other >= 0:
        if c.rows[other].state == DEMOTING and c.rows[other].holds > 0:
            return True
        other = np.int64(c.rows[other].same)
    return False


@kernel(C, ROWS, MASK)
def gpu_demoted(c, rows, stored):
    """If a DEMOTING row was stored, make it the primary. Its copies on GPUs become replicas that are evicted first.

    A row that was not stored is quarantined, since somebody may still write there. Returns how many rows were stored.
    """
    count = 0
    for i in range(len(rows)):
        row = np.int64(rows[i])
        if row < 0:
            continue
        if c.rows[row].state == DROPPED:
            suspend(c, row)
        elif not stored[i]:
            delete(c, row)
            suspend(c, row)
        else:
            finish(c, row, REPLICA if has_primary(c, row) else READY)
            unhold(c, row)
            count += 1
    for i in range(len(rows)):  # youngest first, so that the oldest is the first victim
        row = np.int64(rows[len(rows) - 1 - i])
        if row >= 0 and c.rows[row].state == READY:
            _make_replicas(c, row)
    return count


@kernel
def _make_replicas(c, row):
    """A key has a new primary: make its other primaries replicas, as the oldest of their size class."""
    other = first_of(c, row)
    while other >= 0:
        if other != row and c.rows[other].state == READY:
            unlist_in_role(c, other, REPLICA)
            if c.rows[other].holds == 0:
                link_old(c, list_of(c, other, REPLICA), other)
        other = np.int64(c.rows[other].same)
