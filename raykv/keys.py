"""Makes chained block keys from token ids: equal keys mean equal prefixes. `Keys` is an array that records its cache.

A key is the first 16 bytes of a SHA-256 over (parent digest, tokens as little-endian int32, extra of that block). The
first parent digest covers the cache's root, the block size, the adapter and the salt. The root covers the secret.
"""

import hashlib
import hmac
import marshal
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.protocol.location import KEY_BYTES
from raykv.system.sha256 import digests

ROOT_BYTES = 32
_INT32 = np.iinfo(np.int32)
_HEAD, _MARSHALLED = 5, np.dtype([("code", "S1"), ("value", "<i4")])  # marshal's output: a header, then the items


class CacheId(NamedTuple):
    """The identity of a cache. It does not reveal the root that keys are computed from.

    The tenant is not part of the identity: a cache may have prompts of several tenants, each with its own salt.
    """

    model: str
    block_tokens: int
    block_bytes: int
    digest: bytes  # digest of the cache's root, which depends on everything that distinguishes caches
    tenant: str = ""  # the tenant that is charged for blocks, also a label of metrics: see `for_salt`
    is_named: bool = False  # whether the caller named the tenant; if not, the tenant is derived from a salt

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheId) and self.digest == other.digest and self[:3] == other[:3]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.digest)

    def for_salt(self, salt: str | bytes | None, secret: bytes) -> "CacheId":
        """Return the id of the same cache for a prompt with this salt.

        If the caller named no tenant, the id gets the salt's tenant (`tenant_of`).
        """
        return self._replace(tenant=tenant_of(salt, secret)) if salt and not self.is_named else self

    def __str__(self) -> str:
        return (
            f"(model={self.model!r}, block_tokens={self.block_tokens}, block_bytes={self.block_bytes}, "
            f"id {self.digest.hex()[:8]})"
        )


class Keys(np.ndarray[Any, np.dtype[np.uint8]]):  # not NDArray: from numpy 2.5 on, an alias can't be a base class
    """Keys of one cache: (n, 16) uint8, one row per block. Get them from `KVCache.keys` or `KVCache.rekey`.

    The array carries its cache's identity. Slices, rows chosen by an index, copies and pickled arrays keep the
    identity, and so does `np.concatenate` of keys of one cache. A column, a single key or the result of arithmetic has
    no identity. A cache refuses keys of another cache, and arrays without an identity.
    """

    _cache: CacheId | None

    def __new__(cls, rows: NDArray[np.uint8], cache: CacheId) -> "Keys":
        """Make Keys from `rows`: (n, 16) uint8, not copied if contiguous.

        For use inside raykv only: nothing checks that the rows are keys of `cache`.
        """
        keys = np.ascontiguousarray(rows).view(cls)
        if not keys._are_rows():
            raise ValueError(f"keys: {rows.dtype} of shape {rows.shape}, not uint8 of (n, {KEY_BYTES})")
        keys._cache = cache
        return keys

    def __array_finalize__(self, parent: object) -> None:
        self._cache = getattr(parent, "_cache", None) if self._are_rows() else None

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else np.asarray(array)  # the result of arithmetic with keys is not a key

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        made = super().__array_function__(function, types, args, kwargs)
        if function is not np.concatenate:
            return made.view(np.ndarray) if isinstance(made, Keys) else made
        caches = {_cache_of(part) for part in args[0]}
        if len(caches - {None}) > 1:
            raise ValueError(f"keys of several caches can't be joined: {', '.join(map(str, caches - {None}))}")
        plain: NDArray[np.uint8] = np.asarray(made)
        cache = caches.pop() if len(caches) == 1 and made.shape[1:] == (KEY_BYTES,) else None
        return Keys(plain, cache) if cache else plain

    def __getitem__(self, which: Any) -> Any:
        """Return a part of the array. Whole rows are Keys of the same cache; columns and single keys have no cache."""
        found = super().__getitem__(which)
        columns = isinstance(which, tuple) and len(which) > 1
        return found.view(np.ndarray) if columns and isinstance(found, Keys) else found

    def __setitem__(self, which: Any, rows: Any) -> None:
        """Raise ValueError for keys of another cache."""
        other = _cache_of(rows)
        if other is not None and other != _cache_of(self):
            raise ValueError(f"keys of the cache {other} can't be put among those of {_cache_of(self)}")
        super().__setitem__(which, rows)

    def __reduce__(self) -> tuple[Any, ...]:
        cache = _cache_of(self)
        return (Keys, (np.asarray(self), cache)) if cache else (np.array, (np.asarray(self),))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()  # numpy's own method would drop the cache

    @property
    def cache(self) -> CacheId:
        """Identity of the cache that these keys belong to. ValueError if there is none."""
        if self._cache is None or not self._are_rows():
            raise ValueError(f"{self.dtype} of shape {self.shape}, taken from Keys, is not rows of keys any more")
        return self._cache

    def _are_rows(self) -> bool:
        return self.ndim == 2 and self.shape[1] == KEY_BYTES and self.dtype == np.uint8


