"""The calls of a directory: each is a function of its State."""
