"""External tiers as users write them, blocks for tiers, and a pool that has a tier."""
