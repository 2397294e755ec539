"""Reads not_applicable.txt: which of vLLM's test files are left out, and which tests must fail."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_suffix(".txt")


class Entry(NamedTuple):
    """pattern: fits a test's name without its folder, or a file under `tests`. reason: why it does not apply."""

    pattern: str
    reason: str

    @property
    def is_file(self) -> bool:
        return "::" not in self.pattern

    def matches(self, name: str) -> bool:
        return re.fullmatch(".*".join(map(re.escape, self.pattern.split("*"))), name) is not None


def entries() -> list[Entry]:
    """All entries, in order. The reason "the same" repeats the line before."""
    found: list[Entry] = []
    for line in FILE.read_text().splitlines():
        if line and not line.startswith("#"):
            pattern, reason = line.split(": ", 1)
            found.append(Entry(pattern, found[-1].reason if reason == "the same" else reason))
    return found
