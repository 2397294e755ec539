"""Raykv's use of the operating system and the compiler."""
