"""The name of an engine's weights, which may change while the engine runs (sleep, RLHF)."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

log = logging.getLogger("raykv")


class Weights:
    """The name of an engine's weights. Engines share their chunks if their weights have the same name.

    name: part of the names of the engine's caches; "" if the engine has loaded its weights without a name.
    """

    def __init__(self, file: str | None) -> None:
        """file: path of a file with the name, reread at every reset. Raises ValueError if it is missing or empty."""
        self._file = file
        self.name = self._found = self._read() if file else ""
        if file and not self.name:
            raise ValueError(f"weights={file!r}: write what the engine's weights are called into this file")

    def reset(self) -> None:
        """Handle a possible change of the weights: adopt the name in the file, or else a name of this engine only."""
        self._take(self._read())

    def renew(self) -> bool:
        """Read the file again. Returns whether the weights have another name now; always False without a file."""
        found = self._read()
        if self._file is None or found == self._found:
            return False
        self._take(found)
        return True

    def _take(self, found: str) -> None:
        self._found, self.name = found, found or f"/{secrets.token_hex(16)}"
        if self._file and not found:
            log.warning("the weights have no name, so the engine shares with nobody: write it into %s", self._file)

    def _read(self) -> str:
        """Return the name in the file, or "" if the file is missing or empty."""
        if self._file is None:
            return ""
        try:
            name = Path(self._file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""
        return f"/weights {name}" if name else ""
