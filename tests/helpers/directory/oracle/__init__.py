"""The directory's rules once more, as plain Python objects."""
