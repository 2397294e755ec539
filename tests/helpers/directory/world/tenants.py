"""Quotas of a world's tenants, which come, change and go."""

from helpers.directory.world.cast import Cast
from helpers.directory.world.clients import TENANTS
from raykv.config import Quota


class Tenants(Cast):
    """All tenants' minima together are at most 1."""

    def set_quota(self) -> None:
        """Set or change a tenant's quota, or remove it."""
        rng = self.rng
        tenant = rng.choice(TENANTS[1:])
        if rng.random() < 0.2:
            self.quotas.pop(tenant, None)
            self.do("remove_quota", tenant, self.now)
            return
        self.quotas[tenant] = self._quota(1 - sum(q.minimum for name, q in self.quotas.items() if name != tenant))
        self.do("set_quota", tenant, self.quotas[tenant], self.now)

    def _quotas(self) -> dict[str, Quota]:
        """The quotas that some tenants have from the start."""
        tenants = self.rng.sample(TENANTS[1:], self.rng.randint(1, 3))
        return {tenant: self._quota(1 / len(tenants)) for tenant in tenants}

    def _quota(self, left: float) -> Quota:
        """left: the largest minimum that the quota may have."""
        minimum = self.rng.choice([0.0, 0.1, 0.25, 0.5, 1.0]) * left
        return Quota(minimum, max(minimum, self.rng.choice([0.0, 0.1, 0.3, 0.6, 1.0, 1.0])))
