"""The bytes of one node."""
