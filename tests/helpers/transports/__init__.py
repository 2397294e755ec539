"""Peers to read from, and a relay in front of them."""
