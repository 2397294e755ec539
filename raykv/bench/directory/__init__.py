"""How much a directory carries."""
