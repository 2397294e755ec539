"""The oracle's slots: the states of a slot, and which slot is taken next."""

import itertools
import math
import struct
from dataclasses import dataclass, field

from helpers.directory.oracle.intents import Intents
from raykv.config import Quota
from raykv.protocol.location import is_tier

PRESENT = ("ready", "replica")
STORED = (*PRESENT, "external")
IN_TABLE = (*STORED, "writing", "staging", "demoting")
COUNTERS = (
    *("lookups", "hits", "remote_hits", "external_hits", "stored", "refused", "corrupt"),
    *("num_cumulative_preemption", "done", "kept"),
    *("gpu_hits", "promoted", "gpu_demoted"),
)
USES_MAX = 255
HOLDS_MAX = 65535
FIRST_TICK = 1 << 52
AGAIN, OVERDUE, FOR_GOOD = 1 << 47, 1 << 49, 1 << 51  # ages that `done` gives blocks: see columns.py
IN_USE, IN_TIME = FIRST_TICK - AGAIN // 2, FIRST_TICK - (AGAIN + OVERDUE) // 2
LOCATION = struct.Struct("<IIIIQQ")


@dataclass(eq=False)
class Row:
    slab: "Slab"
    slot: int
    state: str = "free"
    key: bytes = b""
    gen: int = 0
    last: int = 0
    holds: int = 0
    uses: int = 0  # matches since it was stored
    aged: bool = False  # a hold on it has ended since it was stored or became the primary: `last` is its age
    clean: bool = False  # found or made clean, and not used since
    kept_until: int = 0  # second
    passed: bool = False  # evictions pass over it
    given_up: bool = False  # no reader waits until it is pulled
    tenant: str = ""  # the tenant with a quota that is charged for the key; "" if none is

    @property
    def needed(self) -> bool:
        """Whether the block may be asked for again: not done with for good."""
        return self.last > FIRST_TICK - (OVERDUE + FOR_GOOD) // 2

    @property
    def fleeting(self) -> bool:
        """Whether the block's node is a GPU or is about to leave: the block must get a copy elsewhere."""
        size_class = self.slab.size_class
        return size_class.leaving or (size_class.on_gpu and size_class.offered)


@dataclass(eq=False)
class SizeClass:
    """The slots of one size on one node."""

    node: int
    stride: int
    window: int
    offered: bool  # to readers
    leaving: bool = False  # offered, but the node is about to leave: nothing new is stored there
    on_gpu: bool = False  # only the GPU's own clients store there
    rows: list[Row] = field(default_factory=list)
    free: list[Row] = field(default_factory=list)  # the last is taken first

    def of(self, state: str) -> list[Row]:
        return [row for row in self.rows if row.state == state]

    @property
    def stays(self) -> bool:
        """Whether all clients may store blocks there that are to last."""
        return self.offered and not self.leaving and not self.on_gpu

    @property
    def counts(self) -> bool:
        return not self.on_gpu and not is_tier(self.node)

    def line(self) -> list[Row]:
        """Primaries by age, of each tenant from its next victim on. The tenant's older primaries are held."""
        lines = [self.line_of(tenant) for tenant in {row.tenant if self.counts else "" for row in self.rows}]
        return sorted((row for line in lines for row in line), key=lambda row: row.last)

    def line_of(self, tenant: str) -> list[Row]:
        """A tenant's primaries by age, from its next victim on. The older primaries are held."""
        theirs = self.of_tenant(tenant)
        return theirs[next((i for i, row in enumerate(theirs) if not row.holds), len(theirs)) :]

    def of_tenant(self, tenant: str) -> list[Row]:
        """A tenant's primaries by age; all primaries where tenants are not charged."""
        theirs = [row for row in self.of("ready") if row.aged and not (self.counts and row.tenant != tenant)]
        return sorted(theirs, key=lambda row: row.last)

    def part_with_held(self, tenant: str) -> None:
        """Take held primaries that are older than a tenant's next victim out of the line until their hold ends."""
        for row in itertools.takewhile(lambda row: row.holds, self.of_tenant(tenant)):
            row.aged = False


