"""Copies blocks of whole stripes, and computes each block's XXH3_64bits from the same registers.

A library would read the copy again. After a copy that bypasses the caches, reading costs as much as the copy. The
kernels here bypass the caches when they store, as memcpy does in a long copy, and sum the registers that they loaded.

The algorithm and its names are from https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from raykv.system.intrinsics import emit_prefetch
from raykv.system.jit import kernel

STRIPE = 64  # bytes that the accumulators take at a time
ROW = 1024  # bytes between two scrambles; the specification calls it a block
SHORTEST = 241  # bytes of the shortest input of this algorithm; for shorter input XXH3 has other algorithms
AHEAD = 4096  # bytes to prefetch ahead: the processor's prefetch stops at a page's end
SUM, COPY, STREAM = range(3)  # only sum the bytes; also copy them; copy them and bypass the caches

PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_MX1 = 0x165667919E3779F9
INITIAL = (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1)
SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)
LAST, MERGE, SCRAMBLE = 121, 11, 128  # offsets in the secret for the last stripe, the digest, and the end of a row

_WORD, _HALF, _BYTE, _DOUBLE = (ir.IntType(bits) for bits in (64, 32, 8, 128))
_LANES = ir.VectorType(_WORD, 8)
_VOID = types.void(*[types.int64] * 4)
_NONTEMPORAL = "nontemporal"


def _each(word: int) -> ir.Constant:
    return ir.Constant(_LANES, [word] * 8)


_SWAPPED = ir.Constant(ir.VectorType(_HALF, 8), [1, 0, 3, 2, 5, 4, 7, 6])


def _at(builder: Any, address: Any, offset: int, kind: ir.Type) -> Any:
    return builder.inttoptr(builder.add(address, _WORD(offset)), kind.as_pointer())


def _load(builder: Any, address: Any, offset: int) -> Any:
    return builder.load(_at(builder, address, offset, _LANES), align=1)


def _store(builder: Any, lanes: Any, address: Any, offset: int, stream: bool) -> None:
    stored = builder.store(lanes, _at(builder, address, offset, _LANES), align=STRIPE if stream else 1)
    if stream:
        stored.set_metadata(_NONTEMPORAL, builder.module.add_metadata([_HALF(1)]))


def _accumulated(builder: Any, lanes: Any, data: Any, secret: Any) -> Any:
    """XXH3_accumulate_512: each lane takes its neighbour's word, and the product of its own word's halves."""
    keyed = builder.xor(data, secret)
    product = builder.mul(builder.and_(keyed, _each(0xFFFFFFFF)), builder.lshr(keyed, _each(32)))
    swapped = builder.shuffle_vector(data, ir.Constant(_LANES, ir.Undefined), _SWAPPED)
    return builder.add(lanes, builder.add(product, swapped))


def _stripes(number: int, mode: int, summed: bool = True) -> Any:
    """Return a function for `number` stripes. Kernels call it with addresses (accumulators, target, source, secret).

    mode: SUM, COPY or STREAM. summed: whether the stripes are summed. If not, the function uses neither accumulators
    nor secret.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def stripes(typing_context: Any, accumulators: Any, target: Any, source: Any, secret: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, target, source, secret = args
            lanes = _load(builder, accumulators, 0) if summed else None
            for stripe in range(number):
                emit_prefetch(builder, _at(builder, source, STRIPE * stripe + AHEAD, _BYTE))
                data = _load(builder, source, STRIPE * stripe)
                if mode != SUM:
                    _store(builder, data, target, STRIPE * stripe, mode == STREAM)
                if summed:
                    lanes = _accumulated(builder, lanes, data, _load(builder, secret, 8 * stripe))
            if summed:
                _store(builder, lanes, accumulators, 0, stream=False)
            return context.get_dummy_value()

        return _VOID, generate

    return stripes


_sum_stripe, _copy_stripe, _stream_stripe = (_stripes(1, mode) for mode in (SUM, COPY, STREAM))
_sum_row, _copy_row, _stream_row = (_stripes(ROW // STRIPE, mode) for mode in (SUM, COPY, STREAM))
_stream_plain_row = _stripes(ROW // STRIPE, STREAM, summed=False)


@intrinsic  # type: ignore[untyped-decorator]
def _begin(typing_context: Any) -> Any:
    """In a kernel, return the address of new accumulators. All calls in one function return the same address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = cgutils.alloca_once_value(builder, ir.Constant(_LANES, list(INITIAL)))
        builder.store(ir.Constant(_LANES, list(INITIAL)), lanes)
        return builder.ptrtoint(lanes, _WORD)

    return types.int64(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _scramble(typing_context: Any, accumulators: Any, secret: Any) -> Any:
    """XXH3_scrambleAcc."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _load(builder, args[0], 0)
        mixed = builder.xor(builder.xor(lanes, builder.lshr(lanes, _each(47))), _load(builder, args[1], SCRAMBLE))
        _store(builder, builder.mul(mixed, _each(PRIME32_1)), args[0], 0, stream=False)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _digest(typing_context: Any, accumulators: Any, secret: Any, length: Any) -> Any:
    """XXH3_mergeAccs and XXH3_avalanche."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        keyed = builder.xor(_load(builder, args[0], 0), _load(builder, args[1], MERGE))
        words = [builder.zext(builder.extract_element(keyed, _HALF(i)), _DOUBLE) for i in range(8)]
        total = builder.mul(args[2], _WORD(PRIME64_1))
        for a, b in zip(words[::2], words[1::2], strict=True):
            product = builder.mul(a, b)
            high = builder.trunc(builder.lshr(product, _DOUBLE(64)), _WORD)
            total = builder.add(total, builder.xor(builder.trunc(product, _WORD), high))
        total = builder.mul(builder.xor(total, builder.lshr(total, _WORD(37))), _WORD(PRIME_MX1))
        return builder.xor(total, builder.lshr(total, _WORD(32)))

    return types.int64(types.int64, types.int64, types.int64), generate


@kernel
def _stripe(mode: int, accumulators: int, target: int, source: int, secret: int) -> None:
    if mode == STREAM:
        _stream_stripe(accumulators, target, source, secret)
    elif mode == COPY:
        _copy_stripe(accumulators, target, source, secret)
    else:
        _sum_stripe(accumulators, target, source, secret)


@kernel
def _row(mode: int, accumulators: int, target: int, source: int, secret: int) -> None:
    if mode == STREAM:
        _stream_row(accumulators, target, source, secret)
    elif mode == COPY:
        _copy_row(accumulators, target, source, secret)
    else:
        _sum_row(accumulators, target, source, secret)


@kernel
def stream_rows(target: int, source: int, rows: int) -> None:
    """Copy rows without a checksum, and bypass the caches. target: a multiple of STRIPE. See `intrinsics.fence`."""
    for done in range(0, rows * ROW, ROW):
        _stream_plain_row(0, target + done, source + done, 0)


@kernel
def mode_of(target: int, source: int, stream: bool) -> int:
    """Return the mode for a part: SUM for equal addresses, STREAM if `stream` and the target is aligned, else COPY."""
    if target == source:
        return SUM
    return STREAM if stream and target % STRIPE == 0 else COPY


@kernel
def copy_block(parts: NDArray[np.int64], stream: bool, secret: int) -> int:
    """Copy a block's parts. Returns the XXH3_64bits of its bytes in order.

    parts: (n, 3) int64: target address, source address, length. The lengths are multiples of STRIPE, and their sum is
    at least SHORTEST. If both addresses are equal, nothing is copied. stream: bypass the caches; then call
    `intrinsics.fence` after the last block. secret: address of SECRET.
    """
    accumulators: int = _begin()
    length, done = parts[:, 2].sum(), 0
    for part in range(len(parts)):
        mode = mode_of(parts[part, 0], parts[part, 1], stream)
        end = done + parts[part, 2]
        target, source = parts[part, 0] - done, parts[part, 1] - done
        while done < end:
            row = done % ROW
            if row == 0 and end - done >= ROW and length - done > ROW:
                _row(mode, accumulators, target + done, source + done, secret)
                done += ROW
            else:
                at = LAST if length - done == STRIPE else row // 8
                _stripe(mode, accumulators, target + done, source + done, secret + at)
                done += STRIPE
            if done % ROW == 0 and done < length:
                _scramble(accumulators, secret)
    digest: int = _digest(accumulators, secret, length)
    return digest
