"""The words of an arena's file that several processes read and write at once: superblock, slab table, slot headers.

The kernels order accesses to headers and payload by atomic loads and stores, and by fences. A header has eight words of
8 bytes: generation << 2 | state, key (two words), length, chain position, last-read stamp, checksum, unused.

Arguments of the kernels:

- words: the file as a flat int64 array;
- shape: (slab_bytes, first header, first payload byte, slabs); the first header is an index into `words`;
- locations (n, 4), keys (n, 2): int64 views of LOCATION and key arrays;
- header (n,): index of the first word of each slot's header; -1 if there is no such slot;
- ok: (n,) mask.
"""

import platform
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.protocol.location import ALIGN, COUNTER_BITS, GENERATIONS
from raykv.protocol.stores import FINISHED, FREED
from raykv.system.intrinsics import fence
from raykv.system.jit import kernel

if platform.machine() not in ("x86_64", "aarch64") or platform.system() != "Linux":
    raise ImportError(
        f"raykv needs Linux on x86_64 or aarch64: shared headers rely on their atomics; this is {platform.platform()}"
    )

from numba import types
from numba.extending import intrinsic

Words = NDArray[np.int64]
Mask = NDArray[np.bool_]
Shape = tuple[int, int, int, int]

FREE, WRITING, READY = 0, 1, 2
MAGIC, VERSION, NONCE, FINGERPRINT = 0, 1, 2, 4  # words of the superblock; nonce and fingerprint have two words each
SLAB_BYTES, SLABS, OFFERED, EPOCH, INCARNATION, CLOCK_BASE, FLOOR, DISCARDS, CLUSTER = range(6, 15)
TABLE = 512  # first word of the slab table: (slab generation, stride) of every slab
GIVEN_BACK = -1  # stride of a slab whose memory was discarded, or will be
HEADER_WORDS = 8
KEY, LENGTH, POSITION, STAMP, CHECKSUM = 1, 3, 4, 5, 6

# Types of the kernels' arguments. A `readonly` type accepts both read-only and writable arrays.
INT, SHAPE = types.int64, types.UniTuple(types.int64, 4)
WORDS = types.Array(types.int64, 1, "C")
COLUMN = types.Array(types.int64, 1, "C", readonly=True)
ROWS = types.Array(types.int64, 2, "C", readonly=True)  # a row is a location, a key or a result
ROWS_OUT = types.Array(types.int64, 2, "C")
MASK, FLAGS = types.Array(types.bool_, 1, "C"), types.Array(types.uint8, 1, "C")


@intrinsic  # type: ignore[untyped-decorator]
def _load(typing_context: Any, words: Any, at: Any) -> Any:
    """Load the word, before all later reads and writes in program order (acquire)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        pointer = builder.gep(array.data, [args[1]])
        return builder.load_atomic(pointer, "acquire", 8, typ=context.get_value_type(types.int64))

    return types.int64(words, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _store(typing_context: Any, words: Any, at: Any, value: Any) -> Any:
    """Write the word, after all earlier reads and writes in program order (release)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        builder.store_atomic(args[2], builder.gep(array.data, [args[1]]), "release", 8)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), generate


@kernel(WORDS, INT)
def load(words: Words, at: int) -> int:
    """Load one word (acquire)."""
    return _load(words, at)  # type: ignore[no-any-return]


@kernel(WORDS, INT, INT)
def store(words: Words, at: int, value: int) -> None:
    """Write one word (release). All processes see the new word before this returns."""
    _store(words, at, value)
    fence()


