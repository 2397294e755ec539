"""The leased blocks of one call of a match. Blocks of this node are read in place, other blocks are pulled first."""

import time
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from raykv.arena.buffers import Rows
from raykv.client.leases.leased_blocks import LeasedBlocks, LeaseName, leading
from raykv.client.leases.stream import SILENT, Stream, reachable
from raykv.client.session import Session
from raykv.client.stores.store_client import StoreClient
from raykv.errors import DeviceError
from raykv.keys import Keys
from raykv.metrics.span import span, tell
from raykv.protocol.clients import Matched, MatchedPart
from raykv.protocol.location import KEY_BYTES, LOCATION, Locations, is_tier


class Leased(NamedTuple):
    """Blocks under the lease of one client. Any process of the reader's node may read them until the lease is released.

    source: LOCATION records. keys: 16 bytes each. followed: whether the reader reports its read (see RequestRecord).
    """

    name: LeaseName
    source: bytes
    keys: bytes
    followed: bool = False


class Lease:
    """Leased blocks of one call.

    blocks: the blocks and their locations. cut: why this Lease has fewer blocks than the directory leased, and the
    index of the node at fault (-1: none).
    """

    def __init__(self, session: Session, store: StoreClient | None, blocks: LeasedBlocks) -> None:
        """store: the store of the reader's node."""
        self._session, self._store, self.blocks = session, store, blocks
        self._stream = Stream(session, store, blocks)
        self.cut = "", -1

    @classmethod
    def granted(
        cls, session: Session, keys: Keys, block_s: float, prefetch: bool, lease: int, answer: Matched | None
    ) -> Self:
        """Make a lease from the answer to a match. keys: keys of the call. block_s: the engine's time for a block.

        prefetch: see Match. lease, answer: the result of `DirectoryClient.match` for these keys.
        """
        source = np.frombuffer(answer.source if answer else b"", LOCATION)
        staged = np.frombuffer(answer.staged, LOCATION) if answer and answer.staged else None
        ours = source["node"][:1]  # without `staged`, all blocks are in one memory
        if staged is not None:
            ours = np.where(staged["node"] > 0, staged["node"], source["node"])
        cut, local = ("", -1), session.local_with(ours, answer.epoch if answer and len(source) else 0)
        if local is None:
            cut = ("this process is yet to find its new store" if session.local else "this node has no store"), -1
            source, staged = source[:0], None
        elif staged is not None and (stop := reachable(local, source, local.index)) < len(source):
            cut = SILENT, int(source["node"][stop])
            source, staged = source[:stop], staged[:stop]
        nonce, node = (local.arena.nonce, local.index) if local else (b"", -1)
        name = LeaseName(nonce, node, session.directory.client, lease, 0)
        of, leased = (session.directory, keys.cache.block_bytes, name), np.asarray(keys)[: len(source)]
        made = cls(session, local, LeasedBlocks(*of, source, leased, all_here=staged is None))
        made.cut = cut
        if staged is not None:
            made.blocks.staged[:] = staged
        external = made._limit_wait(block_s)
        if not len(source):
            made.release()
        elif external or prefetch:
            made._stream.begin()
        return made

    @classmethod
    def granted_part(
        cls, session: Session, memory: str, keys: Keys, block_s: float, lease: int, part: MatchedPart
    ) -> Self:
        """Make another process's lease from a part of a `match_parts` answer. memory: name of the reader's memory."""
        source = np.frombuffer(part.source, LOCATION)
        name = LeaseName(part.nonce, part.node, session.directory.client, lease, 0)
        store = session.store_of(memory) if is_tier(source["node"]).any() else None
        of, leased = (session.directory, keys.cache.block_bytes, name), np.asarray(keys)[: len(source)]
        made = cls(session, store, blocks := LeasedBlocks(*of, source, leased))
        if made._limit_wait(block_s) and blocks.take_slots(np.flatnonzero(~blocks.here()), 0) is not None:
            made._stream.begin()
        return made

    @classmethod
    def borrowed(cls, session: Session, block_bytes: int, leased: Leased) -> Self:
        """Make a Lease that reads under another process's lease, which was made for this node's memory."""
        source = np.frombuffer(leased.source, LOCATION)
        keys = np.frombuffer(leased.keys, np.uint8).reshape(-1, KEY_BYTES)
        return cls(session, session.local, LeasedBlocks(session.directory, block_bytes, leased.name, source, keys))

    def _limit_wait(self, block_s: float) -> int:
        """Let reads wait for a tier at most as long as computing its blocks takes. Returns the number of its blocks."""
        external = self.blocks.found["external"]
        self._stream.wait_budget_s = block_s * external if external else None
        return external

    def __len__(self) -> int:
        return len(self.blocks.source)

    @property
    def id(self) -> int:
        return self.blocks.name.lease

    def leased(self, first: int, stop: int) -> Leased:
        """Return blocks [first, stop) for another process to read."""
        blocks = self.blocks
        name = blocks.name._replace(first=blocks.name.first + first)
        return Leased(
            name, blocks.source[first:stop].tobytes(), blocks.keys[first:stop].tobytes(), blocks.record is not None
        )

    def release(self) -> None:
        """Release the blocks. The next call to the directory reports the release."""
        self._session.directory.release(self.id)

    def read(self, rows: Rows, verify: bool) -> int:
        """Copy block i to rows[i]. Returns the number of leading rows that hold their blocks."""
        begin, metrics = time.monotonic(), self._session.directory.metrics
        with span("read", pool=self._session.name, blocks=len(self), **self.blocks.found) as it:
            count = self._read(rows, verify)
            tell(it, read_blocks=count, bytes=count * self.blocks.block_bytes)
        metrics.observe("read_seconds", time.monotonic() - begin)
        metrics.add("read_bytes_total", count * self.blocks.block_bytes)
        return count

    def _read(self, rows: Rows, verify: bool) -> int:
        keys = self.blocks.keys
        if self.blocks.here().all():
            return leading(self._copy(self.blocks.source, keys, rows, verify))
        valid = np.zeros(len(self), np.bool_)
        for blocks, where in self._stream.arrivals(len(self), passes=True):
            valid[blocks] = self._copy(where, keys[blocks], rows[blocks], verify)
        if self.blocks.name.owner != self._session.directory.client:  # report now: the owner may soon release
            self._session.directory.heartbeat()
        return leading(valid)

    def fetch(self, whole: bool) -> int:
        """Pull blocks to this node: all blocks if `whole`, else as many as fit into the staging window.

        Returns the number of leading blocks that arrived or were there already.
        """
        there, stop = self.blocks.here(), len(self)
        if there.all():
            return stop
        if whole:
            self._stream.wait_budget_s = None
        else:
            away = np.flatnonzero(~there)
            staged = self.blocks.take_slots(away, 0)
            if staged is None or len(staged) < len(away):
                stop = int(away[0 if staged is None else len(staged)])
        for blocks, where in self._stream.arrivals(stop, passes=whole):
            there[blocks] = True
            if not whole:  # with `whole` the slots are given back, so a later read must not use them
                self.blocks.move(blocks, where)
        return leading(there[:stop])

    def fetch_external(self) -> int:
        """If any block is in an external tier, pull as many blocks to this node as fit into the staging window.

        Returns the number of leading blocks that are then in memory, on this node or on another node.
        """
        if self.blocks.external.any():
            self.fetch(whole=False)
        return leading(~is_tier(self.blocks.source["node"]))

    def _copy(self, locations: Locations, keys: NDArray[np.uint8], rows: Rows, verify: bool) -> NDArray[np.bool_]:
        """Copy blocks out of slots of this node. Returns (n,) bool: which rows are valid."""
        local, directory = self._session.local, self._session.directory
        if local is None or local is not self._store or not len(locations):  # the store was replaced meanwhile
            if len(locations):
                self.blocks.fall_short("the store of this node was replaced")
            return np.zeros(len(locations), np.bool_)
        begin = time.monotonic()
        try:
            ok = local.arena.read(locations, keys, rows, verify)
        except DeviceError as error:  # the blocks are good, so do not report them as corrupt
            self.blocks.fall_short("the GPU could not copy")
            directory.fault("gpu", error)
            return np.zeros(len(locations), np.bool_)
        if self.blocks.record is not None:
            self.blocks.record.copied(time.monotonic() - begin)
        if not ok.all():
            self.blocks.fall_short("blocks were evicted while they were read, or are not what was stored")
            directory.corrupt(local.wrong(locations[~ok], keys[~ok]))
            directory.fault("read", f"{int((~ok).sum())} blocks were not what the directory said")
        return ok
