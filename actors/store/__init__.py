"""The actor that owns the tiers of a node."""
