"""Benches: every figure beside its floor, taken in the same run."""
