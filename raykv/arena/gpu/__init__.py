"""The bytes of one GPU."""
