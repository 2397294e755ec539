"""How fast blocks are stored, read, and moved."""
