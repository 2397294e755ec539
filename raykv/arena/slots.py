"""Slots that were looked up by their locations. Checks the slots' headers, and the rows to copy."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.arena import header
from raykv.arena.buffers import Rows, rows_of
from raykv.arena.header import Mask
from raykv.arena.mapping import Addresses, Bytes


class Slots(NamedTuple):
    """The slots of n locations in one mapping. The kernels of `raykv.arena.header` take these arrays."""

    words: header.Words  # the mapping's superblock, slab table and headers
    data: Bytes  # all of the mapping
    records: header.Words  # (n, 4) the locations
    keys: header.Words  # (n, 2)
    headers: header.Words  # (n,) index of the first word of each slot's header; -1: the arena offers no such slot
    addresses: Addresses  # (n,) addresses of the slots

    def check(self) -> tuple[Mask, header.Words]:
        """Before a copy: return (n,) which blocks are there, and (n, 2) checksums and positions from their headers."""
        ok, claims = np.zeros(len(self.records), np.bool_), np.zeros((len(self.records), 2), np.int64)
        header.check(self.words, self.headers, self.records, self.keys, claims, ok)
        return ok, claims

    def recheck(self, ok: Mask) -> None:
        """After a copy: clear `ok` where a header has changed since `check`."""
        header.recheck(self.words, self.headers, self.records, self.keys, ok)

    def identify(self) -> tuple[Bytes, NDArray[np.uint64]]:
        """Return (n, 16) keys and (n,) generations from the headers; zeros where there is no such slot."""
        out = np.zeros((len(self.records), 3), np.int64)
        header.identify(self.words, self.headers, out)
        return np.ascontiguousarray(out[:, 1:]).view(np.uint8), out[:, 0].astype(np.uint64)

    def checked(self, given: Rows | Bytes, writable: bool) -> Rows:
        """Return the caller's rows as Rows. Raises ValueError unless each location has a row of the right size."""
        rows = rows_of([given]) if isinstance(given, np.ndarray) else given
        if len(rows) != len(self.records):
            raise ValueError(f"{len(rows)} rows for {len(self.records)} locations")
        sizes = self.records[:, 1] >> 32
        if (sizes != rows.bytes).any():
            raise ValueError(f"rows of {rows.bytes} bytes, but a location of {sizes[sizes != rows.bytes][0]}")
        if writable and not rows.writable:
            raise ValueError("the rows are read-only: nothing can be read into them")
        return rows
