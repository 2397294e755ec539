"""A request's chunks: their keys, their tokens, and which to load and store."""
