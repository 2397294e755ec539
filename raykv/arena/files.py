"""Creates the files of arenas in shared memory, adopts them from dead owners, opens them for clients, and removes them.

A node store owns its file by a lock on the first page. The kernel releases the lock when the process ends. So a file
without a lock was left behind. But while the last owner's Ray cluster is running, other Ray clusters don't touch the
file, as the store may be restarting. `raykv.arena.mapping` maps the files that are opened here.
"""

import os
import re
import stat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.arena import superblock
from raykv.arena.superblock import NO_CLUSTER
from raykv.errors import ArenaMismatch
from raykv.protocol.location import ALIGN
from raykv.system import raylets
from raykv.system.file_locks import held_elsewhere, lock

SHM = "/dev/shm"


class ArenaFile(NamedTuple):
    """An open file of an arena."""

    path: str
    fd: int  # holds the owner's lock if this process is the owner
    first_page: NDArray[np.int64]  # see raykv.arena.superblock


def create(path: str, fingerprint: bytes, slab_bytes: int, slabs: int, cluster: bytes = NO_CLUSTER) -> ArenaFile:
    """Create a file that this process owns, for `slabs` slabs of `slab_bytes` (a multiple of 256 KiB).

    It offers no slab yet. The file gets its name only when it is complete and locked. Raises FileExistsError if the
    name is taken.
    """
    words = superblock.new_page(fingerprint, slab_bytes, slabs, cluster)
    fd = os.open(os.path.dirname(path), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        lock(fd, 0, ALIGN)
        layout = superblock.layout(slab_bytes, slabs)
        os.ftruncate(fd, layout.size)
        os.posix_fallocate(fd, 0, layout.headers)  # every client writes to these pages, whichever slab it uses
        os.pwrite(fd, words.tobytes(), 0)
        os.link(f"/proc/self/fd/{fd}", path, dst_dir_fd=fd, follow_symlinks=True)  # with dir_fd, Python calls linkat
    except BaseException:
        os.close(fd)
        raise
    return ArenaFile(path, fd, words)


def adopt(path: str, fingerprint: bytes, slab_bytes: int, slabs: int, cluster: bytes = NO_CLUSTER) -> ArenaFile | None:
    """Take over the file that a dead owner left behind. Returns None if there is no such file.

    Doesn't touch a file whose owner is alive, is another user, or belongs to another running Ray cluster. Unlinks a
    file with a different fingerprint or geometry; clients that have mapped that file keep their mapping.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and _take(path, fd, cluster):
            words = superblock.read(fd)
            if words is not None and superblock.matches(words, fingerprint, slab_bytes, slabs):
                superblock.put_cluster(fd, cluster)
                return ArenaFile(path, fd, words)
            os.unlink(path)
    except FileNotFoundError:
        pass
    os.close(fd)
    return None


def has_name(path: str, fd: int) -> bool:
    """Whether the path still names the open file."""
    try:
        named, opened = os.stat(path), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def attach(path: str, nonce: bytes) -> ArenaFile:
    """Open the file of the arena that this node's store serves. path: see `Mapping.door`.

    Raises ArenaMismatch if the file has another nonce, or can't be opened.
    """
    follow = 0 if path.startswith("/proc/") else os.O_NOFOLLOW  # /proc names a descriptor by a symbolic link
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | follow)
    except OSError as error:
        raise ArenaMismatch(_mismatch(path, f"cannot be opened ({error.strerror})")) from error
    words = superblock.read(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    if words is None or superblock.nonce_of(words) != nonce:
        os.close(fd)
        raise ArenaMismatch(_mismatch(path, "is another file than the one that this node's store serves"))
    return ArenaFile(path, fd, words)


def arenas_of(pool: str, cluster: bytes = NO_CLUSTER) -> list[str]:
    """Return the paths of this user's arenas of a pool. Leaves out arenas of other Ray clusters that are running."""
    ours, others = re.compile(rf"raykv-{pool}-{os.getuid()}-(gpu-)?\d+"), _others(cluster)
    found = [entry.path for entry in os.scandir(SHM) if ours.fullmatch(entry.name)]
    return [path for path in found if _cluster_of(path) not in others]


def left_behind(pool: str, cluster: bytes = NO_CLUSTER) -> list[str]:
    """Return the paths in `arenas_of` that no living store owns."""
    return [path for path in arenas_of(pool, cluster) if not _owned(path)]


def remove_left_behind(pool: str, cluster: bytes = NO_CLUSTER) -> int:
    """Remove the files in `arenas_of` that no living store owns. Returns how many files were removed."""
    return sum(remove(path, cluster) for path in left_behind(pool, cluster))


def remove(path: str, cluster: bytes = NO_CLUSTER) -> bool:
    """Remove an arena, unless a living store or another Ray cluster owns it. Returns whether it was removed.

    Takes the owner's lock first, as another store may meanwhile have adopted the file, or created a new one.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        unowned = _take(path, fd, cluster)
        if unowned:
            os.unlink(path)
        return unowned
    except FileNotFoundError:  # another stopping store was faster
        return False
    finally:
        os.close(fd)


def _take(path: str, fd: int, cluster: bytes) -> bool:
    """Lock a left-behind file. Returns False if the file has an owner, was unlinked, or is another Ray cluster's."""
    return lock(fd, 0, ALIGN) and has_name(path, fd) and superblock.cluster_of(fd) not in _others(cluster)


def _others(cluster: bytes) -> set[bytes]:
    """Return the other Ray clusters that have nodes on this machine."""
    return raylets.clusters() - {cluster}


def _cluster_of(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # it may be a pipe
    except OSError:
        return NO_CLUSTER
    try:
        return superblock.cluster_of(fd)
    finally:
        os.close(fd)


def _owned(path: str) -> bool:
    """Whether a living store, or another user's process, owns the file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        return held_elsewhere(fd, 0, ALIGN)  # doesn't lock: a restarting store must find the lock free
    finally:
        os.close(fd)


def _mismatch(path: str, what: str) -> str:
    if path.startswith("/proc/"):
        return (
            f"{path} {what}. Somebody removed the shared memory of this node's store, as logind does at the end of a "
            f"user's last session: only processes of the store's user that see its /proc still reach it. Set "
            f"RemoveIPC=no in logind.conf, and end process {path.split('/')[2]}: Ray starts the store again, with a "
            f"new file and without its blocks"
        )
    return (
        f"{path} {what}. This process must see its node store's shared memory: mount the Ray pod's "
        f"{os.path.dirname(path)} into this container (an emptyDir with medium: Memory) and run as the same user"
    )