def _cache_of(array: object) -> CacheId | None:
    """Return the cache of Keys; None for other arrays, and for a view whose rows are no longer 16 bytes of uint8."""
    return array._cache if isinstance(array, Keys) and array._are_rows() else None


@lru_cache(1024)
def tenant_of(salt: str | bytes | None, secret: bytes) -> str:
    """Return the default tenant name for a salt, or "" without a salt.

    The name is 8 hex digits of the salt's HMAC-SHA256 under the pool's secret. With a plain hash, a reader of metrics
    could find the salt by hashing likely salts.
    """
    return hmac.digest(secret, b"tenant" + _bytes("salt", salt), "sha256").hex()[:8] if salt else ""


def digest(root: bytes) -> bytes:
    """Return a 16-byte hash of a cache's root. Neither the root nor any key can be computed from the hash."""
    return hashlib.sha256(b"cache" + root).digest()[:KEY_BYTES]


def check(keys: object, cache: CacheId) -> Keys:
    """Return the keys as a contiguous array. ValueError for anything but Keys of this cache."""
    if not isinstance(keys, Keys) or (own := _cache_of(keys)) is None:
        what = f"{keys.dtype} of shape {keys.shape}" if isinstance(keys, np.ndarray) else f"a {type(keys).__name__}"
        raise ValueError(
            f"keys: {what}, which does not say what cache it belongs to: give the (n, {KEY_BYTES}) uint8 Keys of "
            f"cache.keys(token_ids), or of cache.rekey(hashes) for an engine's own block hashes, of this cache: {cache}"
        )
    if own is not cache and own != cache:
        raise ValueError(
            f"keys of the cache {own} were given to the cache {cache}: make them with the cache that they are "
            f"used with (where these look alike, revision, dtype, layout, parallel, part, salt or the pool differ)"
        )
    return keys if keys.flags.c_contiguous else keys.copy()


def root(secret: bytes, **fields: str | int) -> bytes:
    """Return a cache's root, from which all its keys are computed: 32 bytes.

    The root is the HMAC-SHA256 of the cache's fields under the pool's secret. ValueError for an empty secret or a field
    that is neither str nor int.
    """
    if not secret:
        raise ValueError("secret is empty: keys that anyone can compute protect nothing")
    encoded = {}
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise ValueError(f"{name}={value!r}: what identifies a cache is a str or an int")
        encoded[name] = b"s" + value.encode() if isinstance(value, str) else b"i%d" % value
    return hmac.digest(secret, _canonical(encoded), "sha256")


