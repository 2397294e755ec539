"""The directory's rules, written a second time as plain Python objects."""
