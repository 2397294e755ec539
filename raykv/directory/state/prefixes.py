"""The prefixes with which look-ups end most often, counted in little time and memory."""

from dataclasses import dataclass

from raykv.protocol.location import KEY_BYTES

KEPT = 256  # number of prefixes that stay when the table is cleared
SEEN = 1024  # maximum number of prefixes; beyond it, the table is cleared of all but the KEPT largest


@dataclass(slots=True)
class Prefix:
    """key: key of the last block. blocks: block count. hits: look-ups that ended there. last: time of the last hit."""

    key: bytes
    blocks: int
    block_bytes: int
    hits: int
    last: float

    @property
    def found(self) -> int:
        """Number of blocks that all these look-ups found."""
        return self.hits * self.blocks


class Prefixes:
    """Counts look-ups by the last block found. If a look-up takes several calls, each call counts separately."""

    def __init__(self) -> None:
        self._seen: dict[bytes, Prefix] = {}

    def count(self, keys: bytes, blocks: int, block_bytes: int, now: float) -> None:
        """Count a look-up that found the first `blocks` of `keys`. blocks: at least one."""
        key = keys[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES]
        prefix = self._seen.get(key)
        if prefix is not None:
            prefix.hits, prefix.last = prefix.hits + 1, now
            return
        if len(self._seen) >= SEEN:
            self._seen = {prefix.key: prefix for prefix in self.largest(KEPT)}
        self._seen[key] = Prefix(key, blocks, block_bytes, 1, now)

    def largest(self, n: int) -> list[Prefix]:
        """Return at most `n` prefixes, in descending order of found blocks."""
        return sorted(self._seen.values(), key=lambda prefix: prefix.found, reverse=True)[:n]
