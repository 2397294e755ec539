"""A pool's status as text: once, or again and again."""
