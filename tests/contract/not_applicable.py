"""Reads not_applicable.txt: what of vLLM's tests is not run, and what must fail."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_suffix(".txt")


class Entry(NamedTuple):
    """pattern: of a test's name, behind its folder, or of a file under `tests`. reason: why it does not apply."""

    pattern: str
    reason: str

    @property
    def is_file(self) -> bool:
        return "::" not in self.pattern

    def matches(self, name: str) -> bool:
        return re.fullmatch(".*".join(map(re.escape, self.pattern.split("*"))), name) is not None


def entries() -> list[Entry]:
    """In their order; "the same" is the reason of the line before."""
    found: list[Entry] = []
    for line in FILE.read_text().splitlines():
        if line and not line.startswith("#"):
            pattern, reason = line.split(": ", 1)
            found.append(Entry(pattern, found[-1].reason if reason == "the same" else reason))
    return found
