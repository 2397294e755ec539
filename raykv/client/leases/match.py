"""A reader's leases on the leading blocks of a prompt."""

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from raykv.arena import buffers
from raykv.arena.buffers import Rows
from raykv.client.leases.hits import count_found, count_saved, found_tokens
from raykv.client.leases.lease import Lease
from raykv.client.leases.stream import PIECES_AHEAD, piece_blocks
from raykv.client.request_record import RequestRecord, lease_name
from raykv.client.session import Session
from raykv.config import KEYS_PER_CALL
from raykv.keys import Keys
from raykv.metrics.span import span, tell
from raykv.protocol.clients import Matched
from raykv.system.fork import refuse_forked


class Match:
    """Leases on the leading ready blocks: no leased block is evicted before `release`. A context manager.

    If the reader sends no call to the directory for ten minutes, its leases end, and a later read may be a miss.
    num_blocks, num_tokens: number of leased blocks and tokens. After `release`, every read raises ValueError, since the
    slots may then hold other blocks.
    """

    def __init__(
        self, session: Session, keys: Keys, tokens_per_s: float, prefetch: bool = False, counted: bool = False
    ) -> None:
        """Leases nothing before `ask`.

        tokens_per_s: rate at which the engine computes; it limits waits for an external tier. prefetch: whether to
        start pulling blocks of other nodes with the match instead of with the first read. counted: whether metrics and
        request reports count this look-up; False if raykv itself only moves blocks.
        """
        self._leases, self._released = list[Lease](), False
        self._session, self._keys, self._cache = session, keys, keys.cache
        self._asked = len(keys) * self._cache.block_tokens  # number of requested tokens
        self._block_s, self._prefetch = self._cache.block_tokens / tokens_per_s, prefetch
        self._stage = PIECES_AHEAD * piece_blocks(self._cache.block_bytes)  # number of blocks in a read's first pieces
        self._counted = counted
        self._record: RequestRecord | None = None  # set while somebody follows requests

    def ask(self) -> Self:
        """Lease the blocks."""
        directory, node, begin = self._session.directory, self._session.memory_name, time.monotonic()
        try:
            pool, model, asked = self._session.name, self._cache.model, self._asked
            with span("match", pool=pool, model=model, asked_tokens=asked) as it:
                for part in self._parts():
                    if not self._take(part, *directory.match(node, part, self._stage, self._counted)):
                        break
                hits = found_tokens(self._leases, self._cache)
                tell(it, hit_tokens=sum(hits.values()), **hits)
            if self._counted:
                count_found(self._session, self._cache, asked, hits)
            if self._record is not None:
                self._record.found, self._record.lookup_s = hits, time.monotonic() - begin
        except BaseException:  # a signal handler or the span's exporter raised: nobody else would release the leases
            self.release()
            raise
        return self

    def _parts(self) -> Iterator[Keys]:
        """Yield the keys in pieces of at most KEYS_PER_CALL."""
        keys, count = self._keys, len(self._keys)
        for first in range(0, count, KEYS_PER_CALL):
            yield keys[first : first + KEYS_PER_CALL] if count > KEYS_PER_CALL else keys

    def _take(self, part: Keys, lease: int, answer: Matched | None) -> bool:
        """Keep the lease that an answer grants. Returns whether the lease covers all keys of the call."""
        if self._counted and self._session.directory.requests.followed and self._record is None:
            name = lease_name(self._session.directory.client, lease)
            self._record = RequestRecord("request", self._cache, self._asked, id=name)
        try:
            leased = Lease.granted(self._session, part, self._block_s, self._prefetch, lease, answer)
        except BaseException:
            self._session.directory.release(lease)
            raise
        if self._record is not None:
            leased.blocks.record = self._record
            why = (answer.short or "", -1) if answer else ("no directory answered", -1)
            if len(leased) < len(part):
                self._record.fall_short(*(leased.cut if leased.cut[0] else why))
        if len(leased):
            self._leases.append(leased)
        return len(leased) == len(part)

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self._leases))

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self._cache.block_tokens

    @property
    def nodes(self) -> list[str]:
        """Ray node ids of the nodes that have the blocks, each once, in the order of the blocks.

        Asks the directory for names that this process does not know yet. Leaves out nodes whose names stay unknown.
        """
        indices = (index for lease in self._leases for index in lease.blocks.source["node"].tolist())
        return self._session.node_names(list(dict.fromkeys(indices)))

    def read(self, out: Any, *, verify: bool = False) -> int:
        """Copy the blocks to `out`. Blocks of other nodes stream through this node's staging window.

        out: at least (num_blocks, block_bytes) uint8, contiguous and writable, numpy or torch; block i is copied to
        out[i].
        verify: whether to check the checksums of this node's blocks too. Other nodes' blocks are always checked.
        Returns the number of leading rows that hold their blocks: num_blocks, or fewer if a node failed, or if other
        readers used up the staging window for seconds.
        Raises ValueError for an array of another shape or dtype.
        """
        return self.read_rows(self._dense(out), verify)

    def read_into(self, paged: Any, block_ids: Sequence[int], *, verify: bool = False) -> int:
        """Like `read`, but into paged memory: block i becomes row block_ids[i] of every array of `paged`.

        paged: a (pages, bytes) uint8 array, or several such arrays, for example one per layer. The rows of one page
        have block_bytes in total.
        block_ids: (num_blocks,) int. Raises ValueError if `paged` or `block_ids` does not fit.
        """
        return self.read_rows(self._paged(paged, block_ids), verify)

    async def aread(self, out: Any, *, verify: bool = False) -> int:
        """Like `read`, without blocking the event loop. A cancelled call finishes its copy before it raises."""
        return await self._session.workers.run(self.read_rows, self._dense(out), verify)

    async def aread_into(self, paged: Any, block_ids: Sequence[int], *, verify: bool = False) -> int:
        """Like `read_into`, without blocking the event loop. A cancelled call finishes its copy before it raises."""
        return await self._session.workers.run(self.read_rows, self._paged(paged, block_ids), verify)

    def _dense(self, out: Any) -> Rows:
        self._check_held()
        return buffers.dense("out", out, self.num_blocks, self._cache.block_bytes)

    def _paged(self, paged: Any, block_ids: Sequence[int]) -> Rows:
        self._check_held()
        return buffers.paged(paged, block_ids, self.num_blocks, self._cache.block_bytes, writable=True)

    def _check_held(self) -> None:
        if self._released:
            raise ValueError(
                "this match was released, so its blocks may be others now: read before its `with` block ends"
            )

    def read_rows(self, rows: Rows, verify: bool = False) -> int:
        """Like `read`, but into rows that were checked already."""
        refuse_forked()
        done = 0
        for lease in self._leases:
            count = lease.read(rows[done : done + len(lease)], verify)
            done += count
            if count < len(lease):
                break
            if lease is not self._leases[-1]:
                lease.blocks.give_back_slots()
        count_saved(
            self._session, self._cache, done * self._cache.block_tokens, self._cache.block_tokens / self._block_s
        )
        if self._record is not None:
            self._record.read += done * self._cache.block_tokens
        return done

    def fetch(self, *, whole: bool = False) -> int:
        """Pull blocks from other nodes and from an external tier to this node, without copying blocks out.

        whole: whether to pull all blocks through the staging window, however long a tier takes. Without `whole`, pull
        as many blocks as the window holds; a later `read` copies them at memory speed. Returns the number of leading
        blocks that arrived or were here already.
        """
        refuse_forked()
        self._check_held()
        done = 0
        for lease in self._leases:
            count = lease.fetch(whole)
            done += count
            if count < len(lease):
                break
            if whole and lease is not self._leases[-1]:
                lease.blocks.give_back_slots()
        return done

    def release(self) -> None:
        """Release the blocks. The next call to the directory reports the release, which needs no call of its own."""
        self._released = True
        for lease in self._leases:
            lease.release()
        record, self._record = self._record, None
        if record is not None and record.lookup_s >= 0:
            self._session.directory.report(record.line(self._session.node_id))

    def __del__(self) -> None:
        if self._leases and not self._released:
            self._session.directory.drop([lease.id for lease in self._leases])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class AsyncMatch:
    """`async with cache.amatch(keys) as match`: makes and releases a Match without blocking the event loop."""

    def __init__(self, session: Session, keys: Keys, tokens_per_s: float, prefetch: bool) -> None:
        """The arguments are those of Match. Sends nothing to the directory before the `async with`."""
        self._session = session
        self._match = Match(session, keys, tokens_per_s, prefetch, counted=True)

    async def __aenter__(self) -> Match:
        try:
            await self._session.asking.run(self._ask)
        except BaseException:
            self._match.release()
            raise
        return self._match

    def _ask(self) -> None:
        """Ask the directory for the match and for node names, so that `nodes` does not block the event loop later."""
        self._match.ask()
        _ = self._match.nodes

    async def __aexit__(self, *error: object) -> None:
        self._match.release()

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "cache.amatch is for event loops: use `async with cache.amatch(keys)`, or `with cache.match(keys)`"
        )

    def __exit__(self, *error: object) -> None:
        """Never reached."""
