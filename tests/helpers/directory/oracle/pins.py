"""The oracle's pins: which copies of a key a pin holds, and which keys may have one."""

from helpers.directory.oracle.gpu_demotion import GpuDemotion
from helpers.directory.oracle.slots import HOLDS_MAX, STORED


class Pins(GpuDemotion):
    def pin_keys(self, keys: list[bytes], limit: int | None = None) -> int:
        """limit: bytes of all pins."""
        before = set(self.pins)
        self.hold_pinned(keys)
        beyond, new = set[bytes](), [key for key in dict.fromkeys(keys) if key in self.pins and key not in before]
        for key in reversed(new if limit is not None else ()):
            too_many = self.pinned_bytes(set(self.pins) - beyond) > (limit or 0)
            if too_many and self.pinned_bytes({key}):
                beyond.add(key)
        self.unpin_keys([key for key in new if key in beyond])
        return sum(key in self.pins for key in keys)

    def pinned_bytes(self, keys: set[bytes]) -> int:
        classes = [self.pins[key][0].slab.size_class for key in keys if key in self.pins]
        return sum(size_class.stride for size_class in classes if size_class.counts)

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
