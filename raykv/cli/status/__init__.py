"""What a pool is doing, as text: once, or again and again."""
