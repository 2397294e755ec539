"""The oracle's pins: which copies of a key a pin holds, and which pins are given up for a writer."""

from collections import Counter

from helpers.directory.oracle.gpu_demotion import GpuDemotion
from helpers.directory.oracle.slots import HOLDS_MAX, STORED, SizeClass


class Pins(GpuDemotion):
    def pin_keys(
        self, keys: list[bytes], end: float | None = None, priority: int | None = None, limit: int | None = None
    ) -> int:
        """Pin keys until `end`; None: for good. priority: None: never give them up. limit: bytes of all such pins."""
        before, lasting = set(self.pins), {key for key in self.pins if self.pin_ranks.get(key) is None}
        self.hold_pinned(keys)
        beyond, new = set[bytes](), [key for key in dict.fromkeys(keys) if key in self.pins and key not in lasting]
        for key in reversed(new if limit is not None else ()):
            too_many = self.pinned_bytes(lasting | (set(new) - beyond)) > (limit or 0)
            if too_many and self.pinned_bytes({key}):
                beyond.add(key)
        self.unpin_keys([key for key in beyond if key not in before])
        keys = [key for key in keys if key not in beyond]
        for key in keys:
            if key in self.pins:
                self.pin_ends[key] = end
        for key in dict.fromkeys(keys):
            if key in self.pins:
                self.pin_count += 1
                self.pin_ranks[key] = None if priority is None else (priority, self.pin_count)
        return sum(key in self.pins for key in keys)

    def pinned_bytes(self, keys: set[bytes]) -> int:
        classes = [self.pins[key][0].slab.size_class for key in keys if key in self.pins]
        return sum(size_class.stride for size_class in classes if size_class.counts)

    def give_up_pins(self, size_class: SizeClass, tenant: str, count: int) -> bool:
        """Unpin blocks that a refused writer may then evict: lowest priority first, then oldest pin."""
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
        """Pin a copy of each key: the copy in a tier, else the primary."""
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

    def repair_pins(self) -> None:
        """Move pins of dropped copies to other copies of their keys, if there are any."""
        stale = [k for k, (row, gen) in self.pins.items() if row.gen != gen or row.state in ("dropped", "replica")]
        self.renew_pins(stale)

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
