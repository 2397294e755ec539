"""A cache: an engine reads and writes one key space of a pool through it."""

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


class KVCache:
    """Blocks of one model and layout. Get one from `KVPool.cache`; equal arguments give equal caches. Thread-safe.

    id: identity of the cache, which its Keys carry. root: start of all its keys; it depends on the pool's secret.
    session: this process's part in the pool. recompute_tokens_per_s: how fast the engine computes; callers may set it.

    Every method that takes `keys` takes (n, 16) uint8 Keys of this cache. It raises ValueError for plain arrays and for
    Keys of another cache, even if that cache has blocks of the same size.
    Methods that start with `a` are for event loops: they do the same without blocking the loop. A cancelled method
    finishes before it raises the cancellation, since it uses the caller's memory.
    A pickled cache attaches to its pool when it is unpickled.
    """

    def __init__(self, session: Session, cache: CacheId, root: bytes, recompute_tokens_per_s: float) -> None:
        """For `KVPool.cache`. root: 32 bytes, from `raykv.keys.root`."""
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
        If the cache was given no tenant, the salt also names the tenant to charge for the blocks.
        extra: further input of a block's KV, such as the hash of an image: {block: str or bytes}, or one value (or
        None) for each block. It changes the keys from that block on.
        Raises ValueError for other arguments.
        """
        rows = key_chain.chain(self.root, token_ids, self.block_tokens, lora=lora, extra=extra, salt=salt)
        return Keys(rows, self.id_for(salt))

    def id_for(self, salt: str | bytes | None) -> CacheId:
        """The id of this cache for a prompt with that salt. The salt names the tenant if the cache was given none."""
        return self.id.for_salt(salt, self.session.secret)

    def rekey(self, hashes: Any) -> Keys:
        """An engine's own block hashes as keys of this cache: (len(hashes), 16) uint8.

        hashes: list of bytes, or (n, k) uint8; each must stand for its block and for all blocks before it.
        Raises ValueError for other arguments.
        """
        return Keys(key_chain.rekey(self.root, hashes), self.id)

    # ------------------------------------------------------------------ read

    def match(self, keys: Keys, *, prefetch: bool = False) -> Match:
        """Lease the longest run of leading keys that is ready in the pool. Empty if the pool is down.

        The pool begins to fetch blocks of an external tier. Reads wait for these blocks no longer than the engine would
        take to compute their tokens. prefetch: also fetch blocks of other nodes now, for a prompt that waits in a
        queue; not blocks that another reader fetches just now. Raises ValueError for keys of another cache.
        """
        return self._match(keys, prefetch, counted=True)

    def _match(self, keys: Keys, prefetch: bool, counted: bool) -> Match:
        keys = key_chain.check(keys, self.id)
        return Match(self.session, keys, self.recompute_tokens_per_s, prefetch, counted=counted).ask()

    def amatch(self, keys: Keys, *, prefetch: bool = False) -> AsyncMatch:
        """As `match`, for event loops: `async with cache.amatch(keys) as match`."""
        return AsyncMatch(self.session, key_chain.check(keys, self.id), self.recompute_tokens_per_s, prefetch)

    def prefetch(self, keys: Keys) -> Future[int]:
        """Bring a prompt's blocks from an external tier into memory, in the background. They may be evicted again.

        Returns a future of how many leading blocks were in memory then. Raises ValueError for keys of another cache.
        """
        return self.session.background(self._promote, key_chain.check(keys, self.id))

    def _promote(self, keys: Keys) -> int:
        with self._match(keys, prefetch=True, counted=False) as match:
            return match.fetch(whole=True)

    # ------------------------------------------------------------------ store

    def store(self, keys: Keys, blocks: Any, start: int = 0, *, wait: bool = False) -> int:
        """Offer blocks to the cluster. Returns how many of them are newly stored.

        keys: (n, 16), of the whole prefix. blocks: (n - start, block_bytes) uint8, contiguous, numpy or torch, the
        blocks of keys[start:]. The call leaves out blocks that the pool has, blocks that another client is writing, and
        blocks that find no room. wait: return only after the directory has answered that it offers the blocks. Without
        `wait`, this process finds the written blocks at once, and other processes may miss them for a moment.
        Raises ValueError for keys of another cache, and for blocks of another shape or dtype.
        """
        return store_rows(self.session, *self._dense(keys, blocks, start), wait).new

    def store_from(
        self, keys: Keys, paged: Any, block_ids: Sequence[int], start: int = 0, *, wait: bool = False
    ) -> int:
        """As `store`, out of paged memory: the block of keys[start + i] is row block_ids[i] of every array of `paged`.

        paged: a (pages, bytes) uint8 array, or several (say, one for each layer) whose row bytes add up to block_bytes.
        block_ids: (n - start,) int. Raises ValueError if `paged` or `block_ids` does not fit.
        """
        return store_rows(self.session, *self._paged(keys, paged, block_ids, start), wait).new

    async def astore(self, keys: Keys, blocks: Any, start: int = 0, *, wait: bool = False) -> int:
        """As `store`, without blocking the event loop. A cancelled call finishes its copy before it raises."""
        # Checked here: only the calling thread's CUDA stream says which GPU work must finish first.
        rows = self._dense(keys, blocks, start)
        return (await self.session.in_thread(store_rows, self.session, *rows, wait)).new

    async def astore_from(
        self, keys: Keys, paged: Any, block_ids: Sequence[int], start: int = 0, *, wait: bool = False
    ) -> int:
        """As `store_from`, without blocking the event loop. A cancelled call finishes its copy before it raises."""
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
        """Slots for the `keys` that nobody has stored or is storing. The caller writes and commits the blocks.

        keys: (n, 16), a run of a chain's blocks; only the first KEYS_PER_CALL are considered. position: of keys[0] in
        its chain. Raises ValueError for keys of another cache.
        """
        return Reservation(self.session, key_chain.check(keys, self.id)[:KEYS_PER_CALL], position=position)

    # ------------------------------------------------------------------ keep

    def pin(self, keys: Keys) -> int:
        """Keep blocks, in memory or in an external tier, until `unpin`, `clear` or a restart of the directory.

        Pins have at most half of the nodes' memory; blocks in an external tier or on a GPU take none of that half.
        Returns how many keys are pinned. Keys that are not stored, or beyond that half, can't be pinned.
        Raises ValueError for keys of another cache.
        """
        return self.session.directory.pin(key_chain.check(keys, self.id).tobytes())

    def unpin(self, keys: Keys) -> None:
        """End pins: the blocks may be evicted again. Keys without a pin are ignored.

        Raises ValueError for keys of another cache.
        """
        self.session.directory.unpin(key_chain.check(keys, self.id).tobytes())

    def touch(self, keys: Keys, *, until: float | None = None) -> int:
        """Use these blocks as a look-up does. With `until`, the pool also keeps them in memory longer than plain LRU.

        until: a time of `time.time()`. Until then, to within two seconds, the pool evicts the oldest other block of the
        same node and tenant in the place of such a block. This is a hint: of the blocks that would be evicted next, at
        most half are kept, and no store is refused for them. A restart of the directory forgets the hint. A later
        `touch` or `done` for a block takes its place. Copies on a GPU are not kept.
        Returns how many of the keys are in the pool; blocks of another tenant do not count, and stay as they are.
        Raises ValueError for keys of another cache, and a time that is over.
        """
        seconds = 0.0 if until is None else until - time.time()
        if until is not None and not 0 < seconds < math.inf:
            raise ValueError(f"until={until!r}: give a time that is not over, as time.time() + 60")
        return self.session.directory.touch(key_chain.check(keys, self.id), seconds)

    def done(self, keys: Keys, *, again: bool = False) -> int:
        """Have the pool evict these blocks before all blocks in use. A look-up puts them back in use.

        again: somebody will ask for the blocks, but later than for other blocks: say, an agent waits for a person.
        Blocks of calls without `again` are evicted before blocks of calls with `again`. Among the latter, blocks of the
        last call go first: the longer a person is away, the sooner the person returns. But after a minute a person may
        not return at all: then the blocks of that call go first. In a pool with an external tier, blocks of the first
        call go first, and a block that the tier lacks may stay in use.
        Leave out the beginning that other prompts share: `cache.done(keys[n:])`. Blocks that somebody reads or writes,
        blocks of another tenant, and copies on a GPU stay as they are. The block of the last key is evicted first.
        Returns how many copies are evicted earlier now. Raises ValueError for keys of another cache.
        """
        return self.session.directory.done(key_chain.check(keys, self.id), again)

    def swap_out(self, paged: Any, block_ids: Sequence[int], request_id: str) -> Future[int]:
        """Keep the blocks of a preempted request, in the background, until `swap_in` or `swap_drop`.

        paged, block_ids: where the blocks are, see `store_from`. That memory must stay as it is until the future is
        done. The pool loses none of the blocks while this process lives. If memory is short, it demotes them to the
        external tier. Earlier blocks of the same request id are dropped.
        Returns a future of len(block_ids), or of 0 if the pool has no room for all. Raises ValueError for arguments
        that do not fit.
        """
        return self._swaps.out(paged, block_ids, request_id)

    def swap_in(self, paged: Any, block_ids: Sequence[int], request_id: str) -> Future[int]:
        """Bring a preempted request's blocks back, in the background, and forget them.

        paged, block_ids: where the blocks go, see `Match.read_into`. Returns a future of how many leading blocks are
        valid; 0 if the request was not swapped out. Raises ValueError for arguments that do not fit.
        """
        return self._swaps.back(paged, block_ids, request_id)

    def swap_drop(self, request_id: str) -> None:
        """Forget the blocks of a preempted request that will not come back. Unknown ids are ignored."""
        self._swaps.drop(request_id)


def _arrived(session: Session, cache: CacheId, root: bytes, tokens_per_s: float, fingerprint: bytes) -> KVCache:
    """Unpickle a cache. fingerprint: of the secret that its keys are derived from."""
    session.check_root(fingerprint)
    return KVCache(session, cache, root, tokens_per_s)
