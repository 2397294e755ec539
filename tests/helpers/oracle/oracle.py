"""The directory's rules once more, as plain Python objects: slow, short, and judged by reading alone.

One object a slot, dicts of lists, full scans. `Oracle` has the public methods of
`raykv.directory.directory.Directory` and gives the same answers byte for byte. Where two other nodes' oldest blocks are
of one age (only `adopt` makes such), the directory may evict either: `reserve` is told which by `choices`.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from helpers.oracle.readers import Readers
from helpers.oracle.slots import (
    HOLDS_MAX,
    IN_TABLE,
    PRESENT,
    STORED,
    Client,
    Lease,
    Node,
    Row,
    SizeClass,
    Slab,
    Tier,
    pack,
    split,
    unpack,
)
from helpers.oracle.tenants import Whose
from raykv.protocol import (
    ArenaDescription,
    Call,
    CommitRequest,
    Counted,
    Heartbeat,
    Inventory,
    Joined,
    Reserved,
    ReserveRequest,
    SoleCopies,
    SweepResult,
)

COUNTERS = (
    *("lookups", "hits", "remote_hits", "external_hits", "stored", "refused", "corrupt"),
    "num_cumulative_preemption",
    *("gpu_hits", "promoted", "gpu_demoted"),
)
SOLE_COPIES_PER_CALL = 6  # of each size
STATES = ("free", "writing", "ready", "replica", "staging", "quarantined", "dropped", "demoting", "external")


class Oracle(Readers):
    def __init__(
        self,
        epoch: int = 1,
        locality: float = 1.5,
        client_ttl: float = 10.0,
        share: float = 0.25,
        min_hits: int = 0,
    ) -> None:
        super().__init__(epoch, share, min_hits)
        self.locality, self.client_ttl = locality, client_ttl
        self.floor = 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.stamped: set[bytes] = set()
        self.leaving: set[str] = set()
        self.lacking: dict[SizeClass, int] = {}
        self.next_check = 0.0
        self.pin_ends: dict[bytes, float | None] = {}
        self.pin_ranks: dict[bytes, tuple[int, int] | None] = {}
        self.pin_count = 0

    # ------------------------------------------------------------------ writers

    def reserve(
        self, call: Call, request: ReserveRequest, now: float, choices: dict[int, int] | None = None
    ) -> Reserved:
        """choices: the node's index that the directory chose for each granted key."""
        reservation, node, keys, start, block_bytes, name = request
        client = self.on_call(call, now)
        self.end(client, reservation)
        tenant = self.name_of(name)
        wanted, stride = split(keys), -(-block_bytes // 4096) * 4096
        writer = self.nodes.get(node)
        size_class = self.size_class(writer, stride) if writer and self.answers(writer) else None
        if writer is None or size_class is None or not 0 <= start <= len(wanted):
            return Reserved(self.epoch, start, b"", b"", b"")
        self.provision(writer, size_class, sum(not self.taken(key) for key in wanted[start:]), tenant)
        hold = Lease(call.seq, True, writer.index, size_class, wanted, [], [None] * len(wanted), set(), reservation)
        for key in wanted:
            copies = [r for r in self.table.get(key, ()) if r.state in PRESENT and r.holds < HOLDS_MAX]
            hold.source.append(self.hold(copies[0]) if copies else None)
            if copies:
                self.claim(key, tenant)
        covered, granted, away = len(wanted), [], False
        for i in range(start, len(wanted)):
            if hold.source[i] or self.taken(wanted[i]):
                continue
            target, gone = self.target(size_class, tenant, away, (choices or {}).get(i, -1))
            if gone and target is not size_class and self.room(size_class) > 0:  # its tenant has its maximum
                self.free(self.evict(gone))
                target, gone = size_class, None
            if target is None or (target is not size_class and not self.can_stage(size_class)):
                covered = i  # no room, or this call used up its window
                break
            if target is not size_class:
                away = True
                hold.staged[i] = self.stage(size_class, wanted[i])
            hold.source[i] = self.grant(self.evict(gone) if gone else self.take(target), wanted[i], "writing")
            self.assign(wanted[i], tenant)
            self.keep_maximum(target, tenant)
            granted.append(i)
            if gone and self.room(target) < 0 and (gone := self.surplus(target)):
                self.free(self.evict(gone))  # others had used up its staging window
        client.holds[reservation] = hold
        if not granted and covered < len(wanted):
            if self.give_up_pins(size_class, tenant, len(wanted) - covered):
                return self.reserve(call, request, now, choices)
            self.counters["refused"] += len(wanted) - covered
        return Reserved(
            self.epoch,
            covered,
            struct.pack(f"<{len(granted)}i", *granted),
            pack([hold.source[i] for i in granted], block_bytes),
            pack([hold.staged[i] for i in granted], block_bytes),
        )

    def target(
        self, size_class: SizeClass, tenant: str, away: bool, choice: int
    ) -> tuple[SizeClass | None, Row | None]:
        """(size class that the next block is stored in or None, the row that is evicted for it unless it has room)."""
        has_room, can_leave = self.room(size_class) > 0, self.can_stage(size_class)
        if has_room and not self.is_full(tenant, size_class):
            return size_class, None
        others = [s for s in self.sizes[size_class.stride] if s.stays]
        there = {node.index: node for node in self.nodes.values()}
        host = there[size_class.node].host  # a GPU's writer goes to its own node's memory next
        others.sort(key=lambda s: there[s.node].name != host)
        for other in others if can_leave or away else []:
            if self.room(other) > 0 and not self.is_full(tenant, other):
                return other, None
        # with exact LRU the client asks again for another node's victim
        far = others if can_leave or has_room or (away and self.locality == 1) else []
        near_choices = self.choices_for(tenant, size_class)
        far_choices = self.choices_for(tenant, far[0]) if far else near_choices
        own = max(len(near_choices), len(far_choices)) - 1
        gone = self.victim(size_class, far, near_choices[0], far_choices[0], choice)
        if gone is None and own:
            gone = self.victim(size_class, far, near_choices[-1], far_choices[-1], choice)
        return (gone.slab.size_class if gone else None), gone

    def victim(
        self, size_class: SizeClass, others: list[SizeClass], near: Whose, far: Whose, choice: int
    ) -> Row | None:
        """The writer's own oldest, or the oldest of all if that was idle much longer."""
        tail = self.oldest_of(size_class, near)
        tails = [row for s in others if (row := self.oldest_of(s, far))]
        if not tails:
            return tail
        age = self.clock - min(row.last for row in tails)
        if tail and age <= self.locality * (self.clock - tail.last):
            return tail
        coldest = [row for row in tails if self.clock - row.last == age]
        return next((row for row in coldest if row.slab.node == choice), coldest[0])

    def evict(self, row: Row) -> Row:
        """Drop a key by its primary, except copies that somebody holds."""
        for other in [r for r in self.table[row.key] if r.state == "replica" and r.holds == 0]:
            self.drop(other)
        self.take_out(row)
        self.evicted[row.slab.size_class] += 1
        self.evicted_of[row.tenant] += 1
        return row

    def commit(self, call: Call, request: CommitRequest, now: float) -> Counted:
        reservation, locations, keys, written = request
        client = self.on_call(call, now)
        hold = client.holds.get(reservation)
        accepted = 0
        for location, key, done in zip(unpack(locations), split(keys), written, strict=True):
            row = self.row_of(location)
            if row is None or row.gen != location[5] or row.key != key:
                continue
            if done and row.state in ("writing", *PRESENT):
                row.state = "ready" if row.state == "writing" else row.state
                accepted += 1
            elif not done and row.state == "writing" and hold and (row, row.gen) in hold.source:
                self.quarantined(row)
        if hold:
            self.end(client, reservation)
            self.counters["stored"] += accepted
        return Counted(self.epoch, accepted)

    # ------------------------------------------------------------------ blocks by name

    def pin(
        self, call: Call, keys: bytes, now: float, ttl: float | None = None, priority: int | None = None
    ) -> Counted:
        self.on_call(call, now)
        return Counted(self.epoch, self.pin_keys(split(keys), None if ttl is None else now + ttl, priority))

    def pin_keys(self, keys: list[bytes], end: float | None = None, priority: int | None = None) -> int:
        """Pin keys until then, or for good. priority: None: they are not given up."""
        self.hold_pinned(keys)
        for key in keys:
            if key in self.pins:
                self.pin_ends[key] = end
        for key in dict.fromkeys(keys):
            if key in self.pins:
                self.pin_count += 1
                self.pin_ranks[key] = None if priority is None else (priority, self.pin_count)
        return sum(key in self.pins for key in keys)

    def give_up_pins(self, size_class: SizeClass, tenant: str, count: int) -> bool:
        """Unpin what then goes for a writer who is refused: the lowest priority first, then the oldest pin."""
        ranked = sorted((rank, key) for key in self.pins if (rank := self.pin_ranks.get(key)) is not None)
        given_up, size, of_tenant = list[bytes](), size_class.stride, Counter[str]()
        for _, key in ranked:
            row, gen = self.pins[key]
            there = row.gen == gen and row.state == "ready" and row.holds == 1 and row.slab.size_class is size_class
            own = row.tenant == tenant or not size_class.counts
            taken = not self.is_full(tenant, size_class) and self.spared((1 + of_tenant[row.tenant]) * size)(row.tenant)
            if there and (own or taken) and len(given_up) < count:
                given_up.append(key)
                of_tenant[row.tenant] += 1
        self.unpin_keys(given_up)
        return bool(given_up)

    def hold_pinned(self, keys: list[bytes]) -> None:
        """Hold the copies that are to stay: the one in a tier, else the primary."""
        for key in keys:
            copies = [row for row in self.table.get(key, ()) if row.holds < HOLDS_MAX]
            lasting = [row for row in copies if row.state == "ready"][:1]
            lasting += [row for row in copies if row.state == "external"]
            if key not in self.pins and lasting:
                self.pins[key] = self.hold(lasting[-1])

    def unpin_keys(self, keys: list[bytes]) -> int:
        held = [self.pins.pop(key) for key in keys if key in self.pins]
        for item in reversed(held):
            self.end_read(item)
        return len(held)

    def renew_pins(self, keys: list[bytes]) -> None:
        before = {key: self.pins.pop(key) for key in keys if key in self.pins}
        self.hold_pinned(list(before))
        for item in reversed(before.values()):
            self.end_read(item)

    def unpin(self, call: Call, keys: bytes, now: float) -> Counted:
        self.on_call(call, now)
        return Counted(self.epoch, self.unpin_keys(split(keys)))

    def repair_pins(self) -> None:
        """Move pins of dropped copies to another copy, if there is one."""
        stale = [k for k, (row, gen) in self.pins.items() if row.gen != gen or row.state in ("dropped", "replica")]
        self.renew_pins(stale)

    def forget(self, call: Call, keys: bytes, now: float) -> Counted:
        client = self.on_call(call, now)
        for key in split(keys):
            client.swapped.pop(key, None)
        return Counted(self.epoch, self.forget_keys(split(keys)))

    def forget_keys(self, keys: list[bytes]) -> int:
        self.unpin_keys(keys)
        count = 0
        for key in keys:
            for row in list(self.table.get(key, ())):
                if row.state == "external":
                    self.tier_at(row).to_delete.setdefault(key)
                if row.state in STORED or row.state == "demoting":
                    self.drop(row)
                    count += 1
        return count

    def preempted(self, call: Call, keys: bytes, now: float) -> Counted:
        client = self.on_call(call, now)
        self.counters["num_cumulative_preemption"] += 1
        if self.pin_keys(split(keys)) < len(split(keys)):
            self.forget_keys(split(keys))
            return Counted(self.epoch)
        for key in split(keys):
            client.swapped.setdefault(key)
        return Counted(self.epoch, len(split(keys)))

    # ------------------------------------------------------------------ clients

    def client_heartbeat(self, call: Call, now: float) -> Counted:
        self.on_call(call, now)
        return Counted(self.epoch)

    def disconnect(self, client: int, now: float) -> None:
        self.check(now)
        self.intents.end_all(client)
        if client in self.clients:
            gone = self.clients.pop(client)
            self.release(*gone.holds.values())
            if gone.swapped:
                self.forget_keys(list(gone.swapped))

    def on_call(self, call: Call, now: float) -> Client:
        self.check(now)
        client = self.clients.setdefault(call.client, Client(now))
        client.last_seen = now
        promoted: Counter[SizeClass] = Counter()
        for location in unpack(call.pulled):
            row = self.row_of(location)
            if row and row.gen == location[5] and row.state == "staging":
                row.state = "replica"
                if not self.has_primary(row):
                    self.succeed(row)
                    promoted[row.slab.size_class] += 1
                    self.keep_maximum(row.slab.size_class, row.tenant)
        if call.pulled:  # else ended holds come first
            self.restore_windows(promoted)
        if promoted:
            self.repair_pins()
        held = struct.unpack(f"<{len(call.held) // 8}Q", call.held)
        over = [i for i, hold in client.holds.items() if i not in held and hold.seq < call.seq]
        self.release(*map(client.holds.pop, over))
        self.intents.end_unlisted(call)
        self.restore_lacking()
        altered = [(location[5], self.row_of(location)) for location in unpack(call.corrupt)]
        for gen, row in altered:
            if row and row.gen == gen and row.state == "external":
                self.tier_at(row).to_delete.setdefault(row.key)
        for gen, row in altered:
            if row and row.gen == gen and row.state in STORED:
                self.drop(row)
                self.counters["corrupt"] += 1
        if altered:
            self.repair_pins()
        return client

    def keep_maximum(self, size_class: SizeClass, tenant: str) -> None:
        """Above it, one of the tenant's own blocks there goes."""
        gone = self.oldest_of(size_class, lambda owner: owner == tenant)
        if size_class.counts and self.used(tenant) > self.maximum(tenant) and gone:
            self.free(self.evict(gone))

    def restore_windows(self, promoted: Counter[SizeClass]) -> None:
        """Primaries took so many staging slots: spare slabs make up for them, else as many evictions."""
        for size_class in [size_class for size_class in self.evicted if promoted[size_class]]:
            self.lacking[size_class] = self.lacking.get(size_class, 0) + promoted[size_class]
        self.restore_lacking()

    def restore_lacking(self) -> None:
        """Restore windows as far as blocks are not held; the rest waits."""
        for size_class, slots in list(self.lacking.items()):
            node = self.by_index[size_class.node]
            assert isinstance(node, Node)
            while node.spare and self.room(size_class) < 0:
                self.open(node, node.spare[-1], size_class, self.next_gen())
            self.lacking[size_class] = slots = self.restore_window(size_class, slots)
            if not slots or self.room(size_class) >= 0 or len(size_class.rows) <= size_class.window:
                del self.lacking[size_class]

    def restore_window(self, size_class: SizeClass, slots: int) -> int:
        """Evict until the window lacks no slot, at most `slots` times. Returns how many times less it was."""
        while slots and self.room(size_class) < 0 and (gone := self.surplus(size_class)):
            self.free(self.evict(gone))
            slots -= 1
        return slots

    def check(self, now: float) -> None:
        if now < self.next_check:
            return
        self.next_check = now + 0.5
        for node in self.nodes.values():
            if node.state == "alive" and now - node.last_heartbeat > 3.0:
                self.set_state(node, "suspect")
        for i in [i for i, client in self.clients.items() if now - client.last_seen > self.client_ttl]:
            gone = self.clients.pop(i)
            for hold in gone.holds.values():
                for item in hold.source + hold.staged:
                    self.abandon(item)
                self.release(hold)
            if gone.swapped:
                self.forget_keys(list(gone.swapped))
            self.intents.end_all(i)
        self.unpin_keys([key for key in self.pins if (end := self.pin_ends.get(key)) is not None and end <= now])
        self.intents.expire(now)

    # ------------------------------------------------------------------ nodes

    def join(self, name: str, arena: ArenaDescription, now: float, window: int | None = None) -> Joined:
        self.check(now)
        nonce, slab_bytes, slab_count, epoch = arena
        if epoch > self.epoch or (epoch == self.epoch and nonce not in self.stamped):
            self.epoch = epoch + 1
        self.stamped.add(nonce)
        known = self.nodes.get(name)
        if known and known.nonce == nonce:
            known.last_heartbeat = now
            return Joined(known.index, self.epoch)
        self.remove(name)
        capacity = slab_bytes * slab_count
        if window is None:
            window = min(max(capacity // 50, 256 << 20), capacity // 8)
        node = Node(name, self.new_index(tier=False), nonce, slab_bytes, window, now, slab_count)
        node.leaving = node.host in self.leaving
        self.nodes[name] = self.by_index[node.index] = node
        return Joined(node.index, self.epoch)

    def adopt(self, name: str, inventory: Inventory, now: float, offered: int = 0) -> None:
        self.check(now)
        locations, keys, positions, stamps, writing, *_ = inventory
        node = self.nodes.get(name)
        if node is None:
            return
        node.last_heartbeat = now
        found = list(zip(unpack(locations), split(keys), strict=True))
        if node.state == "joining":
            depths = struct.unpack(f"<{len(positions) // 4}I", positions)
            ages = struct.unpack(f"<{len(stamps) // 4}I", stamps)
            self.open_slabs_of(node, unpack(locations) + unpack(writing))
            for location in unpack(writing):
                row = self.row_of(location)
                if row and row.state == "free":
                    row.slab.size_class.free.remove(row)
                    row.state, row.gen = "quarantined", location[5]
            order = sorted(range(len(found)), key=lambda i: (ages[i], -depths[i]))
            known = [
                (row, *found[i]) for i in order if found[i][0][5] > self.floor and (row := self.row_of(found[i][0]))
            ]
            now_tick = self.clock = max(self.clock, len(known))
            for i, (row, location, key) in enumerate(known):
                if row.state == "free":
                    row.slab.size_class.free.remove(row)
                    self.enter(row, key, location[5])
                    row.last = now_tick - len(known) + i + 1  # ages of all nodes interleave
            self.clock = now_tick
        else:
            for location, key in found:
                row = self.row_of(location)
                if row and row.state in PRESENT and (location[5], key) != (row.gen, row.key) and location[5] >= row.gen:
                    self.drop(row)
            self.repair_pins()
        joined = node.state == "joining"
        self.offer(node, offered)
        self.set_state(node, "alive")
        for other in self.nodes.values():
            if other.leaving or (other.on_gpu and other.host == name):
                self.promote_replicas(other)
        if joined and not node.leaving:
            self.empty_windows(node)

    def empty_windows(self, node: Node) -> None:
        """Evict as many blocks as the windows lack slots, where a size has more slots than its window."""
        slots = Counter(slab.size_class for slab in node.slabs.values() for _ in slab.rows)
        promoted = Counter(
            {
                size_class: min(size_class.window, n - size_class.window)
                for size_class, n in slots.items()
                if n > size_class.window
            }
        )
        self.restore_windows(promoted)

    def offer(self, node: Node, offered: int) -> None:
        node.spare = [n for n in reversed(range(node.offered, offered)) if n not in node.slabs] + node.spare
        node.offered = max(node.offered, offered)

    def open_slabs_of(self, node: Node, locations: list[tuple[int, ...]]) -> None:
        for number in sorted({location[1] for location in locations}):
            first = next(location for location in locations if location[1] == number)
            size_class = self.size_class(node, -(-first[3] // 4096) * 4096)
            if size_class:
                self.open(node, number, size_class, first[4])

    def heartbeat(self, name: str, offered: int, now: float) -> Heartbeat | None:
        self.check(now)
        node = self.nodes.get(name)
        if node is None or node.state == "joining":
            return None
        node.last_heartbeat = now
        self.offer(node, offered)
        if node.state == "suspect":
            self.set_state(node, "alive")
        sweep = b""
        for size_class in node.size_classes.values():
            rows = [row for slab in node.slabs.values() if slab.size_class is size_class for row in slab.rows]
            sweep += pack([(row, row.gen) for row in rows if row.state == "quarantined"], size_class.stride)
        return Heartbeat(self.epoch, self.floor, sweep)

    def sweep_result(self, result: SweepResult, now: float) -> None:
        self.check(now)
        locations, verdicts, keys, gens = result
        found = struct.unpack(f"<{len(gens) // 8}Q", gens)
        for location, verdict, key, gen in zip(unpack(locations), verdicts, split(keys), found, strict=True):
            row = self.row_of(location)
            if row is None or row.state != "quarantined" or row.gen != location[5] or verdict == 0:
                continue
            if verdict == 2 and gen > self.floor and not self.taken(key):
                self.enter(row, key, gen)
            else:
                self.free(row)

    def remove_node(self, name: str, now: float) -> int:
        self.check(now)
        self.leaving.discard(name)
        return sum([self.remove(node.name) for node in self.of_host(name)])

    def of_host(self, name: str) -> list[Node]:
        """A node and its GPUs, or one GPU."""
        return [node for node in self.nodes.values() if name in (node.name, node.host)]

    def remove(self, name: str) -> int:
        node = self.nodes.pop(name, None)
        if node is None:
            return 0
        self.set_state(node, "dead")
        slots = sum(len(slab.rows) for slab in node.slabs.values())
        for slab in node.slabs.values():
            self.close(slab)
        for stride, size_class in node.size_classes.items():
            self.sizes[stride].remove(size_class)
            self.lacking.pop(size_class, None)
        del self.by_index[node.index]
        self.leave_tiers(name)
        self.gpu_demoted(name, [])
        self.repair_pins()
        return slots

    def leave(self, name: str, now: float) -> None:
        self.check(now)
        self.leaving.add(name)
        for node in self.of_host(name):
            if not node.leaving:
                node.leaving = True
                self.set_state(node, node.state)
                self.promote_replicas(node)

    def sole_copies(self, name: str, now: float) -> SoleCopies | None:
        self.check(now)
        nodes, shared = self.of_host(name), self.tiers.get("")
        if name not in self.nodes or any(node.state == "joining" for node in nodes):
            return None
        for node in nodes:
            if node.leaving:
                self.promote_replicas(node)
        locations, keys, lost = b"", b"", set()
        for there, size_class in [(node, size_class) for node in nodes for size_class in node.size_classes.values()]:
            line = size_class.line()
            slabs = [slab for slab in there.slabs.values() if slab.size_class is size_class]
            held = [row for slab in slabs for row in slab.rows if row.state == "ready" and row not in line]
            alone = [row for row in line[::-1] + held if not self.outlives(row.key, shared)][:SOLE_COPIES_PER_CALL]
            locations += pack([(row, row.gen) for row in alone], size_class.stride)
            keys += b"".join(row.key for row in alone)
            kept = {row.key for slab in slabs for row in slab.rows if row.state in ("ready", "writing")}
            lost |= {key for key in kept if not self.outlives(key, shared)}
        return SoleCopies(locations, keys, len(lost))

    def outlives(self, key: bytes, shared: Tier | None) -> bool:
        """Whether a key is on a node that stays, or in the shared tier while all nodes reach it."""
        copies = self.table[key]
        in_tier = (
            shared and not shared.down and any(r.state == "external" and self.tier_at(r) is shared for r in copies)
        )
        return bool(in_tier) or any(row.state in PRESENT and row.slab.size_class.stays for row in copies)

    def promote_replicas(self, node: Node) -> None:
        """Where a key's primary would be lost with its node, make a replica on a node that stays the primary."""
        promoted: Counter[SizeClass] = Counter()
        for row in [row for slab in node.slabs.values() for row in slab.rows]:
            heirs = [r for r in self.table.get(row.key, ()) if r.state == "replica" and r.slab.size_class.stays]
            if row.state == "ready" and heirs:
                self.set_role(heirs[0], "ready")
                self.succeed(heirs[0])
                promoted[heirs[0].slab.size_class] += 1
        self.restore_windows(promoted)
        self.repair_pins()

    def set_state(self, node: Node, state: str) -> None:
        node.state = state
        for size_class in node.size_classes.values():
            size_class.offered, size_class.leaving = state == "alive", state == "alive" and node.leaving
        if node in self.nodes.values():
            self.offer_tiers()

    # ------------------------------------------------------------------ slabs

    def size_class(self, node: Node, stride: int) -> SizeClass | None:
        if not 0 < stride <= node.slab_bytes:
            return None
        if stride not in node.size_classes:
            window = max(1, node.window_bytes // stride)
            alive = node.state == "alive"
            size_class = SizeClass(node.index, stride, window, alive, alive and node.leaving, node.on_gpu)
            node.size_classes[stride] = size_class
            self.sizes.setdefault(stride, []).append(size_class)
            self.evicted[size_class] = 0
        return node.size_classes[stride]

    def open(self, node: Node, number: int, size_class: SizeClass, gen: int) -> None:
        if number in node.spare:
            node.spare.remove(number)
        slab = node.slabs[number] = Slab(node.index, number, size_class, gen)
        slab.rows = [Row(slab, slot) for slot in range(node.slab_bytes // size_class.stride)]
        size_class.rows += slab.rows
        size_class.free += reversed(slab.rows)  # slot 0 is taken first

    def provision(self, writer: Node, size_class: SizeClass, need: int, tenant: str) -> None:
        """Spare slabs until `need` more blocks fit, the writer's own first; then slabs of other sizes."""
        if need == 0 or self.room(size_class) >= need:
            return
        self.provide_slots(writer, size_class, 1, tenant)
        if size_class.counts:
            need = min(need, max(0, self.maximum(tenant) - self.used(tenant)) // size_class.stride)
        others = [n for n in self.nodes.values() if n is not writer and n.spare and self.stores(n)]
        others.sort(key=lambda n: n.name != writer.host)
        for node in [writer, *others]:
            there = self.size_class(node, size_class.stride)
            if there is None:
                continue
            while node.spare and self.room(there) < need:
                self.open(node, node.spare[-1], there, self.next_gen())
            need -= max(0, self.room(there))
            if need <= 0:
                return
        self.reclaim(writer, size_class, self.room, max(0, self.room(size_class)) + need, tenant)

    def provide_slots(self, node: Node, size_class: SizeClass, need: int, tenant: str | None = None) -> None:
        """Give a size slabs until it can stage `need` blocks."""
        while self.takeable(size_class) < need and node.spare:
            self.open(node, node.spare[-1], size_class, self.next_gen())
        self.reclaim(node, size_class, self.takeable, 1, tenant)

    def reclaim(
        self, node: Node, size_class: SizeClass, measure: Callable[[SizeClass], int], need: int, tenant: str | None
    ) -> None:
        """tenant: for which; None: for none."""
        while len(node.size_classes) > 1 and measure(size_class) < need:
            if tenant is None:
                tail = self.oldest(size_class)
            else:
                tail = self.oldest_of(size_class, self.choices_for(tenant, size_class)[0])
            if (
                tail
                and self.evicted[size_class] - node.checked.get(size_class, 0) < node.slab_bytes // size_class.stride
            ):
                return
            node.checked[size_class] = self.evicted[size_class]
            ages = [
                (tenant in self.losing(slab), max((r.last for r in slab.rows if r.state in PRESENT), default=-1), slab)
                for slab in node.slabs.values()
                if slab.size_class is not size_class
                and not any(r.holds or r.state == "quarantined" for r in slab.rows)
                and not self.losing(slab) - {tenant}
            ]
            if not ages:
                return
            _, newest, slab = min(ages, key=lambda age: age[:2])
            if tail and tail.last <= newest:
                return
            self.close(node.slabs.pop(slab.number))
            self.open(node, slab.number, size_class, self.next_gen())

    def losing(self, slab: Slab) -> set[str]:
        """Tenants that would have less than their minimum without a slab."""
        has = Counter(row.tenant for row in slab.rows if row.state == "ready" and slab.size_class.counts)
        sizes = {tenant: count * slab.size_class.stride for tenant, count in has.items()}
        return {tenant for tenant, size in sizes.items() if self.used(tenant) - size < self.minimum(tenant)}

    # ------------------------------------------------------------------ all

    def rows(self) -> Iterator[Row]:
        for node in self.nodes.values():
            for slab in node.slabs.values():
                yield from slab.rows
        for tier in self.tiers.values():
            yield from tier.rows()

    def clear(self, now: float) -> int:
        self.check(now)
        keys = len(self.table)
        self.floor = self.last_gen()
        for node in self.nodes.values():
            for slab in node.slabs.values():
                for row in reversed(slab.rows):
                    if row.state in IN_TABLE:
                        self.drop(row)
        self.clear_tiers()
        self.repair_pins()
        return keys

    def stats(self, now: float) -> dict[str, Any]:
        self.check(now)
        held = [hold.writes for client in self.clients.values() for hold in client.holds.values()]
        return {
            "epoch": self.epoch,
            "keys": len(self.table),
            "leases": held.count(False),
            "reservations": held.count(True),
            "clients": len(self.clients),
            "evicted": sum(self.evicted.values()),
            **self.counters,
            "nodes": {name: self.node_stats(node, now) for name, node in self.nodes.items()},
            "tiers": {name: self.tier_stats(tier) for name, tier in self.tiers.items()},
            "tenants": self.tenants(),
            "external_cache_usage": self.usage(),
            "pinned": len(self.pins),
            "intents": len(self.intents.all),
        }

    def node_stats(self, node: Node, now: float) -> dict[str, Any]:
        states = [row.state for slab in node.slabs.values() for row in slab.rows]
        return {
            "index": node.index,
            "tier": "gpu" if node.on_gpu else "cpu",
            "state": "leaving" if node.leaving and node.state == "alive" else node.state,
            "idle_s": now - node.last_heartbeat,
            "slabs": len(node.slabs),
            "spare_slabs": len(node.spare),
            "limit": node.limit,
            "slab_bytes": node.slab_bytes,
            "bytes_used": sum(
                sum(row.state != "free" for row in slab.rows) * (node.slab_bytes // len(slab.rows))
                for slab in node.slabs.values()
            ),
            "slots": len(states),
            **{s: states.count(s) for s in STATES},
        }
