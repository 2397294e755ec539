"""The files of arenas in shared memory: made, adopted after their owner died, opened by clients, found and removed.

An owner, a node store, holds a lock on its file's first page for as long as it lives: the kernel drops it with the
process. A file whose owner's lock is free was left behind. `raykv.arena.mapping` maps what is opened here.
"""

import os
import re
import stat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.arena import superblock
from raykv.errors import ArenaMismatch
from raykv.protocol import ALIGN
from raykv.system.file_locks import held_elsewhere, lock

SHM = "/dev/shm"


class ArenaFile(NamedTuple):
    """An open file of an arena."""

    path: str
    fd: int  # holds the owner's lock if this process is the owner
    first_page: NDArray[np.int64]  # see raykv.arena.superblock


def create(path: str, fingerprint: bytes, slab_bytes: int, slabs: int) -> ArenaFile:
    """A new file, owned: `slabs` times `slab_bytes` (a multiple of 256 KiB), of which no slab is offered yet.

    It appears under its name whole and locked, or not at all. FileExistsError if there is such a file.
    """
    words = superblock.new_page(fingerprint, slab_bytes, slabs)
    fd = os.open(os.path.dirname(path), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        lock(fd, 0, ALIGN)
        layout = superblock.layout(slab_bytes, slabs)
        os.ftruncate(fd, layout.size)
        os.posix_fallocate(fd, 0, layout.headers)  # every client writes to these pages, whatever slab it uses
        os.pwrite(fd, words.tobytes(), 0)
        os.link(f"/proc/self/fd/{fd}", path, dst_dir_fd=fd, follow_symlinks=True)  # a dir_fd makes it linkat
    except BaseException:
        os.close(fd)
        raise
    return ArenaFile(path, fd, words)


def adopt(path: str, fingerprint: bytes, slab_bytes: int, slabs: int) -> ArenaFile | None:
    """The file that a dead owner left behind, now owned.

    None if there is none; if its owner lives or is another user (the file is left alone); or if it has another
    fingerprint or geometry (the file is unlinked, which its clients survive).
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        info = os.fstat(fd)
        ours = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and lock(fd, 0, ALIGN)
        if ours and inode(os.stat(path)) == inode(info):  # else somebody unlinked it before we had the lock
            words = superblock.read(fd)
            if words is not None and superblock.matches(words, fingerprint, slab_bytes, slabs):
                return ArenaFile(path, fd, words)
            os.unlink(path)
    except FileNotFoundError:
        pass
    os.close(fd)
    return None


def attach(path: str, nonce: bytes) -> ArenaFile:
    """The file that this node's store serves; its nonce tells it from others. ArenaMismatch if this is not it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise ArenaMismatch(_mismatch(path, f"cannot be opened ({error.strerror})")) from error
    words = superblock.read(fd)
    if words is None or superblock.nonce_of(words) != nonce:
        os.close(fd)
        raise ArenaMismatch(_mismatch(path, "is another file than the one that this node's store serves"))
    return ArenaFile(path, fd, words)


def arenas_of(pool: str) -> list[str]:
    """Paths of this user's arenas of a pool, on this machine."""
    ours = re.compile(rf"raykv-{pool}-{os.getuid()}-(gpu-)?\d+")
    return [entry.path for entry in os.scandir(SHM) if ours.fullmatch(entry.name)]


def left_behind(pool: str) -> list[str]:
    """Paths of this user's arenas of a pool that no living store owns."""
    return [path for path in arenas_of(pool) if not _owned(path)]


def remove_left_behind(pool: str) -> int:
    """Remove this user's arenas of a pool that no living store owns. Returns how many there were."""
    return sum(remove(path) for path in left_behind(pool))


def remove(path: str) -> bool:
    """Remove an arena that no living store owns. Returns whether it was removed.

    This takes the owner's lock: by now another store may have adopted the file, or created a new one of that name.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        unowned = lock(fd, 0, ALIGN) and inode(os.stat(path)) == inode(os.fstat(fd))
        if unowned:
            os.unlink(path)
        return unowned
    except FileNotFoundError:  # another store that stops was faster
        return False
    finally:
        os.close(fd)


def inode(info: os.stat_result) -> tuple[int, int]:
    """What tells a file from any other, whatever its name."""
    return info.st_dev, info.st_ino


def _owned(path: str) -> bool:
    """Whether a living store owns it, or another user's process."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        return held_elsewhere(fd, 0, ALIGN)  # asked, not taken: its store may be restarting
    finally:
        os.close(fd)


def _mismatch(path: str, what: str) -> str:
    return (
        f"{path} {what}. This process must see its node store's shared memory: mount the Ray pod's "
        f"{os.path.dirname(path)} into this container (an emptyDir with medium: Memory) and run as the same user"
    )
