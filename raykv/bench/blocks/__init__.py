"""Benches of storing, reading and moving blocks."""
