"""The first page of an arena's file, and the file's layout: superblock and slab table, headers, payload.

`raykv.arena.header` names the words of the page, and has kernels for the words that change.
"""

import os
import secrets
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.arena import header
from raykv.protocol.location import ALIGN, EPOCHS, GENERATIONS, SLAB_BYTES_MAX, SLABS_MAX
from raykv.system import raylets

MAGIC = int.from_bytes(b"raykv\0ar", "little")
VERSION = 1
NO_CLUSTER = bytes(raylets.CLUSTER_BYTES)
SLAB_UNIT = ALIGN * ALIGN // (8 * header.HEADER_WORDS)  # size of a slab whose headers fill one page
HUGE_PAGE = 2 << 20


class Layout(NamedTuple):
    """Regions of an arena's file, in bytes."""

    headers: int  # offset of the first slot header
    payload: int  # offset of the first slot
    size: int  # size of the file


def layout(slab_bytes: int, slabs: int) -> Layout:
    """Return the regions of a file with `slabs` slabs."""
    headers = ALIGN + -(-slabs * 16 // ALIGN) * ALIGN
    payload = -(-(headers + slabs * (slab_bytes // ALIGN) * 8 * header.HEADER_WORDS) // HUGE_PAGE) * HUGE_PAGE
    return Layout(headers, payload, payload + slabs * slab_bytes)


def new_page(fingerprint: bytes, slab_bytes: int, slabs: int, cluster: bytes) -> NDArray[np.int64]:
    """Return the first page of a new arena. Raises ValueError for an impossible geometry."""
    if not _is_possible(slab_bytes, slabs):
        raise ValueError(
            f"{slabs} slabs of {slab_bytes} bytes: give 1 to {SLABS_MAX}, of a multiple of {SLAB_UNIT} bytes up to "
            f"{SLAB_BYTES_MAX}"
        )
    words = np.zeros(header.TABLE, np.int64)
    words[header.MAGIC], words[header.VERSION] = MAGIC, VERSION
    words[header.NONCE : header.NONCE + 2] = np.frombuffer(secrets.token_bytes(16), np.int64)
    words[header.FINGERPRINT : header.FINGERPRINT + 2] = np.frombuffer(fingerprint, np.int64)
    words[header.SLAB_BYTES], words[header.SLABS] = slab_bytes, slabs
    words[header.INCARNATION], words[header.CLOCK_BASE] = 1, int(time.time())
    words[header.CLUSTER] = int.from_bytes(cluster, "little", signed=True)
    return words


def read(fd: int) -> NDArray[np.int64] | None:
    """Return the file's first page, or None if the file is no complete arena or the page has impossible numbers."""
    page = os.pread(fd, ALIGN, 0)
    if len(page) < ALIGN:
        return None
    words = np.frombuffer(page, np.int64)
    slab_bytes, slabs = int(words[header.SLAB_BYTES]), int(words[header.SLABS])
    if (words[header.MAGIC], words[header.VERSION]) != (MAGIC, VERSION) or not _is_possible(slab_bytes, slabs):
        return None
    if os.fstat(fd).st_size != layout(slab_bytes, slabs).size:
        return None
    counters = words[header.OFFERED : header.DISCARDS + 1].view(np.uint64)  # a negative number becomes a huge one
    most = np.array([slabs, EPOCHS - 2, *[GENERATIONS] * 4], np.uint64)  # leaves an epoch for the next directory
    return words if (counters <= most).all() else None


def _is_possible(slab_bytes: int, slabs: int) -> bool:
    return 0 < slab_bytes <= SLAB_BYTES_MAX and slab_bytes % SLAB_UNIT == 0 and 0 < slabs <= SLABS_MAX


def nonce_of(words: NDArray[np.int64]) -> bytes:
    """Return the arena's nonce: 16 random bytes that no other arena has."""
    return words[header.NONCE : header.NONCE + 2].tobytes()


def cluster_of(fd: int) -> bytes:
    """Return the Ray cluster of the file's last owner, or NO_CLUSTER if the file names none."""
    try:
        return os.pread(fd, len(NO_CLUSTER), 8 * header.CLUSTER) or NO_CLUSTER
    except OSError:  # the path is no file
        return NO_CLUSTER


def put_cluster(fd: int, cluster: bytes) -> None:
    """Owner: write the Ray cluster of the file's owner."""
    os.pwrite(fd, cluster, 8 * header.CLUSTER)


def matches(words: NDArray[np.int64], fingerprint: bytes, slab_bytes: int, slabs: int) -> bool:
    """Whether an arena has that fingerprint (of pool and secret) and geometry."""
    same = words[header.FINGERPRINT : header.FINGERPRINT + 2].tobytes() == fingerprint
    return same and (words[header.SLAB_BYTES], words[header.SLABS]) == (slab_bytes, slabs)
