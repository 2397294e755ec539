"""Quotas: shares of the pool's memory. A tenant's minimum is reserved for the tenant; its maximum limits the tenant.

Each tenant with a quota has a number. All other tenants together are tenant 0, which has no minimum and no limit.
Kernels enforce quotas: `kernels/quotas.py: may_go` says which tenant's blocks may be evicted for another tenant.
"""

from typing import Any

from raykv.config import Quota, check_tenant
from raykv.directory.kernels.columns import NO_LIMIT, TENANTS_MAX
from raykv.directory.state.size_classes import SizeClasses


class Quotas(dict[str, Quota]):
    """Quotas by the tenant's name."""

    def __init__(self, size_classes: SizeClasses) -> None:
        self._size_classes = size_classes
        self._numbers: dict[str, int] = {}
        self._capacity = 0  # bytes of memory that quotas divide

    def number(self, tenant: str) -> int:
        """Return the number by which kernels know a tenant."""
        return self._numbers.get(tenant, 0)

    def set(self, tenant: str, quota: Quota) -> None:
        """Set a tenant's quota. ValueError for a bad name, for minima with a sum above 1, or for too many tenants."""
        check_tenant(tenant)
        others = sum(other.minimum for name, other in self.items() if name != tenant)
        if others + quota.minimum > 1 + 1e-9:
            raise ValueError(
                f"a minimum of {quota.minimum:g} for {tenant!r}: other tenants have minima of {others:g} together, and "
                f"all may have 1; lower one of them first"
            )
        if tenant not in self and len(self) == TENANTS_MAX - 1:
            raise ValueError(f"a quota for {tenant!r}: {len(self)} tenants have one, and no more can; remove one first")
        if tenant not in self:
            taken = self._numbers.values()
            self._numbers[tenant] = next(number for number in range(1, TENANTS_MAX) if number not in taken)
            self._tell_apart()
        self[tenant] = quota
        self._apply()

    def remove(self, tenant: str) -> bool:
        """End a tenant's quota, and charge tenant 0 for its blocks. Returns whether the tenant had a quota."""
        if self.pop(tenant, None) is None:
            return False
        self._size_classes.give_up(self._numbers.pop(tenant))
        self._tell_apart()
        return True

    def resize(self, capacity: int) -> None:
        """Set the bytes of memory that quotas divide: see `Allocator.capacity`."""
        self._capacity = capacity
        self._apply()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return figures by tenant: used bytes, minimum and maximum as shares and in bytes, and number of evictions.

        The tenant "" is all tenants without a quota.
        """
        return {"": self._stats(0, Quota())} | {
            tenant: self._stats(self._numbers[tenant], quota) for tenant, quota in sorted(self.items())
        }

    def _stats(self, number: int, quota: Quota) -> dict[str, Any]:
        record = self._size_classes.c.quotas[number]
        return {
            "used": int(record["used"]),
            "minimum": quota.minimum,
            "maximum": quota.maximum,
            "minimum_bytes": int(quota.minimum * self._capacity),
            "maximum_bytes": int(quota.maximum * self._capacity),
            "evicted": int(record["evicted"]),
        }

    def _tell_apart(self) -> None:
        self._size_classes.set_tenants(max(self._numbers.values(), default=0) + 1)

    def _apply(self) -> None:
        for tenant, quota in self.items():
            record = self._size_classes.c.quotas[self._numbers[tenant]]
            record["minimum"] = int(quota.minimum * self._capacity)
            record["maximum"] = int(quota.maximum * self._capacity) if quota.maximum < 1 else NO_LIMIT
