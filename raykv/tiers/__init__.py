"""External tiers keep blocks outside the nodes' memory. They implement one interface. A URL's scheme selects a tier."""

from raykv.tiers.base import HEAD_BYTES, MARKER, Block, Tier, TierUrl
from raykv.tiers.registry import open_tier, register_tier, tier_for
from raykv.tiers.url import parse

__all__ = [
    "HEAD_BYTES",
    "MARKER",
    "Block",
    "Tier",
    "TierUrl",
    "open_tier",
    "parse",
    "register_tier",
    "tier_for",
]
