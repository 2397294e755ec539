"""Engines that use a pool."""
