"""What an engine's KV is called: model, adapters, weights, and groups of layers."""
