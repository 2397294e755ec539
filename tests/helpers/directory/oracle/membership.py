"""The oracle's members: clients with their leases and reservations, node stores with their slabs."""

import struct
from collections import Counter

from helpers.directory.oracle.pins import Pins
from helpers.directory.oracle.slots import PRESENT, STORED, Client, Lease, Node, SizeClass, Tier, pack, split, unpack
from raykv.directory.state import holds
from raykv.protocol.clients import Call, Counted
from raykv.protocol.stores import ArenaDescription, Heartbeat, Inventory, Joined, SoleCopies, SweepResult

SOLE_COPIES_PER_CALL = 6  # of each block size


class Membership(Pins):
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
        if call.pulled:  # otherwise windows are restored below, after holds have ended
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

    def end(self, client: Client, hold: int) -> None:
        if hold in client.holds:
            self.release(client.holds.pop(hold))

    def release(self, *holds: Lease) -> None:
        """End leases. Leases that were asked for together end block by block, the last block of all first."""
        for group in dict.fromkeys(hold.group for hold in holds):
            together = [hold for hold in holds if hold.group == group]
            for i in reversed(range(max(len(hold.source) for hold in together))):
                for hold in reversed(together):
                    if i < len(hold.source):
                        self.end_read(hold.source[i])
                        self.end_hold(hold.staged[i])

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
        for client in self.clients.values():
            self.end_unused(client, now)
        self.second = int(now)
        self.intents.expire(now)
        if not self.marks or now - self.marks[-1][0] >= self.late / 12:
            self.marks.append((now, self.clock))
        while self.marks[0][0] <= now - self.late:
            self.end_late(self.marks.pop(0)[1])

    def end_unused(self, client: Client, now: float) -> None:
        """End leases that were not used for a long time. Their staging slots may still be written: quarantine these."""
        for i, hold in list(client.holds.items()):
            if now - hold.used > holds.UNUSED_S and not hold.writes:
                for item in hold.staged:
                    self.abandon(item)
                self.release(client.holds.pop(i))

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
                    row.last = now_tick - len(known) + i + 1  # so the blocks of all nodes mix by age
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
        """For each size with more slots than its window, evict as many blocks as the window lacks slots."""
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
        """The node of that name with its GPUs, or the GPU of that name."""
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

    def stay(self, name: str, now: float) -> None:
        self.check(now)
        self.leaving.discard(name)
        for node in self.of_host(name):
            if node.leaving:
                node.leaving = False
                self.set_state(node, node.state)

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
        """Whether a key has a copy on a node that stays, or in the shared tier while all nodes reach that."""
        copies = self.table[key]
        in_tier = (
            shared and not shared.down and any(r.state == "external" and self.tier_at(r) is shared for r in copies)
        )
        return bool(in_tier) or any(row.state in PRESENT and row.slab.size_class.stays for row in copies)

    def promote_replicas(self, node: Node) -> None:
        """For each primary on a node, promote a replica on another node that stays, if there is one."""
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