def chain(
    root: bytes,
    token_ids: Any,
    block_tokens: int,
    *,
    lora: str | bytes | None = None,
    extra: Mapping[int, str | bytes] | Sequence[str | bytes | None] | None = None,
    salt: str | bytes | None = None,
) -> NDArray[np.uint8]:
    """Compute the keys of a prompt's full blocks: (len(token_ids) // block_tokens, 16) uint8.

    token_ids: list or tuple of int, or 1-D integer array or tensor (numpy, torch, ...); values from 0 to 2**31 - 1.
    lora, salt: the adapter's id and the salt; both change every key. A str means its UTF-8 bytes. None and an
    empty value give different keys.
    extra: further input of blocks' KV, such as an image's hash: {block: value}, or a list with a value or None for each
        block. A value changes the keys of its block and of all later blocks. The partial last block may have a value.
    ValueError for other values.
    """
    if isinstance(block_tokens, bool) or not isinstance(block_tokens, int) or block_tokens < 1:
        raise ValueError(f"block_tokens={block_tokens!r}: must be an int of at least 1")
    tokens = _int32(token_ids)
    if len(tokens) and tokens.min() < 0:
        raise ValueError(
            f"token id {tokens.min()} is negative: cut padding and placeholders off, which no model computes"
        )
    extras = _extras(extra, -(-len(tokens) // block_tokens))
    named = {"block_tokens": b"%d" % block_tokens}
    named |= {name: _bytes(name, value) for name, value in (("lora", lora), ("salt", salt)) if value is not None}
    return _keys(_start(root, b"tokens", named), *_blocks(tokens, block_tokens, extras), chained=True)


def rekey(root: bytes, hashes: Sequence[bytes] | NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Turn an engine's own block hashes into keys of the cache with this root: (len(hashes), 16) uint8.

    hashes: bytes objects, or (n, k) uint8, chained by the engine already. ValueError for other values, or an empty
    hash.
    """
    if isinstance(hashes, np.ndarray):
        if hashes.ndim != 2 or hashes.dtype != np.uint8:
            raise ValueError(f"hashes are {hashes.dtype}{list(hashes.shape)}: give (n, k) uint8 or a list of bytes")
        hashes = [row.tobytes() for row in hashes]
    if not (all(issubclass(kind, bytes) for kind in set(map(type, hashes))) and all(hashes)):
        wrong = next(value for value in hashes if not isinstance(value, bytes) or not value)
        raise ValueError(f"block hash {wrong!r}: must be bytes, and not empty")
    return _keys(_start(root, b"hashes", {}), *_joined(hashes), chained=False)


def _canonical(fields: Mapping[str, bytes]) -> bytes:
    """Encode fields unambiguously: sorted by name, with the length before each name and value."""
    return b"".join(_prefixed(part) for name in sorted(fields) for part in (name.encode(), fields[name]))


def _prefixed(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value


def _start(root: bytes, domain: bytes, fields: Mapping[str, bytes]) -> bytes:
    if len(root) != ROOT_BYTES:
        raise ValueError(f"root has {len(root)} bytes: must be the {ROOT_BYTES} of raykv.keys.root")
    return hashlib.sha256(root + _prefixed(domain) + _canonical(fields)).digest()


def _keys(parent: bytes, data: NDArray[np.uint8], ends: NDArray[np.int64], chained: bool) -> NDArray[np.uint8]:
    """Like `digests`, with each digest cut to the length of a key."""
    return digests(parent, data, ends, chained)[:, :KEY_BYTES].copy()


def _blocks(
    tokens: NDArray[np.int32], block_tokens: int, extras: Mapping[int, bytes]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the tokens and extras of all full blocks, one block after the other, and the end of each block."""
    size, data = 4 * block_tokens, tokens.view(np.uint8)
    ends = np.arange(size, len(data) + 1, size)
    if not extras:
        return data, ends
    return _joined([data[end - size : end].tobytes() + extras.get(i, b"") for i, end in enumerate(ends.tolist())])


def _joined(parts: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    return np.frombuffer(b"".join(parts), np.uint8), np.cumsum(lengths)


def _bytes(name: str, value: object) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise ValueError(f"{name}={value!r}: must be str or bytes")


def _extras(extra: Mapping[int, str | bytes] | Sequence[str | bytes | None] | None, blocks: int) -> Mapping[int, bytes]:
    """Return the bytes to append to each block's tokens. blocks: number of blocks, including a partial last block."""
    if extra is None:
        return {}
    if isinstance(extra, (str, bytes)):
        raise ValueError(f"extra={extra!r}: give {{block: value}}, or one value (or None) a block")
    if not isinstance(extra, Mapping):
        if not blocks - 1 <= len(extra) <= blocks:
            raise ValueError(f"extra has {len(extra)} values for {blocks} blocks: give one (or None) a block")
        extra = {block: value for block, value in enumerate(extra) if value is not None}
    for block in extra:
        if not 0 <= block < blocks:
            raise ValueError(f"extra names block {block}: the prompt has {blocks}, counted from 0")
    return {block: _prefixed(_bytes(f"extra[{block}]", value)) for block, value in extra.items()}


def _int32(token_ids: Any) -> NDArray[np.int32]:
    """Check token ids and convert them to little-endian int32, without a Python loop over the tokens."""
    if isinstance(token_ids, (list, tuple)):
        return _from_ints(token_ids)
    cpu = getattr(token_ids, "cpu", None)  # a torch tensor may be on a device
    try:
        tokens = np.asarray(token_ids if cpu is None else cpu())
    except (TypeError, ValueError) as error:
        raise ValueError(f"token ids of type {type(token_ids).__name__} are no integer array: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"token ids are {tokens.dtype}{list(tokens.shape)}: must be integers in one dimension")
    if len(tokens):
        for value in (int(tokens.min()), int(tokens.max())):
            if not _INT32.min <= value <= _INT32.max:
                raise ValueError(f"token id {value} does not fit int32")
    return tokens.astype("<i4", order="C", copy=False)


def _from_ints(token_ids: list[Any] | tuple[Any, ...]) -> NDArray[np.int32]:
    plain = _from_plain_ints(token_ids)
    if plain is not None:
        return plain
    for kind in set(map(type, token_ids)):
        if not issubclass(kind, (int, np.integer)) or issubclass(kind, bool):
            raise ValueError(f"token ids hold a {kind.__name__}: must be integers")
    try:
        return np.frombuffer(struct.pack(f"<{len(token_ids)}i", *token_ids), "<i4")
    except struct.error as error:
        raise ValueError(f"token id {max(token_ids, key=abs)} does not fit int32") from error


def _from_plain_ints(token_ids: list[Any] | tuple[Any, ...]) -> NDArray[np.int32] | None:
    """Convert the ids to int32. Returns None unless all ids are plain Python ints that fit into int32.

    marshal checks types and converts in one pass; with a check and `struct.pack`, `chain` would take 1.8 times as long.
    Only an int that fits is written as "i" and four bytes. So if each item begins with "i", all items are such ints.
    """
    try:
        written = marshal.dumps(token_ids, 2)
    except ValueError:  # a type that marshal does not know
        return None
    if len(written) != _HEAD + _MARSHALLED.itemsize * len(token_ids):
        return None
    if written[_HEAD :: _MARSHALLED.itemsize].count(b"i") != len(token_ids):
        return None
    return np.frombuffer(written, _MARSHALLED, offset=_HEAD)["value"].copy()
