"""Finds the leading blocks of a prompt that can be read, and their rows. Does not touch or hold any block."""

import numpy as np

from raykv.directory.kernels.columns import (
    BOOL,
    EXTERNAL,
    HOLDS_MAX,
    INT,
    KEYS,
    NODE_MASK,
    READY,
    ROWS,
    STAGING,
    WRITING,
    C,
)
from raykv.directory.kernels.lists import first_in, node_of, present, size_class_of, stored
from raykv.directory.kernels.table import find
from raykv.system.jit import kernel


@kernel
def best(c, first, node):
    """Return (row of a key to read, row of the key that is being staged on `node`), each -1 if there is none.

    The row to read is a copy on `node`, else the primary, else any replica, else a copy in an external tier. A copy on
    `node` is read even if the store of `node` does not answer, since the reader shares the memory.
    """
    source = np.int64(-1)
    external = np.int64(-1)
    staging = np.int64(-1)
    row = np.int64(first)
    while row >= 0:
        state = c.rows[row].state
        size_class = size_class_of(c, row)
        here = c.size_classes[size_class].node == node
        offered = c.size_classes[size_class].offered
        if (offered or here) and c.rows[row].holds < HOLDS_MAX:
            if present(state):
                if here:
                    return row, np.int64(-1)
                if source < 0 or state == READY:
                    source = row
            elif state == STAGING and here and offered:
                staging = row
            elif state == EXTERNAL:
                external = row
        row = np.int64(c.rows[row].same)
    return source if source >= 0 else external, staging


@kernel(C, KEYS, ROWS, INT, BOOL)
def ready_prefix(c, keys, firsts, node, written):
    """Fill `firsts` as `find` does. Returns how many leading keys a reader on `node` may read now.

    written: whether keys that are still being written count too.
    """
    find(c, keys, firsts)
    n = 0
    while n < len(firsts) and (
        best(c, firsts[n], node)[0] >= 0 or (written and first_in(c, np.int64(firsts[n]), 1 << WRITING) >= 0)
    ):
        n += 1
    return n


@kernel(C, KEYS, ROWS, INT, INT, ROWS)
def ready_runs(c, keys, firsts, node, window, runs):
    """Fill `firsts` as `find` does. runs[i], out: length of the run of readable keys that ends with keys[i].

    Readable keys are keys that a reader on `node` may read now. Lengths above `window` are cut to `window`.
    """
    find(c, keys, firsts)
    run = np.int64(0)
    for i in range(len(firsts)):
        run = min(run + 1, window) if best(c, firsts[i], node)[0] >= 0 else np.int64(0)
        runs[i] = run


@kernel(C, ROWS, ROWS, ROWS, ROWS)
def locate_prefix(c, firsts, hosts, counts, last):
    """Return the number of blocks of the longest ready prefix.

    counts[h], in and out: number of these blocks on host h, in memory or on a GPU; 0 at first. hosts[node & NODE_MASK]:
    host of a node. last[h], in and out: 1 + index of the last block counted for host h; 0 at first.
    """
    for i in range(len(firsts)):
        row = np.int64(firsts[i])
        ready = False
        while row >= 0:
            if stored(c.rows[row].state) and c.size_classes[size_class_of(c, row)].offered:
                if c.rows[row].state != EXTERNAL:
                    host = hosts[node_of(c, row) & NODE_MASK]
                    counts[host] += last[host] <= i
                    last[host] = i + 1
                ready = True
            row = np.int64(c.rows[row].same)
        if not ready:
            return i
    return len(firsts)
