"""KV events: what routers learn about chunks in the pool."""
