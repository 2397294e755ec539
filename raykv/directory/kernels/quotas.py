"""The memory of tenants: the bytes that each tenant pays for, and which blocks may be evicted for another tenant.

A tenant is a number below `TENANTS`. Tenant 0 stands for everybody without a quota. All rows of a key have one tenant,
usually the tenant that stored or matched the key last. Only primaries in the memory of nodes count, ready or being
written. `eviction` asks this module before it evicts a block, `placement` before it grants a slot, and `demotion`
before it takes a slot. `lists.assign` moves a key from one tenant to another.
"""

import numpy as np

from raykv.directory.kernels.columns import TENANTS
from raykv.system.jit import kernel

ANYBODY, OWN, OTHERS, FAIR = range(4)  # whose blocks may be evicted: see `may_go`


@kernel
def tenant_of(c, row):
    """Return the tenant that pays for a row's key."""
    return np.int64(c.tenants[row]) if c.state[TENANTS] > 1 else np.int64(0)


@kernel
def is_full(c, tenant, size):
    """Whether a tenant would be above its maximum with `size` bytes more."""
    return size > 0 and c.quotas[tenant].used + size > c.quotas[tenant].maximum


@kernel
def whose(c, tenant, size):
    """Return whose blocks may be evicted for a tenant's new block. size: bytes of this block; 0 if no quota counts it.

    ANYBODY: no quota counts the new block. OWN: the tenant would be above its maximum. OTHERS: the tenant would be
    within its minimum, and must be able to grow even if its own blocks are the oldest. FAIR: the tenant would be
    between minimum and maximum.
    """
    if size == 0:
        return ANYBODY
    if is_full(c, tenant, size):
        return OWN
    return OTHERS if c.quotas[tenant].used + size <= c.quotas[tenant].minimum else FAIR


@kernel
def may_go(c, owner, tenant, who, size):
    """Whether a block of `owner` with `size` bytes may be evicted for a block of `tenant` (-1: for no tenant).

    OWN: only the tenant's own blocks may be evicted. OTHERS: only blocks of other tenants may be evicted, if these
    tenants keep their minimum without the block. FAIR: blocks of both kinds may be evicted.
    """
    if who == ANYBODY:
        return True
    if owner == tenant:
        return who != OTHERS
    return who != OWN and c.quotas[owner].used - size >= c.quotas[owner].minimum
