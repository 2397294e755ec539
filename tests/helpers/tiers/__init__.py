"""External tiers as users write them, blocks for them, and a pool that has one."""
