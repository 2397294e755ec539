"""What an engine's weights are called, beside model and revision, where they change while it runs (sleep, RLHF)."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

log = logging.getLogger("raykv")


class Weights:
    """Engines whose weights have one name share what they store.

    name: what caches of the engine are told apart by; "" for the weights that were loaded, if nobody named them.
    """

    def __init__(self, file: str | None) -> None:
        """file: that has the name, and is read again at every reset. ValueError if there is none, or it is empty."""
        self._file = file
        self.name = self._read() if file else ""
        if file and not self.name:
            raise ValueError(f"weights={file!r}: write what the engine's weights are called into this file")

    def reset(self) -> None:
        """They may be others now: those that the file names, or else some that no other engine has."""
        self.name = self._read() or f"/{secrets.token_hex(16)}"

    def _read(self) -> str:
        """ "" where there is no file, or nothing in it."""
        if self._file is None:
            return ""
        try:
            name = Path(self._file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            log.warning("the engine's weights have no name, so it shares with nobody: %s", error)
            return ""
        return f"/weights {name}" if name else ""
