"""The whole state of a directory."""

import itertools
import math
from collections import deque

import numpy as np

from raykv.config import CLIENT_TTL_S, MIB
from raykv.directory.kernels import table
from raykv.directory.kernels.columns import CLOCK, EPOCH, FIRST_TICK, NODE_BITS, Columns
from raykv.directory.state.allocator import Allocator, Node
from raykv.directory.state.arrays import RowArray, key_array
from raykv.directory.state.gpu_demotion import GpuDemotion
from raykv.directory.state.hit_curve import HitCurve, Plan
from raykv.directory.state.holds import Clients
from raykv.directory.state.intents import Intents
from raykv.directory.state.pins import Pins
from raykv.directory.state.prefixes import Prefixes
from raykv.directory.state.quotas import Quotas
from raykv.directory.state.size_classes import SizeClasses
from raykv.directory.state.tier_catalog import TierCatalog
from raykv.system.jit import compile_all

COUNTERS = (
    "lookups",
    "hits",
    "remote_hits",
    "external_hits",
    "gpu_hits",
    "stored",
    "refused",
    "corrupt",
    "num_cumulative_preemption",
    "done",
    "kept",
    "promoted",
    "gpu_demoted",
)
LATE_S = 60.0  # seconds after which a user who has not asked for its blocks again counts as late


class State:
    """The slabs, external tiers, leases, pins, quotas and totals of one pool. `Directory` adds the calls."""

    def __init__(
        self,
        epoch: int = 1,
        locality: float = 1.5,
        client_ttl: float = CLIENT_TTL_S,
        share: float = 0.25,
        min_hits: int = 0,
        long_bytes: int = 128 * MIB,
        late: float = LATE_S,
    ) -> None:
        """epoch: a number above the epochs of all earlier directories. locality: another node's oldest block is evicted
        if it was idle `locality` times as long as the oldest block of the writer's node. client_ttl: seconds without a
        call after which a client is gone. share: share of a node's slots that demotion keeps free or clean. min_hits:
        number of matches after which a block is copied to the external tier. long_bytes: minimum bytes of a lease whose
        readers form a chain. late: seconds after which a user who has not asked for its blocks again counts as late.
        """
        compile_all("raykv.directory")  # so that no caller waits for a compiler
        self.locality, self.long_bytes, self.late = float(locality), long_bytes, late
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.evicted_before = 0  # number of evictions by earlier directories
        self.floor = 0  # all blocks up to this generation were cleared
        self.waited_at = -math.inf  # when a reader in a chain last waited for a copy: seconds of the caller's clock
        self.size_classes = SizeClasses(epoch)
        self.allocator = Allocator(self.size_classes)
        self.tier_catalog = TierCatalog(self.size_classes, share, min_hits)
        self.gpu_demotion = GpuDemotion(self.size_classes, self.allocator)
        self.nodes = self.allocator.nodes
        self.clients = Clients(self.size_classes, client_ttl)
        self.pins = Pins(self.size_classes)
        self.quotas = Quotas(self.size_classes)
        self.intents = Intents()
        self.prefixes = Prefixes()
        self.hit_curve, self.plan = HitCurve(), Plan()
        self.leaving: set[str] = set()  # names of nodes that are about to leave, even if they have not joined
        self.stamped: set[bytes] = set()  # nonces of arenas that carry this epoch
        self.next_check = 0.0
        # (seconds of the callers' clock, tick at that time). Users who began to wait before the first tick are late
        self.marks = deque([(-math.inf, FIRST_TICK)])
        self._indices = itertools.count()

    @property
    def c(self) -> Columns:
        """The columns. Do not store this object: it is replaced when the columns grow."""
        return self.size_classes.c

    @property
    def epoch(self) -> int:
        return int(self.size_classes.c.state[EPOCH])

    @property
    def tick(self) -> int:
        """The present tick. Blocks age by this clock, which advances with each use of a block."""
        return int(self.c.state[CLOCK])

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return self.size_classes.nbytes

    def long_blocks(self, block_bytes: int) -> int:
        """Return the minimum number of blocks of a long lease. Its readers form a chain: see kernels/chains.py."""
        return max(1, -(-self.long_bytes // block_bytes))

    def find(self, keys: bytes) -> RowArray:
        """Return the first row of each key, or -1."""
        names = key_array(keys)
        firsts = np.empty(len(names), np.int64)
        table.find(self.c, names, firsts)
        return firsts

    def resize(self) -> None:
        """Adapt to a change of the nodes, or of the memory of a node."""
        capacity = self.allocator.capacity()
        self.quotas.resize(capacity)
        self.hit_curve.resize(capacity)

    def next_plan(self) -> Plan:
        """Return the next plan for the memory. With a `locality` of 1, the pool always evicts like one LRU."""
        return self.hit_curve.plan(self.plan) if self.locality > 1 else Plan()

    def of_host(self, name: str) -> list[Node]:
        """Return the memory of a node and of its GPUs, or of one GPU."""
        return [node for node in self.nodes.values() if name in (node.name, node.host)]

    def new_index(self, tier: bool) -> int:
        """Return a new index for a node or tier (see `is_tier`). Earlier directories did not use this index either."""
        return self.epoch % (1 << 31 - NODE_BITS) << NODE_BITS | next(self._indices) * 2 + tier

    def invalidate(self) -> None:
        """Remove the rows of closed slabs from all leases, reservations, demotions and pins."""
        self.clients.invalidate()
        self.gpu_demotion.invalidate()
        self.pins.repair()
