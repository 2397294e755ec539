"""Opens tiers as a node store does."""

from raykv.tiers import Tier, TierUrl, tier_for


def open_tier(url: TierUrl) -> Tier:
    return tier_for(url)(url)
