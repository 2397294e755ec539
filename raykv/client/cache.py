"""A cache, through which an engine reads and writes one key space of a pool."""

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from raykv import keys as key_chain
from raykv.arena import buffers
from raykv.arena.buffers import Rows
from raykv.client.leases.match import AsyncMatch, Match
from raykv.client.reservation import Reservation, store_rows
from raykv.client.session import Session
from raykv.client.swap import Swaps
from raykv.config import KEYS_PER_CALL
from raykv.keys import CacheId, Keys
from raykv.system import sha256

LONG_AGO = 1e9  # the earliest accepted time, as of `time.time()`: an earlier time is a mistake


class KVCache:
    """Blocks of one model and layout. Get a cache from `KVPool.cache`; equal arguments give equal caches. Thread-safe.

    id: identity of the cache, which its Keys carry. root: bytes from which all keys are computed. The root depends on
    the pool's secret. session: this process's session in the pool. recompute_tokens_per_s: rate at which the engine
    computes; callers may set it.

    The argument `keys` of all methods is (n, 16) uint8 Keys of this cache. Methods raise ValueError for plain arrays
    and for Keys of another cache, even if that cache has blocks of the same size.
    Methods whose names begin with `a` are for event loops: they do the same without blocking the loop. A cancelled
    method finishes before it raises the cancellation, since it uses the caller's memory.
    A pickled cache attaches to its pool when it is unpickled.
    """

    def __init__(self, session: Session, cache: CacheId, root: bytes, recompute_tokens_per_s: float) -> None:
        """Called by `KVPool.cache`. root: 32 bytes, from `raykv.keys.root`."""
        self.id = cache
        self.root = root
        self.session = session
        self.recompute_tokens_per_s = recompute_tokens_per_s
        self._swaps = Swaps(session, cache, root)
        sha256.load()  # load it before a caller waits for keys

    @property
    def block_tokens(self) -> int:
        """Number of tokens in a block."""
        return self.id.block_tokens

    @property
    def block_bytes(self) -> int:
        """Size of a block in bytes."""
        return self.id.block_bytes

    def __repr__(self) -> str:
        return f"KVCache{self.id}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.session, self.id, self.root, self.recompute_tokens_per_s, self.session.fingerprint)

    # ------------------------------------------------------------------ keys

    def keys(self, token_ids: Any, *, lora: Any = None, extra: Any = None, salt: Any = None) -> Keys:
        """Compute the keys of a prompt's full blocks: (len(token_ids) // block_tokens, 16) uint8.

        token_ids: 1-D list, numpy array or torch tensor of ints that fit int32.
        lora: id of the adapter, str or bytes. salt: separates tenants, str or bytes. Both change every key.
        If the cache has no named tenant, the salt also determines the tenant that is charged for the blocks.
        extra: further input of blocks' KV, such as the hash of an image. Give {block: str or bytes}, or a list with a
        value or None for each block. A value changes the keys of its block and of all later blocks.
        Raises ValueError for other arguments.
        """
        rows = key_chain.chain(self.root, token_ids, self.block_tokens, lora=lora, extra=extra, salt=salt)
        return Keys(rows, self.id_for(salt))

    def id_for(self, salt: str | bytes | None) -> CacheId:
        """Return this cache's id for a prompt with that salt. The salt's tenant is used if no tenant was named."""
        return self.id.for_salt(salt, self.session.secret)

    def rekey(self, hashes: Any) -> Keys:
        """Turn an engine's own block hashes into keys of this cache: (len(hashes), 16) uint8.

        hashes: list of bytes, or (n, k) uint8; each must identify its block and all blocks before it.
        Raises ValueError for other arguments.
        """
        return Keys(key_chain.rekey(self.root, hashes), self.id)

    # ------------------------------------------------------------------ read

    def match(self, keys: Keys, *, prefetch: bool = False) -> Match:
        """Lease the longest ready prefix of the keys. The match is empty if the pool is down.

        The pool starts to fetch blocks that are in an external tier. A read waits for these blocks no longer than the
        engine would need to compute their tokens. prefetch: whether to fetch blocks of other nodes now too, for a
        prompt that waits in a queue. Blocks that another reader is fetching are not fetched twice. Raises ValueError
        for keys of another cache.
        """
        keys = key_chain.check(keys, self.id)
        return Match(self.session, keys, self.recompute_tokens_per_s, prefetch, counted=True).ask()

    def amatch(self, keys: Keys, *, prefetch: bool = False) -> AsyncMatch:
        """Like `match`, but for event loops: `async with cache.amatch(keys) as match`."""
        return AsyncMatch(self.session, key_chain.check(keys, self.id), self.recompute_tokens_per_s, prefetch)

    def prefetch(self, keys: Keys) -> Future[int]:
        """Copy a prompt's blocks from an external tier into memory, in the background. They may be evicted again.

        Returns a future of the number of leading blocks that are then in memory. Raises ValueError for keys of another
        cache.
        """
        return self.session.background(self._promote, key_chain.check(keys, self.id))

    def _promote(self, keys: Keys) -> int:
        with Match(self.session, keys, self.recompute_tokens_per_s, prefetch=True).ask() as match:
            return match.fetch(whole=True)

    # ------------------------------------------------------------------ store

    def store(self, keys: Keys, blocks: Any, start: int = 0, *, wait: bool = False) -> int:
        """Store blocks in the pool. Returns the number of newly stored blocks.

        keys: (n, 16), the keys of the whole prefix. blocks: (n - start, block_bytes) uint8, contiguous, numpy or torch,
        the blocks of keys[start:]. The call leaves out blocks that the pool has, blocks that another client is writing,
        and blocks for which there is no room. wait: whether to wait until the directory confirms that all processes
        can find the blocks. Without `wait`, this process finds the written blocks at once, but other processes may miss
        them for a moment.
        Raises ValueError for keys of another cache, and for blocks of another shape or dtype.
        """
        return store_rows(self.session, *self._dense(keys, blocks, start), wait).new

    def store_from(
        self, keys: Keys, paged: Any, block_ids: Sequence[int], start: int = 0, *, wait: bool = False
    ) -> int:
        """Like `store`, but from paged memory: the block of keys[start + i] is row block_ids[i] of each `paged` array.

        paged: a (pages, bytes) uint8 array, or several such arrays, for example one per layer. The rows of one page
        have block_bytes in total.
        block_ids: (n - start,) int. Raises ValueError if `paged` or `block_ids` does not fit.
        """
        return store_rows(self.session, *self._paged(keys, paged, block_ids, start), wait).new

    async def astore(self, keys: Keys, blocks: Any, start: int = 0, *, wait: bool = False) -> int:
        """Like `store`, without blocking the event loop. A cancelled call finishes its copy before it raises."""
        # Check in this thread: only the calling thread's CUDA stream shows which GPU work must finish first.
        rows = self._dense(keys, blocks, start)
        return (await self.session.workers.run(store_rows, self.session, *rows, wait)).new

    async def astore_from(
        self, keys: Keys, paged: Any, block_ids: Sequence[int], start: int = 0, *, wait: bool = False
    ) -> int:
        """Like `store_from`, without blocking the event loop. A cancelled call finishes its copy before it raises."""
        rows = self._paged(keys, paged, block_ids, start)
        return (await self.session.workers.run(store_rows, self.session, *rows, wait)).new

    def _dense(self, keys: Keys, blocks: Any, start: int) -> tuple[Keys, Rows, int]:
        keys = key_chain.check(keys, self.id)
        count = buffers.count(keys, start)
        return keys, buffers.dense("blocks", blocks, count, self.block_bytes, exact=True), start

    def _paged(self, keys: Keys, paged: Any, block_ids: Sequence[int], start: int) -> tuple[Keys, Rows, int]:
        keys = key_chain.check(keys, self.id)
        count = buffers.count(keys, start)
        return keys, buffers.paged(paged, block_ids, count, self.block_bytes), start

    def reserve(self, keys: Keys, position: int = 0) -> Reservation:
        """Reserve slots for keys that are neither stored nor being stored. The caller writes and commits the blocks.

        keys: (n, 16), consecutive keys of a chain; only the first KEYS_PER_CALL are considered. position: index of
        keys[0] in its chain. Raises ValueError for keys of another cache.
        """
        return Reservation(self.session, key_chain.check(keys, self.id)[:KEYS_PER_CALL], position=position)

    # ------------------------------------------------------------------ keep

    def pin(self, keys: Keys) -> int:
        """Keep blocks, in memory or in an external tier, until `unpin`, `clear` or a restart of the directory.

        Pinned blocks use at most half of the nodes' memory; blocks in an external tier or on a GPU do not count.
        Returns the number of pinned keys. Keys that are not stored, or that exceed this half, are not pinned.
        Raises ValueError for keys of another cache.
        """
        return self.session.directory.pin(key_chain.check(keys, self.id).tobytes())

    def unpin(self, keys: Keys) -> None:
        """Unpin blocks, so that they may be evicted again. Keys without a pin are ignored.

        Raises ValueError for keys of another cache.
        """
        self.session.directory.unpin(key_chain.check(keys, self.id).tobytes())

    def touch(self, keys: Keys, *, until: float | None = None) -> int:
        """Mark these blocks as used, as a look-up does. With `until`, also keep them in memory for longer.

        until: a time of `time.time()`, at most a day away; a past time keeps nothing. Until this time, give or take two
        seconds, the pool keeps these blocks, and evicts the oldest other block of the same tenant, block size and node
        instead. All tenants without a quota count as one tenant. This is only a hint: of a tenant's blocks of one size
        on one node, the pool keeps at most half. A hint never makes the pool refuse a store. To save a block that the
        external tier lacks, the pool evicts a kept block that the tier has. A later `touch` or `done`, a restart of the
        directory, or a use by another tenant ends the hint. Copies on a GPU, and later copies on other nodes, are not
        kept.
        Returns the number of keys that are in the pool. Blocks of another tenant do not count, and do not change.
        Raises ValueError for keys of another cache, and for an `until` that is not a time.
        """
        now = time.time()
        if until is not None and not LONG_AGO < until < math.inf:
            raise ValueError(f"until={until!r:.80}: give a time like time.time() + 60, not a number of seconds")
        seconds = 0.0 if until is None else max(0.0, until - now)
        return self.session.directory.touch(key_chain.check(keys, self.id), seconds)

    def done(self, keys: Keys, *, again: bool = False) -> int:
        """Make the pool evict these blocks before all blocks in use. A look-up marks blocks as in use again.

        again: whether the blocks will be needed again, but later than other blocks: for example, an agent waits for a
        person. Blocks of calls without `again` are evicted first. Blocks of calls with `again` follow, the latest call
        first: a person who has been away longer is expected back sooner. However, calls older than a minute come before
        newer calls, since after a minute a person may not return at all. With an external tier, blocks of the earliest
        call with `again` follow first, and a block that the tier lacks may still count as in use.
        Leave out the prefix that other prompts share: `cache.done(keys[n:])`. Blocks that somebody reads or writes,
        blocks of another tenant, and copies on a GPU do not change. Of each call, the last key's block is evicted
        first. Returns the number of copies that will be evicted earlier. Raises ValueError for keys of another cache.
        """
        return self.session.directory.done(key_chain.check(keys, self.id), again)

    def swap_out(self, paged: Any, block_ids: Sequence[int], request_id: str) -> Future[int]:
        """Store the blocks of a preempted request in the background, and keep them until `swap_in` or `swap_drop`.

        paged, block_ids: where the blocks are, as in `store_from`. This memory must not change until the future is
        done. The pool loses none of the blocks while this process lives. If memory is short, the pool demotes
        them to the external tier. Earlier blocks of the same request id are dropped.
        Returns a future of len(block_ids), or of 0 if the pool has no room for all blocks. Raises ValueError for
        arguments that do not fit.
        """
        return self._swaps.out(paged, block_ids, request_id)

    def swap_in(self, paged: Any, block_ids: Sequence[int], request_id: str) -> Future[int]:
        """Read a preempted request's blocks back in the background, and remove them from the pool.

        paged, block_ids: destination of the blocks, as in `Match.read_into`. Returns a future of the number of valid
        leading blocks, or of 0 if the request was not swapped out. Raises ValueError for arguments that do not fit.
        """
        return self._swaps.back(paged, block_ids, request_id)

    def swap_drop(self, request_id: str) -> None:
        """Remove the blocks of a preempted request that will not be resumed. Unknown ids are ignored."""
        self._swaps.drop(request_id)


def _arrived(session: Session, cache: CacheId, root: bytes, tokens_per_s: float, fingerprint: bytes) -> KVCache:
    """Unpickle a cache. fingerprint: fingerprint of the secret from which the cache's keys are derived."""
    session.check_root(fingerprint)
    return KVCache(session, cache, root, tokens_per_s)
