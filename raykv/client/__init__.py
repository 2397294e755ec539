"""A pool as an engine's process sees it."""
