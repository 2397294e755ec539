"""Arenas in memory and on GPUs, and a stand-in for CuPy."""
