"""Peers that are read from, and a relay before them."""
