"""Passes lines about finished requests from clients to followers, the people who watch requests."""

from collections import deque

from raykv.protocol.requests import LINE_BYTES, Followed

FOLLOW_S = 3.0  # seconds for which clients report after a call of `follow`
KEPT = 2000  # maximum number of kept lines
LINES_PER_S = 500  # maximum number of lines kept per second, from all clients; further lines are only counted
LINES_PER_ANSWER = 500

Cursor = tuple[int, int, int]  # epoch of the directory, its count of lines, its count of left-out requests


class Followers:
    """The latest lines about requests, and the time until which clients report. Not thread-safe.

    Times are in seconds of one clock of the caller.
    """

    def __init__(self) -> None:
        self._until = 0.0  # clients report until this time; 0: nobody ever followed
        self._lines: deque[bytes] = deque(maxlen=KEPT)
        self._count, self._left_out = 0, 0  # numbers of kept lines and of left-out requests so far
        self._second, self._in_second = 0, 0

    def there(self, now: float) -> bool:
        """Whether somebody follows."""
        return now < self._until

    def report(self, lines: tuple[bytes, ...], left_out: int, now: float) -> None:
        """Receive a client's lines, and the number of further lines that the client left out.

        Raises ValueError or TypeError for bad arguments.
        """
        if not isinstance(left_out, int) or left_out < 0:
            raise ValueError(f"{left_out!r} requests were left out: give a count")
        for line in lines:
            if not isinstance(line, bytes) or len(line) > LINE_BYTES:
                raise ValueError(f"a line of a request has at most {LINE_BYTES} bytes")
        if not self.there(now):
            return
        if int(now) != self._second:
            self._second, self._in_second = int(now), 0
        room = LINES_PER_S - self._in_second
        self._in_second += len(lines[:room])
        self._lines.extend(lines[:room])
        self._count += len(lines[:room])
        self._left_out += left_out + len(lines[room:])

    def follow(self, cursor: Cursor, epoch: int, names: dict[int, str], now: float) -> Followed:
        """Return at most LINES_PER_ANSWER kept lines since `cursor`, which the caller got with its last Followed.

        The cursor (0, 0, 0) gives no lines. A cursor of another directory gives the kept lines from the oldest on.
        """
        self._until = now + FOLLOW_S
        known, seen, left_out = cursor
        if known == 0:
            seen, left_out = self._count, self._left_out
        elif known != epoch:
            seen, left_out = 0, 0
        first = self._count - len(self._lines)  # number of the oldest kept line
        begin = max(seen, first)
        lines = tuple(self._lines)[begin - first :][:LINES_PER_ANSWER]
        missed = begin - seen + self._left_out - left_out
        return Followed((epoch, begin + len(lines), self._left_out), lines, missed, names)
