"""What routers are told of the chunks in the pool."""