@dataclass(eq=False)
class Slab:
    node: int
    number: int
    size_class: SizeClass
    gen: int
    rows: list[Row] = field(default_factory=list)


@dataclass(eq=False)
class Lease:
    """A lease or reservation. source, staged: for each key (row, its generation at that time), or None."""

    seq: int
    writes: bool
    node: int
    size_class: SizeClass | None
    keys: list[bytes]
    source: list[tuple[Row, int] | None]
    staged: list[tuple[Row, int] | None]
    unstaged: set[int]  # numbers of keys on other nodes that have no staging slot yet
    group: int  # the first of the leases that were asked for together
    used: float  # time of the last question by this lease
    held_up: float | None = None  # since when others hold all slots that this lease could stage into
    waits: float | None = None  # since when it waits for a copy that another reader pulls
    waits_gen: int = 0  # the last generation that was given before


@dataclass(eq=False)
class Client:
    last_seen: float
    holds: dict[int, Lease] = field(default_factory=dict)
    swapped: dict[bytes, None] = field(default_factory=dict)


@dataclass(eq=False)
class Node:
    name: str
    index: int
    nonce: bytes
    slab_bytes: int
    window_bytes: int
    last_heartbeat: float
    limit: int
    state: str = "joining"
    leaving: bool = False
    offered: int = 0
    spare: list[int] = field(default_factory=list)
    size_classes: dict[int, SizeClass] = field(default_factory=dict)
    slabs: dict[int, Slab] = field(default_factory=dict)
    checked: dict[SizeClass, int] = field(default_factory=dict)

    @property
    def host(self) -> str:
        """Name of the node, or of the node whose GPU this is."""
        return self.name.split("/")[0]

    @property
    def on_gpu(self) -> bool:
        return "/" in self.name


@dataclass(eq=False)
class Tier:
    """An external tier. owner: name of the node that the tier belongs to; None: all nodes share it."""

    index: int
    capacity: int
    slab_bytes: int
    owner: str | None
    spare: list[int]
    size_classes: dict[int, SizeClass] = field(default_factory=dict)
    slabs: dict[int, Slab] = field(default_factory=dict)
    to_delete: dict[bytes, None] = field(default_factory=dict)  # keys to delete in the tier, in order
    unreached: set[str] = field(default_factory=set)  # nodes that can't reach the tier
    suspect: bool = False
    demoting: dict[str, list[tuple[Row, int]]] = field(default_factory=dict)  # the last answer to each node
    lister: str | None = None
    listed: bool = False
    cleared: bool = False
    # By node: (number of the last answer, keys that it says to delete)
    deleting: dict[str, tuple[int, list[bytes]]] = field(default_factory=dict)
    answers: int = 0
    content: bytes = b""
    demoted: int = 0

    @property
    def down(self) -> bool:
        return bool(self.unreached) or self.suspect

    def rows(self) -> list[Row]:
        return [row for slab in self.slabs.values() for row in slab.rows]


def split(keys: bytes) -> list[bytes]:
    return [keys[i : i + 16] for i in range(0, len(keys), 16)]


def unpack(locations: bytes) -> list[tuple[int, ...]]:
    return list(LOCATION.iter_unpack(locations))


def pack(held: list[tuple[Row, int] | None], block_bytes: int) -> bytes:
    """LOCATIONs of rows. None becomes zeros."""
    out = b""
    for item in held:
        if item:
            slab = item[0].slab
            out += LOCATION.pack(slab.node, slab.number, item[0].slot, block_bytes, slab.gen, item[0].gen)
        else:
            out += bytes(LOCATION.size)
    return out


