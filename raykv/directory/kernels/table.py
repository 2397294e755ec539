"""The hash table from keys to rows. A key's entry names the key's first row, and each row names the next (`same`)."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from raykv.directory.kernels.columns import ENTRIES, KEYS, PAGE_BITS, ROWS, TENANTS, C
from raykv.system.intrinsics import emit_prefetch
from raykv.system.jit import kernel


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, array: Any, at: Any) -> Any:
    """Prefetch the cache lines of array[at] without waiting for them: two lines if the element straddles them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        start = builder.gep(context.make_array(kind)(context, builder, arguments[0]).data, [arguments[1]])
        start = builder.bitcast(start, ir.IntType(8).as_pointer())
        size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
        for offset in (0, size - 8) if size > 8 else (0,):
            emit_prefetch(builder, builder.gep(start, [ir.IntType(64)(offset)]), writes=True)
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@kernel
def hash_of(k0, k1):
    """Return a key's 64-bit hash. Its upper bits depend on all bits of the key."""
    return (k0 ^ (k1 * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xD6E8FEB86659FD93)


@kernel
def tag_of(k0, k1):
    """Return 31 bits of a key's hash, which are the upper half of its table entry."""
    return np.int64(hash_of(k0, k1) >> np.uint64(33))


@kernel
def probe(c, k0, k1):
    """Return the position of a key's entry in the table, or -1."""
    mask = len(c.table) - 1
    tag = tag_of(k0, k1)
    i = tag & mask
    while True:
        entry = c.table[i]
        if entry == 0:
            return -1
        if entry >> 32 == tag:
            row = (entry & 0xFFFFFFFF) - 1
            if c.rows[row].k0 == k0 and c.rows[row].k1 == k1:
                return i
        i = (i + 1) & mask


@kernel
def row_at(c, position):
    """Return the first row of a key. position: position of the key's entry in the table."""
    return (c.table[position] & 0xFFFFFFFF) - 1


@kernel
def first_row(c, k0, k1):
    """Return the first row of a key, or -1."""
    position = probe(c, k0, k1)
    return row_at(c, position) if position >= 0 else np.int64(-1)


@kernel
def first_of(c, row):
    """Return the first row of a row's key. The row must be in the table."""
    return row_at(c, probe(c, c.rows[row].k0, c.rows[row].k1))


@kernel
def insert(c, row):
    """Append a row to the rows of its key. The key's tenant pays for the row too."""
    k0, k1 = c.rows[row].k0, c.rows[row].k1
    c.rows[row].same = -1
    position = probe(c, k0, k1)
    if c.state[TENANTS] > 1:
        c.tenants[row] = c.tenants[row_at(c, position)] if position >= 0 else 0
    if position >= 0:
        last = row_at(c, position)
        while c.rows[last].same >= 0:
            last = np.int64(c.rows[last].same)
        c.rows[last].same = row
        return
    mask = len(c.table) - 1
    tag = tag_of(k0, k1)
    i = tag & mask
    while c.table[i] != 0:
        i = (i + 1) & mask
    c.table[i] = tag << 32 | (row + 1)
    c.state[ENTRIES] += 1


@kernel
def close_gap(c, hole):
    """Delete the entry at `hole`, and shift later entries back, so that probes do not grow longer with age."""
    c.state[ENTRIES] -= 1
    mask = len(c.table) - 1
    i = hole
    while True:
        i = (i + 1) & mask
        entry = c.table[i]
        if entry == 0:
            break
        home = (entry >> 32) & mask
        if ((i - home) & mask) >= ((i - hole) & mask):
            c.table[hole] = entry
            hole = i
    c.table[hole] = 0


@kernel
def delete(c, row):
    """Remove a row from the rows of its key."""
    position = probe(c, c.rows[row].k0, c.rows[row].k1)
    first = row_at(c, position)
    after = np.int64(c.rows[row].same)
    c.rows[row].same = -1
    if first != row:
        while c.rows[first].same != row:
            first = np.int64(c.rows[first].same)
        c.rows[first].same = after
    elif after >= 0:
        c.table[position] = c.table[position] >> 32 << 32 | (after + 1)
    else:
        close_gap(c, position)


@kernel(C, KEYS, ROWS)
def find(c, keys, out):
    """Set out[i] to the first row of keys[i], or -1. Three passes over every 64 keys make cache misses overlap."""
    mask = len(c.table) - 1
    n = len(keys)
    for start in range(0, n, 64):
        stop = min(n, start + 64)
        for i in range(start, stop):
            prefetch(c.table, tag_of(keys[i, 0], keys[i, 1]) & mask)
        for i in range(start, stop):
            tag = tag_of(keys[i, 0], keys[i, 1])
            position = tag & mask
            entry = c.table[position]
            while entry != 0 and entry >> 32 != tag:
                position = (position + 1) & mask
                entry = c.table[position]
            out[i] = (entry & 0xFFFFFFFF) - 1
            if entry != 0:
                prefetch(c.rows, out[i])
                prefetch(c.pages, out[i] >> PAGE_BITS)  # callers look up the row's size class by its page
        for i in range(start, stop):
            row = out[i]
            if row >= 0 and (c.rows[row].k0 != keys[i, 0] or c.rows[row].k1 != keys[i, 1]):
                out[i] = first_row(c, keys[i, 0], keys[i, 1])  # another key has the same tag


@kernel
def prefetch_entry(c, row):
    """Prefetch the cache line of the table that a row's key hashes to."""
    prefetch(c.table, tag_of(c.rows[row].k0, c.rows[row].k1) & (len(c.table) - 1))


@kernel
def alone(c, position, row):
    """Whether a row is the only row of its key. position: position of the key's entry in the table."""
    return c.rows[row].same < 0 and row_at(c, position) == row


@kernel(C, ROWS)
def rehash(c, old):
    """Move the entries of `old`, a smaller table, into c.table."""
    mask = len(c.table) - 1
    for entry in old:
        if entry != 0:
            i = (entry >> 32) & mask
            while c.table[i] != 0:
                i = (i + 1) & mask
            c.table[i] = entry
