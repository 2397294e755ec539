"""Directories without Ray: for tests by example, fuzzers, and comparison with an oracle."""
