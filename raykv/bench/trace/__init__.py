"""How much of recorded request traces a pool serves."""
