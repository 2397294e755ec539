"""The directory's inner loops, compiled by numba."""
