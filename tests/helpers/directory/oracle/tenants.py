"""The oracle's tenants: how much each uses, and whose blocks may be evicted for whom."""

import itertools
from collections.abc import Callable
from typing import Any

from helpers.directory.oracle.slots import Row, SizeClass, Slots
from raykv.config import Quota

Whose = Callable[[str], bool]  # takes the tenant that is charged for a block; says whether the block may be evicted


class Tenants(Slots):
    def check(self, now: float) -> None:
        raise NotImplementedError

    def set_quota(self, tenant: str, quota: Quota, now: float) -> None:
        self.check(now)
        self.quotas[tenant] = quota
        self.evicted_of.setdefault(tenant, 0)

    def remove_quota(self, tenant: str, now: float) -> bool:
        """Its blocks become blocks without a tenant, and none of these is clean. False for a tenant without a quota."""
        self.check(now)
        if self.quotas.pop(tenant, None) is None:
            return False
        for node in self.nodes.values():
            for size_class in node.size_classes.values():
                size_class.part_with_held("")
                size_class.part_with_held(tenant)
        for node in self.nodes.values():
            for size_class in node.size_classes.values() if not node.on_gpu else ():
                rows = [*size_class.of_tenant(""), *size_class.of_tenant(tenant)]
                rows.sort(key=lambda row: (-row.last, row.tenant == tenant))
                for younger, row in itertools.pairwise(rows):
                    row.last = min(row.last, younger.last - 1)
        for copies in self.table.values():
            for row in copies:
                row.passed &= row.tenant not in ("", tenant)
                row.tenant = "" if row.tenant == tenant else row.tenant
        for node in self.nodes.values():
            for size_class in node.size_classes.values():
                for row in size_class.rows:
                    row.clean &= row.tenant != "" and size_class.counts
        self.evicted_of[""] += self.evicted_of.pop(tenant)
        return True

    def name_of(self, tenant: str) -> str:
        """The tenant to charge: "" stands for all tenants without a quota."""
        return tenant if tenant in self.quotas else ""

    def claim(self, key: bytes, tenant: str) -> None:
        """Charge a key to a tenant that uses it too, unless its owner would then fall below its minimum."""
        rows = [row for row in self.table[key] if row.state in ("ready", "writing") and row.slab.size_class.counts]
        owner, size = self.table[key][0].tenant, sum(row.slab.size_class.stride for row in rows)
        if not size or self.used(owner) - size >= self.minimum(owner):
            self.assign(key, tenant)

    def assign(self, key: bytes, tenant: str) -> None:
        for row in self.table[key]:
            if row.tenant == tenant:
                continue
            row.tenant, row.kept_until = tenant, 0
            if row.state == "ready" and row.slab.size_class.counts and row.holds:
                row.aged = False  # until a hold on it ends
            elif row.state == "ready" and row.slab.size_class.counts:
                self.use(row)

    # ------------------------------------------------------------------ bytes

    @property
    def capacity(self) -> int:
        return sum(n.limit * n.slab_bytes - n.window_bytes for n in self.nodes.values() if not n.on_gpu)

    def used(self, tenant: str) -> int:
        classes = [size_class for node in self.nodes.values() for size_class in node.size_classes.values()]
        rows = [row for size_class in classes if size_class.counts for row in size_class.rows]
        return sum(
            row.slab.size_class.stride for row in rows if row.state in ("ready", "writing") and row.tenant == tenant
        )

    def minimum(self, tenant: str) -> int:
        return int(self.quotas.get(tenant, Quota()).minimum * self.capacity)

    def maximum(self, tenant: str) -> int:
        share = self.quotas.get(tenant, Quota()).maximum
        return int(share * self.capacity) if share < 1 else 1 << 62

    def is_full(self, tenant: str, size_class: SizeClass) -> bool:
        """Whether one more block there would exceed the tenant's maximum."""
        return size_class.counts and self.used(tenant) + size_class.stride > self.maximum(tenant)

    def tenants(self) -> dict[str, dict[str, Any]]:
        quotas = {"": Quota(), **self.quotas}
        return {
            name: {
                "used": self.used(name),
                "minimum": quotas[name].minimum,
                "maximum": quotas[name].maximum,
                "minimum_bytes": self.minimum(name),
                "maximum_bytes": int(quotas[name].maximum * self.capacity),
                "evicted": self.evicted_of[name],
            }
            for name in sorted(quotas)
        }

    # ------------------------------------------------------------------ victims

    def spared(self, size: int) -> Whose:
        """Accepts tenants that keep their minimum if they lose a block of that size."""
        return lambda owner: self.used(owner) - size >= self.minimum(owner)

    def choices_for(self, tenant: str, size_class: SizeClass) -> list[Whose]:
        """Whose blocks may be evicted for a tenant's next block: try the first choice, then the next."""
        size = size_class.stride
        if not size_class.counts:
            return [lambda owner: True]
        if self.is_full(tenant, size_class):
            return [lambda owner: owner == tenant]
        if self.used(tenant) + size <= self.minimum(tenant):
            return [lambda owner: owner != tenant and self.spared(size)(owner), lambda owner: owner == tenant]
        return [lambda owner: owner == tenant or self.spared(size)(owner)]

    def oldest_of(self, size_class: SizeClass, whose: Whose) -> Row | None:
        rows = [
            row for row in size_class.of("ready") if row.holds == 0 and (not size_class.counts or whose(row.tenant))
        ]
        return min(rows, key=lambda row: row.last, default=None)

    def near_victim(self, tenant: str, size_class: SizeClass) -> Row | None:
        found = (self.oldest_of(size_class, whose) for whose in self.choices_for(tenant, size_class))
        return next(filter(None, found), None)

    def surplus(self, size_class: SizeClass) -> Row | None:
        """The row to evict where no writer needs the slot."""
        return self.oldest_of(size_class, self.spared(size_class.stride)) or self.oldest(size_class)