class Slots:
    """All that the oracle knows of a pool, and the rules of its slots. Each class below this one adds rules."""

    def __init__(
        self,
        epoch: int = 1,
        locality: float = 1.5,
        client_ttl: float = 10.0,
        share: float = 0.25,
        min_hits: int = 0,
        long_bytes: int = 128 << 20,
        late: float = 60.0,
    ) -> None:
        """long_bytes: readers of leases with so many bytes form chains."""
        self.epoch, self.counter, self.clock, self.floor = epoch, 0, FIRST_TICK, 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.table: dict[bytes, list[Row]] = {}  # the copies of each key, in the order in which they came
        self.evicted: dict[SizeClass, int] = {}
        self.marks: list[tuple[float, int]] = []  # (time, the clock then)
        self.late, self.late_before = late, FIRST_TICK
        self.tiered = False  # whether there was an external tier
        self.nodes: dict[str, Node] = {}
        self.tiers: dict[str, Tier] = {}  # by owner; the tier of "" is shared by all nodes
        self.by_index: dict[int, Node | Tier] = {}
        self.sizes: dict[int, list[SizeClass]] = {}  # by stride, the size classes of nodes, not of tiers
        self.joins, self.stamped, self.leaving = 0, set[bytes](), set[str]()
        self.locality, self.plan = locality, (0.0, False)
        self.copies: dict[int, float] = {}  # by node index, the share of the node's slots that is for copies
        self.lacking: dict[SizeClass, int] = {}
        self.share, self.min_hits = share, min_hits
        self.under_way: dict[str, list[tuple[Row, int]]] = {}  # by GPU, the target rows of its last answer
        self.quotas: dict[str, Quota] = {}
        self.evicted_of = {"": 0}
        self.clients: dict[int, Client] = {}
        self.client_ttl, self.next_check, self.intents = client_ttl, 0.0, Intents()
        self.long_bytes, self.waited_at = long_bytes, -math.inf  # waited_at: when a reader last waited for a copy
        self.pins: dict[bytes, tuple[Row, int]] = {}
        self.second = 0
        self.passes: dict[tuple[SizeClass, str], int] = {}

    # ------------------------------------------------------------------ one row

    def use(self, row: Row) -> None:
        self.clock += 1
        row.last = self.clock
        row.aged, row.clean, row.passed = True, False, False

    def keep(self, keys: list[bytes], tenant: str, until: int) -> int:
        """Touch a tenant's own keys, and keep their copies in memory until a second. Returns how many keys."""
        count = 0
        for key in reversed(keys):
            copies = [row for row in self.table.get(key, []) if row.state in STORED and row.tenant == tenant]
            count += bool(copies)
            for row in copies:
                row.kept_until = until if row.slab.size_class.counts else 0
                if not row.holds:
                    self.use(row)
        return count

    def instead_of(self, row: Row) -> Row:
        """The block to evict in the place of the oldest block of a line, which may be kept."""
        if row.kept_until <= self.second:
            return row
        line = row.slab.size_class.line_of(row.tenant)
        passed = sum(each.passed for each in line)
        if not passed:
            self.passes[row.slab.size_class, row.tenant] = 0
        while 2 * passed <= len(line) and passed < len(line):
            other = line[passed]
            if not other.holds and other.kept_until <= self.second:
                return row if row.clean and not other.clean else other
            other.passed = True
            passed += 1
        return row

    def passed_over(self, size_class: SizeClass, tenant: str, last: int) -> None:
        """Make the passed blocks of a line younger, after every eighth of them that was passed over."""
        passed = [row for row in size_class.line_of(tenant) if row.passed]
        self.passes[size_class, tenant] += 1
        if 8 * self.passes[size_class, tenant] <= len(passed):
            return
        n = min(self.passes[size_class, tenant], len(passed), last - passed[-1].last)
        self.passes[size_class, tenant] = 0
        ages = [row.last for row in passed]
        ages = [*ages[n:], *range(ages[-1] + 1, ages[-1] + n), last]
        for row, age in zip(passed, ages, strict=True):
            row.last = age
        for row in itertools.dropwhile(lambda row: row.holds or row.kept_until > self.second, passed):
            row.passed = False

    def done_with(self, keys: list[bytes], tenant: str, again: bool) -> int:
        """Have unheld copies of a tenant's own keys evicted before blocks in use. Returns how many copies."""
        count = 0
        for key in reversed(keys) if again and self.tiered else keys:
            copies = self.table.get(key, [])
            for row in copies if copies and copies[0].tenant == tenant else ():
                row.kept_until = 0
                size_class = row.slab.size_class
                there = is_tier(row.slab.node) or (size_class.offered and not size_class.on_gpu)
                if row.state in STORED and not row.holds and there:
                    if row.state == "ready":
                        row.slab.size_class.part_with_held(row.tenant)
                    count += self.done_for_now(row) if again else self.done_for_good(row)
        return count

    def done_for_now(self, row: Row) -> bool:
        """Make a block older than all blocks in use. False for an unclean block that would follow clean ones."""
        size_class = row.slab.size_class
        line = size_class.line_of(row.tenant) if row.state == "ready" else []
        before = max((other.last for other in line if other.last < IN_USE), default=0)
        copies = [other for other in self.table[row.key] if is_tier(other.slab.node)]
        in_tier = any(other.state in ("external", "demoting") for other in copies)
        if not row.clean and not in_tier and any(other.clean and other.last > before for other in line):
            return False
        self.clock += 1
        row.last = FIRST_TICK - AGAIN + (self.clock - FIRST_TICK) * (1 if self.tiered else -1)
        row.clean = any(other.clean and other.last > row.last for other in line if other is not row)
        return True

    def end_late(self, before: int) -> None:
        """Have blocks go before others that wait, if their users began to wait before a tick."""
        waiting = [row for copies in self.table.values() for row in copies if IN_TIME < row.last < IN_USE]
        for row in waiting if not self.tiered else ():
            since = 2 * FIRST_TICK - AGAIN - row.last
            if since <= before and (row.aged or row.state == "replica"):
                row.last = self.late_before + before - since - OVERDUE
        self.late_before = before

    def done_for_good(self, row: Row) -> bool:
        """Make a block the next to be evicted, and have no tier take it."""
        self.clock += 1
        size_class = row.slab.size_class
        listed = size_class.of_tenant(row.tenant) if row.state == "ready" else self.unheld(size_class, row.state)
        oldest = min((other.last for other in listed if other is not row), default=self.clock)
        row.last = min(FIRST_TICK - FOR_GOOD - (self.clock - FIRST_TICK), oldest - 1)
        row.clean = row.state == "ready" and row.slab.size_class.counts
        return True

    def enter(self, row: Row, key: bytes, gen: int) -> None:
        """Enter a block that was found in a slot. The first copy of a key is the primary."""
        row.state = "replica" if self.taken(key) else "ready"
        row.key, row.gen, row.holds, row.uses, row.kept_until = key, gen, 0, 0, 0
        self.insert(row)
        self.use(row)

    def insert(self, row: Row) -> None:
        """Put a row into the table. It is charged to the tenant of the key's other copies."""
        copies = self.table.setdefault(row.key, [])
        row.tenant = copies[0].tenant if copies else ""
        copies.append(row)

    def grant(self, row: Row, key: bytes, state: str) -> tuple[Row, int]:
        row.key, row.gen, row.state, row.holds = key, self.next_gen(), state, 1
        row.uses, row.aged, row.clean, row.given_up, row.kept_until = 0, False, False, False, 0
        self.insert(row)
        return row, row.gen

    def next_gen(self) -> int:
        self.counter += 1
        return self.last_gen()

    def last_gen(self) -> int:
        return self.epoch << 40 | self.counter

    def take_out(self, row: Row) -> None:
        """Take a row out of the table. If it was the primary, or was to be, the first replica becomes the primary."""
        copies = self.table[row.key]
        replicas = [other for other in copies if other.state == "replica"]
        if row.state in ("ready", "writing") and replicas:
            self.set_role(replicas[0], "ready")
        copies.remove(row)
        if not copies:
            del self.table[row.key]

    def set_role(self, row: Row, state: str) -> None:
        """Make a replica the primary, or a primary a replica. Its age counts from the end of the last hold."""
        row.state, row.aged, row.clean = state, False, False
        if not row.holds:
            self.use(row)

    def has_primary(self, row: Row) -> bool:
        """Whether the key is being written, or has a primary that lasts as long as this copy."""
        primaries = [r for r in self.table[row.key] if r.state == "ready" and (row.fleeting or not r.fleeting)]
        return bool(primaries) or any(r.state == "writing" for r in self.table[row.key])

    def succeed(self, row: Row) -> None:
        """Make a row the primary, and the primary that was there a replica."""
        row.state = "ready"
        for other in self.table[row.key]:
            if other.state == "ready" and other is not row:
                row.uses = max(row.uses, other.uses)
                self.set_role(other, "replica")

    def free(self, row: Row) -> None:
        row.state, row.holds = "free", 0
        row.slab.size_class.free.append(row)

    def quarantined(self, row: Row) -> None:
        if row.state in IN_TABLE:
            self.take_out(row)
        row.state, row.holds = "quarantined", 0

    def drop(self, row: Row) -> None:
        """Forget a block. Its slot is free once nobody holds the block."""
        self.take_out(row)
        if row.holds:
            row.state = "dropped"
        else:
            self.free(row)

    def hold(self, row: Row) -> tuple[Row, int]:
        row.holds += 1
        if row.state == "replica":
            row.aged = False  # if it becomes the primary, its age counts from the end of this hold
        return row, row.gen

    def end_hold(self, item: tuple[Row, int] | None) -> None:
        if item is None or item[0].gen != item[1] or item[0].state == "quarantined":
            return
        row = item[0]
        row.holds -= 1
        if row.holds == 0 and row.state in STORED:
            self.use(row)
        elif row.holds == 0:
            if row.state in IN_TABLE:
                self.take_out(row)
            self.free(row)

    def end_read(self, item: tuple[Row, int] | None) -> None:
        """End a read. After a read of a replica touch the key's primary too, if it is not held."""
        self.end_hold(item)
        if item and item[0].gen == item[1] and item[0].state == "replica":
            for row in self.table[item[0].key]:
                if row.state == "ready" and not row.holds:
                    self.use(row)

    def abandon(self, item: tuple[Row, int] | None) -> None:
        """Quarantine a row whose only holder vanished and may still write. Clients never write in a tier."""
        if item is None or item[0].gen != item[1] or item[0].holds != 1 or is_tier(item[0].slab.node):
            return
        if item[0].state in ("writing", "staging", "dropped"):
            self.quarantined(item[0])

    def taken(self, key: bytes) -> bool:
        return any(row.state in ("writing", *PRESENT) for row in self.table.get(key, ()))

    # ------------------------------------------------------------------ one size class

    def replicas(self, size_class: SizeClass) -> list[Row]:
        return self.unheld(size_class, "replica")

    def unheld(self, size_class: SizeClass, state: str) -> list[Row]:
        return [row for row in size_class.of(state) if row.holds == 0]

    def takeable(self, size_class: SizeClass) -> int:
        return len(size_class.free) + len(self.replicas(size_class))

    def room(self, size_class: SizeClass) -> int:
        return self.takeable(size_class) - max(0, size_class.window - len(size_class.of("staging")))

    def can_stage(self, size_class: SizeClass) -> bool:
        return len(size_class.of("staging")) < size_class.window and self.takeable(size_class) > 0

    def take(self, size_class: SizeClass) -> Row:
        """Take a free slot, else the oldest replica's slot."""
        if size_class.free:
            return size_class.free.pop()
        row = min(self.replicas(size_class), key=lambda r: r.last)
        self.take_out(row)
        return row

    def stage(self, size_class: SizeClass | None, key: bytes) -> tuple[Row, int] | None:
        if size_class is None or not self.can_stage(size_class):
            return None
        return self.grant(self.take(size_class), key, "staging")

    def oldest(self, size_class: SizeClass, state: str = "ready") -> Row | None:
        return min((r for r in size_class.of(state) if r.holds == 0), key=lambda r: r.last, default=None)
