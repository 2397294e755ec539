"""The oracle's slots for new blocks: which block size gets which slab, and which block is evicted."""

from collections import Counter
from collections.abc import Callable

from helpers.directory.oracle.slots import PRESENT, Node, Row, SizeClass, Slab
from helpers.directory.oracle.tenants import Whose
from helpers.directory.oracle.tiers import Tiers
from raykv.config import Quota


class Allocator(Tiers):
    @staticmethod
    def answers(node: Node) -> bool:
        """Whether clients of a node or GPU may store new blocks there."""
        return node.state == "alive" and not node.leaving

    def stores(self, node: Node) -> bool:
        """Whether all clients may store new blocks on a node."""
        return self.answers(node) and not node.on_gpu

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

    def target(
        self, size_class: SizeClass, tenant: str, away: bool, choice: int
    ) -> tuple[SizeClass | None, Row | None]:
        """(size class to store the next block in, row to evict for it). No room at all: None. Free room: no row."""
        has_room, can_leave = self.room(size_class) > 0, self.can_stage(size_class)
        if has_room and not self.is_full(tenant, size_class):
            return size_class, None
        others = [s for s in self.sizes[size_class.stride] if s.stays]
        there = {node.index: node for node in self.nodes.values()}
        host = there[size_class.node].host  # a GPU's writer tries its own node's memory first
        others.sort(key=lambda s: there[s.node].name != host)
        for other in others if can_leave or away else []:
            if self.room(other) > 0 and not self.is_full(tenant, other):
                return other, None
        # With exact LRU the client asks again, with `away`, to evict a block of another node.
        far = others if can_leave or has_room or (away and self.factor == 1) else []
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
        """The oldest block of the writer's node, or another node's oldest if that was idle much longer."""
        tail = self.oldest_of(size_class, near)
        tails = [row for s in others if (row := self.oldest_of(s, far))]
        if not tails:
            return tail
        age = self.clock - min(row.last for row in tails)
        if tail and age <= self.factor * (self.clock - tail.last):
            return tail
        coldest = [row for row in tails if self.clock - row.last == age]
        return next((row for row in coldest if row.slab.node == choice), coldest[0])

    def evict(self, row: Row) -> Row:
        """Evict a key, given the oldest primary of a line. Copies that somebody holds stay."""
        oldest, row = row, self.instead_of(row)
        for other in [r for r in self.table[row.key] if r.state == "replica" and r.holds == 0]:
            self.drop(other)
        self.take_out(row)
        self.evicted[row.slab.size_class] += 1
        self.evicted_of[row.tenant] += 1
        if row is not oldest:
            self.passed_over(row.slab.size_class, row.tenant, row.last)
        return row

    def provision(self, writer: Node, size_class: SizeClass, need: int, tenant: str) -> None:
        """Open spare slabs until `need` more blocks fit, the writer's node first. Then take slabs of other sizes."""
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
        """Give a size class slabs until it can stage `need` blocks."""
        while self.takeable(size_class) < need and node.spare:
            self.open(node, node.spare[-1], size_class, self.next_gen())
        self.reclaim(node, size_class, self.takeable, 1, tenant)

    def reclaim(
        self, node: Node, size_class: SizeClass, measure: Callable[[SizeClass], int], need: int, tenant: str | None
    ) -> None:
        """Take slabs of other sizes. tenant: the tenant that needs room; None: no tenant does."""
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
        """Tenants that would fall below their minimum without a slab."""
        has = Counter(row.tenant for row in slab.rows if row.state == "ready" and slab.size_class.counts)
        sizes = {tenant: count * slab.size_class.stride for tenant, count in has.items()}
        return {tenant for tenant, size in sizes.items() if self.used(tenant) - size < self.minimum(tenant)}

    def keep_maximum(self, size_class: SizeClass, tenant: str) -> None:
        """If a tenant is above its maximum, evict one of its own blocks there."""
        gone = self.oldest_of(size_class, lambda owner: owner == tenant)
        if size_class.counts and self.used(tenant) > self.maximum(tenant) and gone:
            self.free(self.evict(gone))

    @property
    def factor(self) -> float:
        """How many times as long as the writer's own block another node's block must be idle to be evicted instead."""
        copies, exact = self.plan
        return 1.0 if exact else max(self.locality, 2.0) if copies else self.locality

    def follow(self, name: str, plan: tuple[float, bool], now: float) -> None:
        """Follow a plan. With two nodes and no quota, a node's window is the plan's share for copies."""
        self.check(now)
        hosts = [node for node in self.nodes.values() if not node.on_gpu]
        self.plan = (0.0 if self.quotas or len(hosts) < 2 else plan[0], plan[1])
        node = self.nodes.get(name)
        if node and not node.on_gpu:
            self.copies[node.index] = self.plan[0]
            self.resize_windows(node)

    def resize_windows(self, node: Node) -> None:
        copies = self.copies.get(node.index, 0.0) if self.stores(node) else 0.0
        for size_class in node.size_classes.values():
            window = max(1, node.window_bytes // size_class.stride, int(copies * len(size_class.rows)))
            size_class.window = max(window, len(size_class.of("staging")))

    def set_quota(self, tenant: str, quota: Quota, now: float) -> None:
        super().set_quota(tenant, quota, now)
        self.plan = (0.0, self.plan[1])
        for node in self.nodes.values():
            if self.copies.pop(node.index, 0.0):
                self.resize_windows(node)

    def restore_windows(self, promoted: Counter[SizeClass]) -> None:
        """Replace staging slots that became primaries, by spare slabs, else by as many evictions."""
        for size_class in [size_class for size_class in self.evicted if promoted[size_class]]:
            self.lacking[size_class] = self.lacking.get(size_class, 0) + promoted[size_class]
        self.restore_lacking()

    def restore_lacking(self) -> None:
        """Restore windows as far as unheld blocks allow. The rest is restored later."""
        for size_class, slots in list(self.lacking.items()):
            node = self.by_index[size_class.node]
            assert isinstance(node, Node)
            while node.spare and self.room(size_class) < 0:
                self.open(node, node.spare[-1], size_class, self.next_gen())
            self.lacking[size_class] = slots = self.restore_window(size_class, slots)
            if not slots or self.room(size_class) >= 0 or len(size_class.rows) <= size_class.window:
                del self.lacking[size_class]

    def restore_window(self, size_class: SizeClass, slots: int) -> int:
        """Evict until the window lacks no slot, at most `slots` times. Returns how many times are left."""
        while slots and self.room(size_class) < 0 and (gone := self.surplus(size_class)):
            self.free(self.evict(gone))
            slots -= 1
        return slots
