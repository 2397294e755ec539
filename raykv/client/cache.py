"""One key space of a pool, as an engine reads and writes it."""

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


class KVCache:
    """Blocks of one model and layout. Get one from `KVPool.cache`; equal arguments give equal caches. Thread-safe.

    id: what it and its Keys are known by. root: what its keys start from; it depends on the pool's secret.
    session: this process's part in the pool. recompute_tokens_per_s: how fast the engine computes; it may be set.

    Every method that takes `keys` takes (n, 16) uint8 Keys of this cache. It raises ValueError for Keys of another
    cache, even if that has blocks of the same size, and for plain arrays.
    Methods that start with `a` are for event loops: the same, without blocking the loop. Cancelled, they end before
    the cancellation is raised, since they use the caller's memory.
    A cache pickles; where it arrives it attaches to its pool.
    """

    def __init__(self, session: Session, cache: CacheId, root: bytes, recompute_tokens_per_s: float) -> None:
        """For `KVPool.cache`. root: 32 bytes, of `raykv.keys.root`."""
        self.id = cache
        self.root = root
        self.session = session
        self.recompute_tokens_per_s = recompute_tokens_per_s
        self._swaps = Swaps(session, cache, root)
        sha256.load()  # before anybody waits for keys

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.id.block_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.id.block_bytes

    def __repr__(self) -> str:
        return f"KVCache{self.id}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.session, self.id, self.root, self.recompute_tokens_per_s, self.session.fingerprint)

    # ------------------------------------------------------------------ keys

    def keys(self, token_ids: Any, *, lora: Any = None, extra: Any = None, salt: Any = None) -> Keys:
        """Keys of the full blocks of a prompt: (len(token_ids) // block_tokens, 16) uint8.

        token_ids: 1-D list, numpy array or torch tensor of ints that fit int32.
        lora: str or bytes, id of the adapter. salt: str or bytes, separates tenants. Both change every key.
        The salt is also who is charged for the blocks, where the cache was given no tenant.
        extra: what else a block's KV depends on, such as the hash of an image: {block: str or bytes}, or one value (or
        None) a block. It changes the keys from that block on.
        Raises ValueError for anything else.
        """
        rows = key_chain.chain(self.root, token_ids, self.block_tokens, lora=lora, extra=extra, salt=salt)
        return Keys(rows, self.id_for(salt))

    def id_for(self, salt: str | bytes | None) -> CacheId:
        """The id of this cache for a prompt with that salt, which names the tenant where none was given."""
        return self.id.for_salt(salt, self.session.secret)

    def rekey(self, hashes: Any) -> Keys:
        """An engine's own block hashes as keys of this cache: (len(hashes), 16) uint8.

        hashes: list of bytes, or (n, k) uint8; each must stand for its block and for all blocks before it.
        Raises ValueError for anything else.
        """
        return Keys(key_chain.rekey(self.root, hashes), self.id)

    # ------------------------------------------------------------------ read

    def match(self, keys: Keys, *, prefetch: bool = False) -> Match:
        """Lease the longest run of leading keys that is ready in the pool. A pool that is down has none.

        Blocks of an external tier are fetched from now on, and reads wait for them no longer than it would take to
        compute their tokens. prefetch: fetch those of other nodes too, for a prompt that waits in a queue.
        Raises ValueError for keys that are not of this cache.
        """
        return self._match(keys, prefetch, counted=True)

    def _match(self, keys: Keys, prefetch: bool, counted: bool) -> Match:
        keys = key_chain.check(keys, self.id)
        return Match(self.session, keys, self.recompute_tokens_per_s, prefetch, counted=counted).ask()

    def amatch(self, keys: Keys, *, prefetch: bool = False) -> AsyncMatch:
        """As `match`, for event loops: `async with cache.amatch(keys) as match`."""
        return AsyncMatch(self.session, key_chain.check(keys, self.id), self.recompute_tokens_per_s, prefetch)

    def prefetch(self, keys: Keys) -> Future[int]:
        """Bring what an external tier has of a prompt into memory, in the background, without holding it there.

        Returns a future of how many leading blocks were in memory then. Raises ValueError for keys that are not of this
        cache.
        """
        return self.session.background(self._promote, key_chain.check(keys, self.id))

    def _promote(self, keys: Keys) -> int:
        with self._match(keys, prefetch=True, counted=False) as match:
            return match.fetch(whole=True)

    # ------------------------------------------------------------------ store

    def store(self, keys: Keys, blocks: Any, start: int = 0, *, wait: bool = False) -> int:
        """Offer blocks to the cluster. Returns how many of them are newly stored.

        keys: (n, 16), of the whole prefix. blocks: (n - start, block_bytes) uint8, contiguous, numpy or torch, the
        blocks of keys[start:]. Those that the pool has, that somebody else is writing, or that find no room are left
        out. wait: until the directory has answered that it offers them; without it they are written, and the directory
        is about to offer them: this process finds them at once, others may miss them for a moment.
        Raises ValueError for keys that are not of this cache, and for blocks of another shape or dtype.
        """
        return store_rows(self.session, *self._dense(keys, blocks, start), wait).new

    def store_from(
        self, keys: Keys, paged: Any, block_ids: Sequence[int], start: int = 0, *, wait: bool = False
    ) -> int:
        """As `store`, out of paged memory: the block of keys[start + i] is row block_ids[i] of every array of `paged`.

        paged: one (pages, bytes) uint8 array, or several whose row bytes add up to block_bytes (one a layer, say).
        block_ids: (n - start,) int. Raises ValueError where they do not fit.
        """
        return store_rows(self.session, *self._paged(keys, paged, block_ids, start), wait).new

    async def astore(self, keys: Keys, blocks: Any, start: int = 0, *, wait: bool = False) -> int:
        """As `store`, without blocking the event loop. Cancelled, the copy ends before the cancellation is raised."""
        # Checked here: what a GPU must finish first is known by the stream of the thread that calls.
        rows = self._dense(keys, blocks, start)
        return (await self.session.in_thread(store_rows, self.session, *rows, wait)).new

    async def astore_from(
        self, keys: Keys, paged: Any, block_ids: Sequence[int], start: int = 0, *, wait: bool = False
    ) -> int:
        """As `store_from`, without blocking the event loop. Cancelled, the copy ends before that is raised."""
        rows = self._paged(keys, paged, block_ids, start)
        return (await self.session.in_thread(store_rows, self.session, *rows, wait)).new

    def _dense(self, keys: Keys, blocks: Any, start: int) -> tuple[Keys, Rows, int]:
        keys = key_chain.check(keys, self.id)
        count = buffers.count(keys, start)
        return keys, buffers.dense("blocks", blocks, count, self.block_bytes, exact=True), start

    def _paged(self, keys: Keys, paged: Any, block_ids: Sequence[int], start: int) -> tuple[Keys, Rows, int]:
        keys = key_chain.check(keys, self.id)
        count = buffers.count(keys, start)
        return keys, buffers.paged(paged, block_ids, count, self.block_bytes), start

    def reserve(self, keys: Keys, position: int = 0) -> Reservation:
        """Slots for those of `keys` that nobody has stored or is storing, to be written and committed by the caller.

        keys: (n, 16), a run of a chain's blocks; only the first KEYS_PER_CALL are considered. position: of keys[0] in
        its chain. Raises ValueError for keys that are not of this cache.
        """
        return Reservation(self.session, key_chain.check(keys, self.id)[:KEYS_PER_CALL], position=position)

    # ------------------------------------------------------------------ keep

    def pin(self, keys: Keys, ttl: float | None = None, priority: int | None = None) -> int:
        """Have blocks stay, in memory or in an external tier, until `unpin`, `clear` or a restart of the directory.

        ttl: seconds from now after which they may be evicted again, give or take half of one; None: they stay.
        priority: an int, of pins that may be given up: where the node of the blocks has nothing else to evict for a
        writer, those with the lowest priority go, the oldest pin first. None: never. The last call for a key counts.
        Those have at most half of the nodes' memory; blocks in an external tier or on a GPU take none of it.
        Returns how many of the keys are pinned so now: those that are not stored, or beyond that half, can't be.
        Raises ValueError for keys that are not of this cache, a ttl that is not above 0, and a priority that is no int.
        """
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl={ttl!r}: give seconds above 0, or None for a pin without an end")
        if not isinstance(priority, int | None):
            raise ValueError(f"priority={priority!r}: give an int, or None for a pin that is never given up")
        return self.session.directory.pin(key_chain.check(keys, self.id).tobytes(), ttl, priority)

    def unpin(self, keys: Keys) -> None:
        """End what `pin` began: the blocks may be evicted again. Keys that are not pinned are left out.

        Raises ValueError for keys that are not of this cache.
        """
        self.session.directory.unpin(key_chain.check(keys, self.id).tobytes())

    def swap_out(self, paged: Any, block_ids: Sequence[int], request_id: str) -> Future[int]:
        """Keep the blocks of a preempted request, in the background, until `swap_in` or `swap_drop`.

        paged, block_ids: where they are, see `store_from`; that memory must stay as it is until the future is done.
        None of them is lost meanwhile unless this process dies: where memory is short they are demoted to the external
        tier. What the request id had before is dropped.
        Returns a future of len(block_ids), or of 0 where the pool has no room for all. Raises ValueError for arguments
        that do not fit.
        """
        return self._swaps.out(paged, block_ids, request_id)

    def swap_in(self, paged: Any, block_ids: Sequence[int], request_id: str) -> Future[int]:
        """Bring a preempted request's blocks back, in the background, and forget them.

        paged, block_ids: where they go, see `Match.read_into`. Returns a future of how many leading blocks are valid; 0
        for a request that was not swapped out. Raises ValueError for arguments that do not fit.
        """
        return self._swaps.back(paged, block_ids, request_id)

    def swap_drop(self, request_id: str) -> None:
        """Forget the blocks of a preempted request that will not come back. Unknown ids are left out."""
        self._swaps.drop(request_id)


def _arrived(session: Session, cache: CacheId, root: bytes, tokens_per_s: float, fingerprint: bytes) -> KVCache:
    """A cache where it was pickled to. fingerprint: of the secret that its keys are derived from."""
    session.check_root(fingerprint)
    return KVCache(session, cache, root, tokens_per_s)
