"""Directories without Ray: by example, by chance, and beside their oracle."""
