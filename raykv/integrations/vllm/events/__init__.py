"""KV events, which tell routers about chunks in the pool."""
