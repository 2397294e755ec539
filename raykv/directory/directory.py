"""The directory knows where every block of a pool is, and decides which blocks stay. It uses no Ray, clock or I/O.

It answers the calls of `raykv.protocol.calls`. kernels/placement.py chooses slots for new blocks, kernels/eviction.py
chooses blocks to evict, and kernels/quotas.py decides which tenants may lose blocks. state/holds.py ends leases.
`raykv.actors.directory.server` serves a Directory.
"""

from raykv.directory.calls import clients, figures, nodes, readers, tiers, whole_pool, why_missing, writers
from raykv.directory.state.state import State


class Directory(State):
    """All blocks, leases, reservations and nodes of one pool: a State, and the functions that answer calls.

    This state machine has no locks, so callers must not call it from two threads at a time. `now` is the time in
    seconds of any monotonic clock. Calls that change blocks or nodes first do the work that is due at this time.
    Late or repeated calls raise no error. A call raises ValueError or TypeError if its arguments are not a valid
    message, for example because of an incomplete key or an impossible count. Such a call neither holds nor drops a
    block. Keys are passed as one bytes object with 16 bytes for each key. `name` is the name of a node or of one of
    its GPUs: see `protocol.location.host_of`.
    """

    join = nodes.join
    adopt = nodes.adopt
    heartbeat = nodes.heartbeat
    sweep_result = nodes.sweep_result
    set_slab_target = nodes.set_slab_target
    follow = nodes.follow
    leave = nodes.leave
    stay = nodes.stay
    sole_copies = nodes.sole_copies
    remove_node = nodes.remove_node

    match = readers.match
    match_parts = readers.match_parts
    next_window = readers.next_window
    locate_prefix = readers.locate_prefix
    stored = readers.stored

    why_missing = why_missing.why_missing

    reserve = writers.reserve
    commit = writers.commit

    pin = clients.pin
    unpin = clients.unpin
    touch = clients.touch
    done = clients.done
    forget = clients.forget
    preempted = clients.preempted
    client_heartbeat = clients.client_heartbeat
    disconnect = clients.disconnect

    tier_heartbeat = tiers.tier_heartbeat
    report_existing = tiers.report_existing
    demote = tiers.demote
    demote_gpu = tiers.demote_gpu

    indices = whole_pool.indices
    clear = whole_pool.clear
    set_quota = whole_pool.set_quota
    remove_quota = whole_pool.remove_quota

    totals = figures.totals
    resume = figures.resume
    gauges = figures.gauges
    oldest_lease = figures.oldest_lease
    coldest = figures.coldest
    largest_prefixes = figures.largest_prefixes
    stats = figures.stats
