"""How soon an engine answers."""
