"""Records of requests for `raykv trace`: asked, found and read tokens. Made only while somebody follows requests."""

import os
import time
from dataclasses import dataclass, field

from raykv.keys import CacheId
from raykv.protocol.requests import RequestLine

WAITING = 128  # maximum number of lines that wait for the next report


class RequestReport:
    """Lines about requests that wait to be sent. The lock of the DirectoryClient guards them.

    followed: whether the directory's last answer said that somebody follows requests.
    """

    def __init__(self) -> None:
        self.followed = False
        self._lines: list[bytes] = []
        self._left_out = 0

    @property
    def waits(self) -> bool:
        """Whether there are lines to send."""
        return bool(self._lines)

    def add(self, line: RequestLine) -> None:
        """Add a line to be sent. If too many lines wait, only count the line as left out."""
        if len(self._lines) < WAITING:
            self._lines.append(line.packed())
        else:
            self._left_out += 1

    def take(self) -> tuple[tuple[bytes, ...], int]:
        """Return (lines to send, number of lines that were left out), both since the last call."""
        lines, left_out = tuple(self._lines), self._left_out
        self._lines, self._left_out = [], 0
        return lines, left_out


def lease_name(owner: int, lease: int) -> str:
    """Return a lease's name for a line. owner: id of the client that has the lease."""
    return f"{owner:016x}-{lease}"


@dataclass
class RequestRecord:
    """The record of a request so far. Seconds are -1 for a step that did not happen. Counts are numbers of tokens.

    kind, id, request: see RequestLine. found: tokens by source. short, about: arguments of the first `fall_short`.
    """

    kind: str
    cache: CacheId
    asked: int
    id: str = ""
    request: str = ""
    found: dict[str, int] = field(default_factory=dict)
    read: int = 0
    lookup_s: float = -1.0
    pull_s: float = -1.0
    copy_s: float = -1.0
    short: str = ""
    about: int = -1

    def fall_short(self, why: str, about: int = -1) -> None:
        """Note why fewer tokens were found or read. about: index of the node that the reason is about."""
        if not self.short:
            self.short, self.about = why, about

    def pulled(self, seconds: float) -> None:
        """Add seconds that a read waited for blocks to arrive."""
        self.pull_s = max(0.0, self.pull_s) + seconds

    def copied(self, seconds: float) -> None:
        """Add seconds of a copy."""
        self.copy_s = max(0.0, self.copy_s) + seconds

    def line(self, node: str) -> RequestLine:
        """Return the line to report. node: Ray node id of this process."""
        cache, found = self.cache, self.found
        lookup_us, pull_us, copy_us = (
            round(seconds * 1e6) if seconds >= 0 else -1 for seconds in (self.lookup_s, self.pull_s, self.copy_s)
        )
        return RequestLine(
            kind=self.kind,
            id=self.id,
            request=self.request,
            at_ms=round(time.time() * 1e3),
            node=node,
            pid=os.getpid(),
            model=cache.model,
            tenant=cache.tenant,
            asked=self.asked,
            hit=sum(found.values()),
            memory=found.get("memory", 0),
            other=found.get("node", 0),
            external=found.get("external", 0),
            read=self.read,
            size=self.read // cache.block_tokens * cache.block_bytes,
            lookup_us=lookup_us,
            pull_us=pull_us,
            copy_us=copy_us,
            short=self.short,
            about=self.about,
        )
