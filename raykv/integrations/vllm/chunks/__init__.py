"""A request's chunks: their keys, their tokens, and the choice of chunks to load and store."""
