"""Measures reuse distances on a sample of the keys: the bytes of blocks that are used between two uses of a key.

SHARDS: Waldspurger, Park, Garthwaite, Ahmad, "Efficient MRC Construction with SHARDS", FAST 2015. A key is in the
sample if its hash is below a limit, so the sample sees either all uses of a key or none. The distance of a use is the
size of all blocks used since the key's last use, including the key's own block. An LRU with that much memory would
still have the key.
"""

from typing import NamedTuple

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from raykv.directory.kernels.columns import BOOL, FLOAT, INT, KEYS
from raykv.directory.kernels.table import hash_of
from raykv.system.jit import kernel

KEY = np.dtype(
    [
        *(("k0", "<u8"), ("k1", "<u8"), ("bytes", "<i8")),
        ("last", "<i4"),  # the place of the key's last use
        ("free", "<i4"),  # entries from state[COUNT] on list the numbers that no key has; earlier entries mean nothing
    ]
)
# A use that is not counted yet. Counting many uses in a row is four times as fast, as the processor caches the sample
USE = np.dtype([("k0", "<u8"), ("k1", "<u8"), ("bytes", "<i8"), ("call", "<i4"), ("asked", "<i4")])
# Combines an entry of a hash table (`hashed`) and a place in the order of last uses (`used`, `sum`)
PLACE = np.dtype(
    [
        ("hashed", "<i4"),  # a key's number + 1; 0: no key
        ("used", "<i4"),  # number + 1 of the key that was last used at this place; 0: no key
        ("sum", "<i8"),  # node of a Fenwick tree of bytes
    ]
)
NEXT, COUNT, BYTES, SHIFT, USES, WAITING, CALL = range(7)  # indices in Sample.state
FINENESS = 16  # number of entries of `counts` for each doubling of the distance
LEAST_BITS, MOST_BITS = 12, 52  # log2 of the shortest and longest distances (bytes) that are distinguished
DISTANCES = (MOST_BITS - LEAST_BITS) * FINENESS
SHIFT_MAX = 20  # maximum number of upper bits of a hash that decide whether a key is sampled; the table uses lower bits
HASHES = np.uint64(0xFFFFFFFFFFFFFFFF)


class Sample(NamedTuple):
    """Some keys in the order of their last uses, and the distances between their uses."""

    keys: NDArray[np.void]  # (n,) KEY
    places: NDArray[np.void]  # (4 n,) PLACE
    counts: NDArray[np.float64]  # (DISTANCES + 1,) estimated uses by distance; the last entry is for unknown keys
    waiting: NDArray[np.void]  # (n,) USE: uses of one call, or of several calls with at most n / 4 keys in total
    # state[NEXT]: the next place. COUNT: number of keys in the sample. BYTES: bytes of these keys. SHIFT: one key
    # in 2**SHIFT is sampled. USES: counted uses. WAITING: uses not counted yet. CALL: number of the last `use`
    state: NDArray[np.int64]


def sample(keys: int) -> Sample:
    """Create an empty sample of at most `keys` keys, which must be a power of two."""
    counts, waiting = np.zeros(DISTANCES + 1), np.zeros(keys, USE)
    empty = Sample(np.zeros(keys, KEY), np.zeros(4 * keys, PLACE), counts, waiting, np.zeros(7, np.int64))
    empty.keys["free"], empty.state[NEXT] = np.arange(keys), 1
    return empty


SAMPLE = types.Tuple(tuple(numba.typeof(array) for array in sample(1)))


@kernel(SAMPLE, KEYS, INT, BOOL, FLOAT)
def use(sample, keys, size, asked, horizon):
    """Record a use of each key. `keys` may be at most as long as `waiting`. size: bytes of each key's block.

    asked: whether somebody looked for the keys. horizon: distance in bytes beyond which keys may leave the sample.
    """
    s = Sample(*sample)
    if s.state[WAITING] > 0 and s.state[WAITING] + len(keys) > len(s.waiting) // 4:
        _count(s, horizon)
    limit, waiting = HASHES >> np.uint64(s.state[SHIFT]), s.state[WAITING]
    s.state[CALL] = (s.state[CALL] + 1) & 0xFFFF
    for i in range(len(keys)):
        if hash_of(keys[i, 0], keys[i, 1]) <= limit:
            one = s.waiting[waiting]
            one.k0, one.k1, one.bytes, one.call, one.asked = keys[i, 0], keys[i, 1], size, s.state[CALL], asked
            waiting += 1
    s.state[WAITING] = waiting


@kernel(SAMPLE, FLOAT)
def count(sample, horizon):
    """Count the uses in `waiting`."""
    _count(Sample(*sample), horizon)


@kernel
def _count(s, horizon):
    """For each call, count the distances of all its keys, and only then record their uses, last to first."""
    begin = end = np.int64(0)
    while begin < s.state[WAITING]:
        while end < s.state[WAITING] and s.waiting[end].call == s.waiting[begin].call:
            _count_one(s, s.waiting[end])
            end += 1
        for i in range(end - begin):
            one = s.waiting[end - 1 - i]
            _use_one(s, one.k0, one.k1, one.bytes, horizon)
        begin = end
    s.state[WAITING] = 0


