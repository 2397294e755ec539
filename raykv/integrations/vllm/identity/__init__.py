"""What names an engine's KV: model, adapters, weights, and groups of layers."""
