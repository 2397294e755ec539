"""The state of a directory."""
