"""Benches of engines' answers."""
