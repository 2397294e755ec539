"""One key space of a pool, as a worker reads and writes it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from raykv import keys as key_chain
from raykv.arena import buffers as row_checks
from raykv.arena.buffers import Rows
from raykv.client.swap import Swaps
from raykv.config import KEYS_PER_CALL, MIB
from raykv.errors import DeviceError
from raykv.protocol import ALTERED, LOCATION, PULLED, data_deadline

if TYPE_CHECKING:
    from raykv.client.pool import KVPool
    from raykv.client.session import LocalStore

PIECE_BYTES = 128 * MIB  # what crosses nodes at a time: the copy out of one overlaps the pull of the next
TIER_PIECE_BYTES = 32 * MIB  # the same of a tier: what came in time counts
PIECES_AHEAD = 2
WAIT_BUDGET_S = 0.05  # a read waits for a tier for so long, however fast its tokens could be computed

Keys = NDArray[np.uint8]
Locations = NDArray[np.void]


class KVCache:
    """Blocks of one model and layout. Get one from `KVPool.cache`; equal arguments give equal caches. Thread-safe.

    Methods that start with `a` are for event loops: the same, without blocking the loop. Cancelled, they end before
    the cancellation is seen, since they use the caller's memory.
    """

    def __init__(self, pool: KVPool, root: bytes, block_tokens: int, block_bytes: int, tokens_per_s: float) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.recompute_tokens_per_s = tokens_per_s
        self._pool = pool
        self._root = root
        self._swaps = Swaps(self, pool)

    def keys(self, token_ids: Any, *, lora: Any = None, extra: Any = None, salt: Any = None) -> Keys:
        """(full blocks, 16) uint8. token_ids: 1-D list, numpy array or torch tensor of ints that fit int32.

        lora: id of the adapter; salt: what separates tenants; both change every key. extra: by block, what else its
        KV depends on, such as the hash of an image ({block: bytes}, or a sequence); it changes keys from there on.
        """
        return key_chain.chain(self._root, token_ids, self.block_tokens, lora=lora, extra=extra, salt=salt)

    def rekey(self, hashes: Any) -> Keys:
        """An engine's own chained block hashes (list of bytes, or (n, k) uint8) as (n, 16) uint8 keys of this cache."""
        return key_chain.rekey(self._root, hashes)

    def match(self, keys: Keys, *, prefetch: bool = False) -> Match:
        """Lease the longest run of leading keys that is ready in the pool. A pool that is down has none.

        Blocks of an external tier are on their way from now on, and reads wait for them no longer than it would take to
        compute their tokens. prefetch: those of other nodes, too, for a prompt that waits in a queue.
        """
        return Match(self, self._pool, row_checks.keys(keys), prefetch)

    def amatch(self, keys: Keys, *, prefetch: bool = False) -> AsyncMatch:
        """`async with cache.amatch(keys) as match`."""
        return AsyncMatch(self, self._pool, row_checks.keys(keys), prefetch)

    def prefetch(self, keys: Keys) -> Future[int]:
        """Bring what an external tier has of a prompt into memory, in the background, and hold none of it.

        Its result: how many leading blocks were in memory then.
        """
        return self._pool.background(self._promote, row_checks.keys(keys))

    def _promote(self, keys: Keys) -> int:
        with self.match(keys, prefetch=True) as match:
            return match.fetch(whole=True)

    def store(self, keys: Keys, blocks: Any, start: int = 0) -> int:
        """Offer blocks to the cluster. Returns how many of them are newly stored.

        keys: (n, 16) of the whole prefix. blocks: (n - start, block_bytes) uint8, numpy or torch, for keys[start:].
        Blocks that are there, are being written by somebody else, or find no room are left out. ValueError for arrays
        of other shapes or dtypes.
        """
        return self.store_rows(*self._given(keys, blocks, start))

    def _given(self, keys: Keys, blocks: Any, start: int) -> tuple[Keys, Rows, int]:
        keys = row_checks.keys(keys)
        count = row_checks.count(keys, start)
        return keys, row_checks.dense("blocks", blocks, count, self.block_bytes, exact=True), start

    def store_from(self, keys: Keys, paged: Any, block_ids: Sequence[int], start: int = 0) -> int:
        """As `store`, out of paged memory: block keys[start + i] is row block_ids[i] of every array of `paged`.

        paged: one (pages, bytes) uint8 array, or several whose bytes add up to block_bytes (one a layer, say).
        """
        return self.store_rows(*self._given_paged(keys, paged, block_ids, start))

    def _given_paged(self, keys: Keys, paged: Any, block_ids: Sequence[int], start: int) -> tuple[Keys, Rows, int]:
        keys = row_checks.keys(keys)
        count = row_checks.count(keys, start)
        return keys, row_checks.paged(paged, block_ids, count, self.block_bytes), start

    async def astore(self, keys: Keys, blocks: Any, start: int = 0) -> int:
        # Checked here: what a GPU does first is known by the stream of the thread that calls.
        return await self._pool.in_thread(self.store_rows, *self._given(keys, blocks, start))

    async def astore_from(self, keys: Keys, paged: Any, block_ids: Sequence[int], start: int = 0) -> int:
        return await self._pool.in_thread(self.store_rows, *self._given_paged(keys, paged, block_ids, start))

    def swap_out(self, paged: Any, block_ids: Sequence[int], request_id: str) -> Future[int]:
        """Keep the blocks of a preempted request, in the background, until `swap_in` or `swap_drop`; see store_from.

        None of them is lost meanwhile, unless this process dies: where memory is short they go down to the external
        tier. Its result: len(block_ids), or 0 where the pool has no room for all. Until then their memory must stay as
        it is. What the request id had before is dropped.
        """
        return self._swaps.out(paged, block_ids, request_id)

    def swap_in(self, paged: Any, block_ids: Sequence[int], request_id: str) -> Future[int]:
        """Bring a preempted request's blocks back, in the background, and forget them; see read_into.

        Its result: how many leading ones are valid; 0 for a request that was not swapped out.
        """
        return self._swaps.back(paged, block_ids, request_id)

    def swap_drop(self, request_id: str) -> None:
        """A preempted request will not come back."""
        self._swaps.drop(request_id)

    def pin(self, keys: Keys) -> int:
        """Have blocks stay, in memory or below, until `unpin`, `clear` or a restart of the directory.

        Returns how many of the keys are pinned now: those that are not stored can't be.
        """
        answer = self._pool.link.call("pin", row_checks.keys(keys).tobytes())
        return int(answer[1]) if answer else 0

    def unpin(self, keys: Keys) -> None:
        self._pool.link.call("unpin", row_checks.keys(keys).tobytes())

    def reserve(self, keys: Keys, position: int = 0) -> Reservation:
        """Slots for those of `keys` that nobody has stored, or is storing: at most KEYS_PER_CALL keys are considered.

        keys: of a run of a chain's blocks, of which the first is at `position`.
        """
        return Reservation(self._pool, row_checks.keys(keys)[:KEYS_PER_CALL], 0, position, self.block_bytes)

    def store_rows(self, keys: Keys, rows: Rows, start: int = 0) -> int:
        """As `store`, of arguments that were checked."""
        stored, at = 0, start
        while at < len(keys):
            first = max(0, at - KEYS_PER_CALL // 2)  # parents go along, to be touched
            batch = keys[first : first + KEYS_PER_CALL]
            with Reservation(self._pool, batch, at - first, first, self.block_bytes) as reservation:
                reservation.copy_in(rows[at - start :])
                count = reservation.commit()
            stored += count
            at = first + reservation.covered
            if reservation.covered < len(batch) and not count:
                break
        return stored


class Reservation:
    """Slots that one call granted to a store: `copy_in`, at memory speed, then `commit`. A context manager.

    covered: leading keys that are stored, being written or granted now; the next one found no room.
    """

    def __init__(self, pool: KVPool, keys: Keys, start: int, position: int, block_bytes: int) -> None:
        """For what is missing of keys[start:]; the others are their parents. keys[0] is at `position` in its chain."""
        self._pool, self._block_bytes = pool, block_bytes
        self._id, granted = pool.link.hold("reserve", pool.home, keys.tobytes(), start, block_bytes)
        self.covered = granted.covered if granted else start
        indices = np.frombuffer(granted.indices if granted else b"", np.int32)
        self._rows, self._keys = indices - start, keys[indices]
        self._positions = position + indices
        self._locations = np.frombuffer(granted.locations if granted else b"", LOCATION)
        self._staged = np.frombuffer(granted.staged if granted else b"", LOCATION)
        self._away = self._staged["slab_gen"] > 0
        self._written = np.zeros(len(indices), np.bool_)
        if not len(self):
            self.release()

    def __len__(self) -> int:
        return len(self._keys)

    def copy_in(self, rows: Rows) -> None:
        """Copy blocks in place on this node, or into staging. rows[i]: of keys[start + i]; only this reads them."""
        local = self._pool.local
        target = np.where(self._away, self._staged, self._locations)
        if local is None or (target["node"] != local.index).any():
            self._pool.refresh()
        else:
            try:
                self._written = local.arena.write(target, self._keys, rows[self._rows], self._positions)
            except DeviceError as error:
                self._pool.link.fault("gpu", error)

    def commit(self) -> int:
        """Have nodes fetch what is theirs, then offer the blocks. Returns how many are new. Ends the reservation."""
        link = self._pool.link
        if not len(self):
            return 0
        self._push()
        if not self._written.all():
            link.fault("write", f"{int((~self._written).sum())} of {len(self)} blocks were not written")
        written = self._written.astype(np.uint8).tobytes()
        answer = link.call("commit", self._id, self._locations.tobytes(), self._keys.tobytes(), written)
        self.release()
        return answer[1] if answer else 0

    def release(self) -> None:
        """Give up what was not committed. Costs nothing."""
        self._pool.link.release(self._id)

    def _push(self) -> None:
        local, away = self._pool.local, np.flatnonzero(self._away & self._written)
        self._written[away] = False
        if local is None:
            return
        for piece in _pieces(away, max(1, PIECE_BYTES // self._block_bytes)):
            verdicts = local.push(self._staged[piece], self._keys[piece], self._locations[piece], self._pool.link)
            self._written[piece] = verdicts == PULLED
            if not self._written[piece].all():
                self._pool.refresh()
                break

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class Match:
    """Leading blocks that are ready and leased: none of them is evicted before `release`. A context manager.

    num_blocks, num_tokens: how many. nodes: Ray node ids they lie on, in order, each once.
    """

    def __init__(self, cache: KVCache, pool: KVPool, keys: Keys, prefetch: bool) -> None:
        self._cache, self._pool = cache, pool
        self._leases: list[_Lease] = []
        for first in range(0, len(keys), KEYS_PER_CALL):
            part = keys[first : first + KEYS_PER_CALL]
            lease = _Lease(pool, part, cache.block_bytes, cache.block_tokens / cache.recompute_tokens_per_s, prefetch)
            if len(lease):
                self._leases.append(lease)
            if len(lease) < len(part):
                break
        self.num_blocks = sum(map(len, self._leases))
        self.num_tokens = self.num_blocks * cache.block_tokens

    @property
    def nodes(self) -> list[str]:
        indices = [index for lease in self._leases for index in lease.source["node"].tolist()]
        return self._pool.node_names(list(dict.fromkeys(indices)))

    def read(self, out: Any, *, verify: bool = False) -> int:
        """Copy the blocks out; returns how many leading ones are valid: num_blocks, or fewer where a node failed.

        out: at least (num_blocks, block_bytes) uint8, contiguous, numpy or torch. verify: check the bytes of this
        node's blocks too (those that cross nodes always are). Reads once; a second read may be shorter.
        """
        return self.read_rows(self._given(out), verify)

    def _given(self, out: Any) -> Rows:
        return row_checks.dense("out", out, self.num_blocks, self._cache.block_bytes)

    def read_into(self, paged: Any, block_ids: Sequence[int], *, verify: bool = False) -> int:
        """As `read`, into paged memory: block i becomes row block_ids[i] of every array of `paged` (see store_from)."""
        return self.read_rows(self._given_paged(paged, block_ids), verify)

    def _given_paged(self, paged: Any, block_ids: Sequence[int]) -> Rows:
        return row_checks.paged(paged, block_ids, self.num_blocks, self._cache.block_bytes, writable=True)

    async def aread(self, out: Any, *, verify: bool = False) -> int:
        return await self._pool.in_thread(self.read_rows, self._given(out), verify)

    async def aread_into(self, paged: Any, block_ids: Sequence[int], *, verify: bool = False) -> int:
        return await self._pool.in_thread(self.read_rows, self._given_paged(paged, block_ids), verify)

    def read_rows(self, rows: Rows, verify: bool = False) -> int:
        """As `read`, of arguments that were checked."""
        done = 0
        for lease in self._leases:
            count = lease.read(rows[done : done + len(lease)], verify)
            done += count
            if count < len(lease):
                break
        return done

    def fetch(self, *, whole: bool = False) -> int:
        """Bring blocks of other nodes and of a tier to this node, without copying any out.

        As far as its staging window goes; whole: all of them, through the window, however long a tier takes.

        Returns how many leading blocks are on this node now: what a `read` copies at memory speed.
        """
        done = 0
        for lease in self._leases:
            count = lease.fetch(whole)
            done += count
            if count < len(lease):
                break
        return done

    def locations(self, blocks: NDArray[np.int64]) -> tuple[Locations, Keys]:
        """LOCATIONs and keys of blocks, by their numbers in the match. Once fetched they are in this arena."""
        sources = np.concatenate([lease.source for lease in self._leases])
        return sources[blocks], np.concatenate([lease.keys for lease in self._leases])[blocks]

    def release(self) -> None:
        """Let go; the directory learns of it with the next call. Costs nothing."""
        for lease in self._leases:
            self._pool.link.release(lease.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class AsyncMatch:
    """`async with cache.amatch(keys) as match`: a Match, asked for and released without blocking the loop."""

    def __init__(self, cache: KVCache, pool: KVPool, keys: Keys, prefetch: bool) -> None:
        self._cache, self._pool, self._keys, self._prefetch = cache, pool, keys, prefetch
        self._match: Match | None = None

    async def __aenter__(self) -> Match:
        try:
            await self._pool.in_thread(self._ask)
        except asyncio.CancelledError:
            self._release()
            raise
        assert self._match is not None
        return self._match

    async def __aexit__(self, *error: object) -> None:
        self._release()

    def _ask(self) -> None:
        self._match = Match(self._cache, self._pool, self._keys, self._prefetch)
        _ = self._match.nodes  # the name of a node is asked for once: here, not on the loop

    def _release(self) -> None:
        if self._match is not None:
            self._match.release()


class _Lease:
    """One call's worth of a match."""

    def __init__(self, pool: KVPool, keys: Keys, block_bytes: int, block_s: float, prefetch: bool) -> None:
        """block_s: seconds that a block takes to compute."""
        self._pool, self._block_bytes = pool, block_bytes
        self._begun: dict[int, tuple[int, Any]] = {}  # by first block: blocks of a piece, and the pull of it
        self.id, answer = pool.link.hold("match", pool.home, keys.tobytes(), block_bytes)
        self.source = np.frombuffer(answer.source if answer else b"", LOCATION).copy()
        self.staged = np.zeros(len(self.source), LOCATION)
        if answer and answer.staged:
            self.staged[:] = np.frombuffer(answer.staged, LOCATION)
        self.keys = keys[: len(self.source)]
        ours = self.staged[self.staged["slab_gen"] > 0] if answer and answer.staged else self.source
        if pool.local is None or (ours["node"] != pool.local.index).any():
            pool.refresh()  # the directory calls this node something else
            self.source, self.staged, self.keys = self.source[:0], self.staged[:0], keys[:0]
        self._external = external = self.source["node"] & 1 == 1
        piece_bytes = TIER_PIECE_BYTES if external.any() else PIECE_BYTES
        self._piece_blocks = max(1, piece_bytes // block_bytes)
        self._wait_budget_s = block_s * int(external.sum()) if external.any() else None
        self._since = time.monotonic()
        if not len(self.source):
            pool.link.release(self.id)
        elif pool.local is not None and (prefetch or external.any()):
            self._begin(pool.local)

    def __len__(self) -> int:
        return len(self.source)

    def read(self, rows: Rows, verify: bool) -> int:
        at = 0
        while at < len(self):
            stop = self._reach(at)
            if stop == at:
                stop = at + self._next_window(at)
            done = self._read_reached(at, stop, rows, verify)
            at += done
            if at < stop or not done:
                break
        return at

    def _here(self) -> NDArray[np.bool_]:
        local = self._pool.local
        here: NDArray[np.bool_] = self.source["node"] == (local.index if local else -1)
        return here

    def _reach(self, at: int) -> int:
        """End of the run from `at` that is on this node or has staging here."""
        missing = np.flatnonzero(~self._here()[at:] & (self.staged["slab_gen"][at:] == 0))
        return at + int(missing[0]) if len(missing) else len(self)

    def _next_window(self, at: int) -> int:
        """Give back the staging of what was read, and take as much for what follows. Returns for how many blocks."""
        answer = self._pool.link.call("next_window", self.id, at, self._block_bytes)
        staged = np.frombuffer(answer.staged if answer else b"", LOCATION)
        self.staged[at : at + len(staged)] = staged
        return self._reach(at) - at

    def _begin(self, local: LocalStore) -> None:
        stop = self._reach(0)
        for piece in itertools.islice(self._cut(self._away(0, stop)), PIECES_AHEAD):
            self._begun[int(piece[0])] = len(piece), self._start(local, piece)

    def _cut(self, away: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
        """Pieces to pull: first those of other nodes' memory, which is not to wait for a tier."""
        external = self._external[away]
        return itertools.chain(*(_pieces(part, self._piece_blocks) for part in (away[~external], away[external])))

    def _start(self, local: LocalStore, piece: NDArray[np.intp]) -> Any:
        """The pull of a piece, which may have begun with the match."""
        blocks, answer = self._begun.pop(int(piece[0]), (0, None))
        if blocks == len(piece):
            return answer
        external = bool(self._external[piece[0]])
        return local.pull(self.source[piece], self.keys[piece], self.staged[piece], external)

    def _away(self, at: int, stop: int) -> NDArray[np.intp]:
        return at + np.flatnonzero(~self._here()[at:stop])

    def _deadline(self, pieces: list[NDArray[np.intp]]) -> float:
        """Seconds to wait for pieces: less than their tokens would take to compute, where only a tier has them."""
        size = self._block_bytes * sum(map(len, pieces))
        if self._wait_budget_s is None or not all(self._external[piece[0]] for piece in pieces):
            return data_deadline(size)
        return max(
            0.0, min(data_deadline(size), self._since + max(WAIT_BUDGET_S, self._wait_budget_s) - time.monotonic())
        )

    def _read_reached(self, at: int, stop: int, rows: Rows, verify: bool) -> int:
        """Read [at, stop), pulling ahead what is on other nodes. Returns how many leading blocks are valid."""
        local = self._pool.local
        if local is None:
            return 0
        away = self._away(at, stop)
        valid = np.zeros(stop - at, np.bool_)
        arrivals = self._pull(local, away)
        near = np.setdiff1d(np.arange(at, stop), away)
        valid[near - at] = self._copy(self.source, near, rows, verify)  # while the first pieces are on their way
        for arrived in arrivals:
            valid[arrived - at] = self._copy(self.staged, arrived, rows, verify)
        return _leading(valid)

    def fetch(self, whole: bool) -> int:
        """Pull what is elsewhere, as far as staging goes, or all. Returns how many leading blocks came to this node."""
        local, at = self._pool.local, 0
        if whole:
            self._wait_budget_s = None
        while local is not None and at < len(self):
            stop = self._reach(at)
            if stop == at and whole:
                stop = at + self._next_window(at)
            away = self._away(at, stop)
            there = np.ones(stop - at, np.bool_)
            there[away - at] = False
            for arrived in self._pull(local, away):
                there[arrived - at] = True
                if not whole:  # else what is behind is given back, and not for this lease to read
                    self.source[arrived] = self.staged[arrived]
            at += _leading(there)
            if at < stop or stop == at or not whole:
                break
        return at

    def _pull(self, local: LocalStore, away: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
        """Begin to pull blocks into their staging slots. Iterates over those that came, in whatever order they do."""
        pulls: dict[Any, NDArray[np.intp]] = {}
        pieces = self._cut(away)

        def pull(count: int) -> None:
            for piece in itertools.islice(pieces, count):
                pulls[self._start(local, piece)] = piece

        def arrivals() -> Iterator[NDArray[np.intp]]:
            while pulls:
                answer = local.first(list(pulls), self._deadline(list(pulls.values())))
                if answer is None:
                    self._pool.link.fault("pull", f"{len(pulls)} pieces are late")
                    self._pool.refresh()
                    return
                piece = pulls.pop(answer)
                arrived = self._arrived(answer, piece)
                if arrived.all():  # else what follows would be read for nothing
                    pull(1)
                yield piece[arrived]

        pull(PIECES_AHEAD)
        return arrivals()

    def _copy(self, locations: Locations, which: NDArray[np.intp], rows: Rows, verify: bool) -> NDArray[np.bool_]:
        """Read these blocks out of slots of this node; which of them are valid."""
        local, link = self._pool.local, self._pool.link
        if local is None or not len(which) or (locations["node"][which] != local.index).any():  # replaced meanwhile
            return np.zeros(len(which), np.bool_)
        try:
            ok = local.arena.read(locations[which], self.keys[which], rows[which], verify)
        except DeviceError as error:  # nobody else is to miss the blocks for that
            link.fault("gpu", error)
            return np.zeros(len(which), np.bool_)
        if not ok.all():
            link.corrupt(locations[which][~ok])
            link.fault("read", f"{int((~ok).sum())} blocks were not what the directory said")
        return ok

    def _arrived(self, answer: Any, piece: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which blocks of a piece are in their staging slots now."""
        local, link = self._pool.local, self._pool.link
        if local is None:
            return np.zeros(len(piece), np.bool_)
        target = self.staged[piece]
        verdicts = local.verdicts(answer, target, link)
        if (verdicts != PULLED).any():
            self._pool.refresh()  # the store may be another actor now
        link.pulled(target[verdicts == PULLED])
        link.corrupt(self.source[piece][verdicts == ALTERED])
        arrived: NDArray[np.bool_] = verdicts == PULLED
        return arrived


def _leading(ok: NDArray[np.bool_]) -> int:
    return len(ok) if ok.all() else int(np.argmin(ok))


def _pieces(indices: NDArray[np.intp], blocks: int) -> Iterator[NDArray[np.intp]]:
    for first in range(0, len(indices), blocks):
        yield indices[first : first + blocks]
