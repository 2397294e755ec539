"""The names of an engine's KV: of its model, adapters, weights, and groups of layers."""
