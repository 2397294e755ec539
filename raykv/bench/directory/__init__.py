"""Benches of a directory's load."""