@kernel(WORDS, SHAPE, ROWS, WORDS, WORDS)
def locate(words: Words, shape: Shape, locations: Words, header: Words, payload: Words) -> None:
    """Fill `header`, and fill `payload` with the offset of each slot in the file.

    Any process may have written the locations and the superblock. So the checks use products that can't overflow.
    """
    offered = min(_load(words, OFFERED), shape[3])
    for i in range(len(locations)):
        slab, slot, size = locations[i, 0] >> 32, locations[i, 1] & 0xFFFFFFFF, locations[i, 1] >> 32
        stride = -(-size // ALIGN) * ALIGN
        header[i] = -1
        there = 0 <= slab < offered and _load(words, TABLE + 2 * slab + 1) != GIVEN_BACK
        there = there and 0 <= locations[i, 2] < GENERATIONS and 0 <= locations[i, 3] < GENERATIONS
        if there and 0 < size <= shape[0] and (slot + 1) * stride <= shape[0]:
            header[i] = shape[1] + (slab * (shape[0] // ALIGN) + slot) * HEADER_WORDS
            payload[i] = shape[2] + slab * shape[0] + slot * stride


@kernel(WORDS, WORDS, ROWS, ROWS, ROWS_OUT, MASK)
def check(words: Words, header: Words, locations: Words, keys: Words, claims: Words, ok: Mask) -> None:
    """Before a copy: set `ok` where a slot holds exactly that ready block. Fill `claims` with checksum and position."""
    for i in range(len(locations)):
        h = header[i]
        ok[i] = (
            h >= 0
            and _load(words, h) == locations[i, 3] << 2 | READY
            and words[h + KEY] == keys[i, 0]
            and words[h + KEY + 1] == keys[i, 1]
            and words[h + LENGTH] == locations[i, 1] >> 32
        )
        if ok[i]:
            claims[i, 0], claims[i, 1] = words[h + CHECKSUM], words[h + POSITION]


@kernel(WORDS, WORDS, ROWS, ROWS, MASK)
def recheck(words: Words, header: Words, locations: Words, keys: Words, ok: Mask) -> None:
    """After a copy: clear `ok` where the header has changed since `check`: another block may have been copied."""
    fence()
    for i in range(len(locations)):
        h = header[i]
        ok[i] = ok[i] and (
            _load(words, h) == locations[i, 3] << 2 | READY
            and words[h + KEY] == keys[i, 0]
            and words[h + KEY + 1] == keys[i, 1]
        )


@kernel(WORDS, WORDS, INT, MASK)
def stamp(words: Words, header: Words, now: int, ok: Mask) -> None:
    """Mark blocks as read at `now`."""
    for i in range(len(header)):
        if ok[i] and words[header[i] + STAMP] != now:
            words[header[i] + STAMP] = now


@kernel(WORDS, WORDS, ROWS)
def formatted(words: Words, header: Words, locations: Words) -> bool:
    """Whether every slab has the format of its grants, or a later format."""
    for i in range(len(locations)):
        if header[i] >= 0 and _load(words, TABLE + 2 * (locations[i, 0] >> 32)) < locations[i, 2]:
            return False
    return True


@kernel(WORDS, WORDS, ROWS, MASK)
def begin(words: Words, header: Words, locations: Words, ok: Mask) -> None:
    """Under the slots' locks: set WRITING. Clear `ok` where the grant comes from a past epoch, format or generation."""
    for i in range(len(locations)):
        if not ok[i]:
            continue
        h, generation = header[i], locations[i, 3]
        slab, size = locations[i, 0] >> 32, locations[i, 1] >> 32
        ok[i] = (
            _load(words, EPOCH) <= generation >> COUNTER_BITS
            and _load(words, TABLE + 2 * slab) == locations[i, 2]
            and words[TABLE + 2 * slab + 1] == -(-size // ALIGN) * ALIGN
            and _load(words, h) >> 2 < generation
        )
        if ok[i]:
            _store(words, h, generation << 2 | WRITING)
    fence()


@kernel(WORDS, WORDS, ROWS, MASK)
def undo(words: Words, header: Words, locations: Words, ok: Mask) -> None:
    """Under the slots' locks, after `begin`: free the slots. Their old blocks are lost; the grants stay usable."""
    for i in range(len(locations)):
        if ok[i]:
            _store(words, header[i], (locations[i, 3] - 1) << 2 | FREE)
    fence()


@kernel(WORDS, WORDS, ROWS, ROWS, COLUMN, COLUMN, INT, MASK)
def finish(
    words: Words, header: Words, locations: Words, keys: Words, sums: Words, positions: Words, now: int, ok: Mask
) -> None:
    """Fill in the headers of copied blocks, and set READY last.

    Where `ok` has been cleared, the header stays WRITING until it is swept.
    """
    fence()
    for i in range(len(locations)):
        if ok[i]:
            h = header[i]
            words[h + KEY] = keys[i, 0]
            words[h + KEY + 1] = keys[i, 1]
            words[h + LENGTH] = locations[i, 1] >> 32
            words[h + POSITION] = positions[i]
            words[h + STAMP] = now
            words[h + CHECKSUM] = sums[i]
            _store(words, h, locations[i, 3] << 2 | READY)


@kernel(WORDS, WORDS, ROWS, MASK, FLAGS)
def reclaim(words: Words, header: Words, locations: Words, ok: Mask, states: NDArray[np.uint8]) -> None:
    """Under the slots' locks: set `states` to FINISHED where a block was written since the grant, and was not cleared.

    Set `states` to FREED for all other locked slots. Late writers to these slots are refused.
    """
    floor = _load(words, FLOOR)
    for i in range(len(locations)):
        if ok[i]:
            word, generation, slab = _load(words, header[i]), locations[i, 3], locations[i, 0] >> 32
            states[i] = FREED
            if _load(words, TABLE + 2 * slab) != locations[i, 2]:
                continue  # the slab has another format, so this grant must not touch its headers
            if word & 3 == READY and word >> 2 >= generation and word >> 2 > floor:
                states[i] = FINISHED
            elif word >> 2 <= generation:
                _store(words, header[i], generation << 2 | FREE)
    fence()


@kernel(WORDS, WORDS, ROWS_OUT)
def identify(words: Words, header: Words, out: Words) -> None:
    """Fill `out` with (generation, key, key) from the slots' headers. Leaves rows unchanged where there is no slot."""
    for i in range(len(header)):
        if header[i] >= 0:
            out[i, 0] = _load(words, header[i]) >> 2
            out[i, 1] = words[header[i] + KEY]
            out[i, 2] = words[header[i] + KEY + 1]


@kernel(WORDS, SHAPE, INT, INT, INT)
def reformat(words: Words, shape: Shape, slab: int, generation: int, stride: int) -> None:
    """While all slots of the slab are locked: forget its blocks, and divide it into slots of `stride` bytes.

    stride: GIVEN_BACK leaves the slab without slots.
    """
    smallest = words[TABLE + 2 * slab + 1]
    smallest = stride if smallest <= 0 else min(smallest, stride)
    smallest = ALIGN if stride == GIVEN_BACK else max(ALIGN, smallest)
    first = shape[1] + slab * (shape[0] // ALIGN) * HEADER_WORDS
    for h in range(first, first + shape[0] // smallest * HEADER_WORDS, HEADER_WORDS):
        _store(words, h, 0)
    fence()
    words[TABLE + 2 * slab + 1] = stride
    _store(words, TABLE + 2 * slab, generation)
    fence()


@kernel(WORDS, INT, INT, MASK, ROWS_OUT)
def collect(words: Words, first: int, stride: int, locked: Mask, out: Words) -> None:
    """Fill `out` with (state, generation, key, key, length, position, stamp) of slots. Locked slots are WRITING."""
    for slot in range(len(out)):
        h = first + slot * HEADER_WORDS
        word = _load(words, h)
        state = word & 3
        for k in range(5):
            out[slot, 2 + k] = words[h + KEY + k]
        fence()
        if locked[slot] or _load(words, h) != word:
            state = WRITING
        elif state == READY and (word >> 2 <= 0 or -(-out[slot, 4] // ALIGN) * ALIGN != stride):
            state = FREE  # an altered header: not a block
        out[slot, 0] = state
        out[slot, 1] = word >> 2