@kernel
def _count_one(s, one):
    hashed = hash_of(one.k0, one.k1)
    if one.asked and hashed <= HASHES >> np.uint64(s.state[SHIFT]):
        s.counts[_distance(s, _find(s, hashed, one.k0, one.k1))] += 1 << s.state[SHIFT]
        s.state[USES] += 1


@kernel
def _use_one(s, k0, k1, size, horizon):
    """Make a key the most recently used key."""
    if s.state[NEXT] == len(s.places):
        _rebuild(s, np.int64(0), HASHES)
    hashed = hash_of(k0, k1)
    number = _find(s, hashed, k0, k1)
    if number < 0:
        if s.state[COUNT] == len(s.keys):
            _thin(s, horizon)
        # `_thin` may exclude this key. It may make no room if somebody chose keys with small hashes
        if hashed <= HASHES >> np.uint64(s.state[SHIFT]) and s.state[COUNT] < len(s.keys):
            _place(s, _insert(s, hashed, k0, k1, size))
    elif s.keys[number].last + 1 != s.state[NEXT]:
        _remove(s, number)
        _place(s, number)


@kernel
def _find(s, hashed, k0, k1):
    """Return the number of a key, or -1."""
    mask = len(s.places) - 1
    at = np.int64(hashed >> np.uint64(SHIFT_MAX)) & mask
    while s.places[at].hashed > 0:
        number = np.int64(s.places[at].hashed) - 1
        if s.keys[number].k0 == k0 and s.keys[number].k1 == k1:
            return number
        at = (at + 1) & mask
    return np.int64(-1)


@kernel
def _insert(s, hashed, k0, k1, size):
    """Give a key a number."""
    number = np.int64(s.keys[s.state[COUNT]].free)
    s.state[COUNT] += 1
    s.keys[number].k0, s.keys[number].k1, s.keys[number].bytes = k0, k1, size
    _enter(s, hashed, number)
    return number


@kernel
def _enter(s, hashed, number):
    """Put a key into the hash table."""
    mask = len(s.places) - 1
    at = np.int64(hashed >> np.uint64(SHIFT_MAX)) & mask
    while s.places[at].hashed > 0:
        at = (at + 1) & mask
    s.places[at].hashed = number + 1


@kernel
def _place(s, number):
    """Give a key the next place."""
    at = s.state[NEXT]
    s.state[NEXT] += 1
    s.places[at].used, s.keys[number].last = number + 1, at
    _add(s, at, s.keys[number].bytes)


@kernel
def _remove(s, number):
    """Remove a key from its place."""
    at = np.int64(s.keys[number].last)
    s.places[at].used = 0
    _add(s, at, -s.keys[number].bytes)


@kernel
def _add(s, at, size):
    s.state[BYTES] += size
    while at < len(s.places):
        s.places[at].sum += size
        at += at & -at


@kernel
def _distance(s, number):
    """Return the index in `counts` for a new use of a key. number: number of the key; -1 for an unknown key."""
    if number < 0:
        return DISTANCES
    before, at = np.int64(0), np.int64(s.keys[number].last) - 1
    while at > 0:
        before += s.places[at].sum
        at -= at & -at
    bits = np.log2(float((s.state[BYTES] - before) << s.state[SHIFT]))
    return min(max(np.int64((bits - LEAST_BITS) * FINENESS), 0), DISTANCES - 1)


@kernel
def _thin(s, horizon):
    """Make room: drop the keys beyond the horizon. If these keys are few, drop half of all keys instead."""
    gone, at, left = np.int64(0), np.int64(1), s.state[BYTES]
    while at < s.state[NEXT] and float(left << s.state[SHIFT]) > horizon:
        if s.places[at].used > 0:
            left -= s.keys[s.places[at].used - 1].bytes
            gone += 1
        at += 1
    if gone >= len(s.keys) // 8:
        _rebuild(s, at, HASHES)
    else:
        _halve(s)


@kernel
def _halve(s):
    """Drop half of the keys, and sample half as many keys from now on."""
    if s.state[SHIFT] < SHIFT_MAX:
        s.state[SHIFT] += 1
        _rebuild(s, np.int64(0), HASHES >> np.uint64(s.state[SHIFT]))


@kernel
def _rebuild(s, first, limit):
    """Close the gaps between places. Drops keys at places before `first`, and keys whose hash is above `limit`."""
    end, s.state[NEXT], s.state[BYTES] = s.state[NEXT], 1, 0
    for at in range(len(s.places)):
        s.places[at].hashed, s.places[at].sum = 0, 0
    for at in range(1, end):
        number = np.int64(s.places[at].used) - 1
        s.places[at].used = 0
        if number < 0:
            continue
        hashed = hash_of(s.keys[number].k0, s.keys[number].k1)
        if at < first or hashed > limit:
            s.state[COUNT] -= 1
            s.keys[s.state[COUNT]].free = number
        else:
            _enter(s, hashed, number)
            _place(s, number)


@kernel(SAMPLE)
def halve(sample):
    """See `_halve`."""
    _halve(Sample(*sample))
