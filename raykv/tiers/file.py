"""Stores blocks as files. Direct I/O bypasses the page cache, if the file system and the block's address allow that.

A block is one file: a page with its head, then its body. A file is written under a temporary name and then renamed, so
a file with a block's name is complete. Only a loss of power may leave a file with a wrong length or checksum. The tier
keeps some deleted files and overwrites them: in a full tier, each new block takes the place of a deleted block.
"""

import contextlib
import errno
import mmap
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import count
from typing import TypeVar
from urllib.parse import unquote

import numpy as np

from raykv.system.file_locks import lock
from raykv.system.owners import is_private
from raykv.tiers.base import FOLDERS, HEAD_BYTES, MARKER, Block, TierUrl, batches, key_of, path_of
from raykv.tiers.strangers import Strangers

PAGE = 4096  # direct I/O requires addresses, lengths and offsets that are multiples of a page
IN_FLIGHT = 4  # number of files that are read or written at the same time
SPARE_BYTES = 128 << 20  # maximum bytes of deleted files to keep: overwriting a file is cheaper than creating one
# Errors of `open` for a link, a socket, a pipe with direct I/O, a file where a folder should be, another user's file.
NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EINVAL, errno.ENOTDIR, errno.EACCES)
Row = TypeVar("Row")
Answer = TypeVar("Answer")
_TEMPORARY = re.compile(r"[0-9a-f]{2}/[0-9a-f]{32}\.[0-9a-f]{16}-\d+")


class _Pages(threading.local):
    """Two pages per thread. A head is written from `out` and read into `into`. The remainder of `out` stays zero."""

    def __init__(self) -> None:
        self.out, self.into = (memoryview(mmap.mmap(-1, PAGE)) for _ in range(2))


class FileTier:
    """A folder of files.

    A folder that is not shared has a subfolder for each store. A restarted store takes the first unused subfolder,
    which is usually its earlier subfolder.
    """

    def __init__(self, url: TierUrl) -> None:
        """Raise ValueError or OSError, with advice, if the folder can't be written or the disk is too small."""
        self.shared = bool(url.shared)
        self._pages, self._numbers = _Pages(), count()
        self._spare: list[tuple[str, int]] = []  # deleted files that may be overwritten: paths and sizes
        self._spare_bytes = 0
        self._spare_lock = threading.Lock()  # guards `_spare` and `_spare_bytes`
        self._threads = ThreadPoolExecutor(IN_FLIGHT, "raykv-file")
        self._token = secrets.token_hex(8)
        self._folder = self._lock = -1
        try:
            self._open(url)
        except OSError as error:
            self.close()
            advice = "name a folder to write in"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                advice = (
                    f"name one on a disk with more free inodes (df -i): {len(FOLDERS)} for folders, and one a block"
                )
            raise OSError(error.errno, f"external={url.text}: {error.strerror}: {advice}") from error
        except ValueError:
            self.close()
            raise

    def _open(self, url: TierUrl) -> None:
        path = _path(url)
        os.makedirs(path, 0o700, exist_ok=True)
        if self.shared:
            self._folder = _folder(path, "shared", url)
        else:
            self._folder, self._lock = _own_folder(path, url)
        for name in FOLDERS:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._folder)
        self._direct = _direct_flag(self._folder)
        taken = self._clean_up()
        disk = os.statvfs(self._folder)
        room = disk.f_bavail * disk.f_frsize + taken
        if disk.f_blocks and url.capacity > room:  # some file systems report no size
            raise ValueError(
                f"external={url.text}: capacity={url.capacity} bytes, but that disk has {room} free or taken by this "
                f"pool: lower capacity, or name a folder on another disk"
            )

    def _clean_up(self) -> int:
        """Remove files that a store was writing when it died. Returns the number of bytes that all blocks take."""
        taken = 0
        for path, found in self._files(Strangers()):
            if key_of(path):
                taken += found.st_blocks * 512  # only allocated bytes: deleting a sparse file frees no more
            elif not self.shared and _TEMPORARY.fullmatch(path):  # another store may write in a shared folder
                os.unlink(path, dir_fd=self._folder)
        return taken

    def put_many(self, blocks: Sequence[Block]) -> list[bool]:
        return self._each(self._put, blocks)

    def get_many(self, keys: Sequence[bytes], out: Sequence[memoryview]) -> list[bytes | None]:
        return self._each(self._get, list(zip(keys, out, strict=True)))

    def get_heads(self, keys: Sequence[bytes]) -> list[bytes | None]:
        parts = [keys[at::IN_FLIGHT] for at in range(IN_FLIGHT)]
        heads: list[bytes | None] = [None] * len(keys)
        for at, found in enumerate(self._each(lambda part: [self._get_head(key) for key in part], parts)):
            heads[at::IN_FLIGHT] = found
        return heads

    def delete_many(self, keys: Sequence[bytes]) -> None:
        for path in map(path_of, keys):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._remove(path)

    def scan(self) -> Iterator[list[tuple[bytes, int]]]:
        strangers = Strangers()
        files = [(key_of(path), info) for path, info in self._files(strangers)]
        strangers.warn("things in its folder are no blocks of raykv")
        found = sorted((info.st_mtime_ns, key, info.st_size) for key, info in files if key)
        yield from batches([(key, max(0, size - PAGE)) for _, key, size in found if key != MARKER])

    def close(self) -> None:
        self._threads.shutdown()
        self._remove_spare()
        for fd in (self._folder, self._lock):
            if fd >= 0:
                os.close(fd)
        self._folder = self._lock = -1

    def _each(self, work: Callable[[Row], Answer], rows: Sequence[Row]) -> list[Answer]:
        if len(rows) == 1:
            return [work(rows[0])]
        tasks = [self._threads.submit(work, row) for row in rows]
        wait(tasks)  # even if a task failed, as other tasks still use the caller's memory
        return [task.result() for task in tasks]

    def _put(self, block: Block) -> bool:
        try:
            self._write(block)
        except (IsADirectoryError, NotADirectoryError):  # a stranger's folder or file is in the way
            return False
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return self._remove_spare() and self._put(block)
        return True

    def _write(self, block: Block) -> None:
        path, page = path_of(block.key), self._pages.out
        page[:HEAD_BYTES] = block.head
        temporary, fd = self._new_file(path, os.O_WRONLY | self._flag(block.body))
        try:
            try:
                size = _move(os.pwritev, fd, page, block.body)
                if os.fstat(fd).st_size > size:
                    os.ftruncate(fd, size)
            finally:
                os.close(fd)
            os.rename(temporary, path, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._folder)
            raise

    def _new_file(self, path: str, flags: int) -> tuple[str, int]:
        """Return path and descriptor of a file that is to be written, and then renamed to `path`."""
        spare = self._pop_spare()
        if spare is not None:
            with contextlib.suppress(FileNotFoundError):
                return spare, os.open(spare, flags | os.O_NOFOLLOW, dir_fd=self._folder)
        temporary = self._temporary(path)
        return temporary, os.open(temporary, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._folder)

    def _remove(self, path: str) -> None:
        """Delete a file, or keep it as a spare file. A late reader may get wrong bytes, which its caller detects."""
        found = os.stat(path, dir_fd=self._folder, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):  # a stranger
            return
        if not self.shared:
            size = found.st_size
            with self._spare_lock:
                if self._spare_bytes + size <= SPARE_BYTES:
                    spare = self._temporary(path)
                    os.rename(path, spare, src_dir_fd=self._folder, dst_dir_fd=self._folder)
                    self._spare.append((spare, size))
                    self._spare_bytes += size
                    return
        os.unlink(path, dir_fd=self._folder)

    def _pop_spare(self) -> str | None:
        with self._spare_lock:
            if not self._spare:
                return None
            spare, size = self._spare.pop()
            self._spare_bytes -= size
            return spare

    def _remove_spare(self) -> bool:
        """Remove the spare files. Returns whether a file was removed."""
        removed = False
        while (spare := self._pop_spare()) is not None:
            with contextlib.suppress(OSError):
                os.unlink(spare, dir_fd=self._folder)
                removed = True
        return removed

    def _temporary(self, path: str) -> str:
        return f"{path}.{self._token}-{next(self._numbers)}"

    def _get(self, row: tuple[bytes, memoryview]) -> bytes | None:
        key, out = row
        page, size = self._pages.into, PAGE + out.nbytes
        return bytes(page[:HEAD_BYTES]) if self._read(key, self._flag(out), size, page, out) == size else None

    def _get_head(self, key: bytes) -> bytes | None:
        page = self._pages.into
        length = self._read(key, self._direct, None, page)
        return None if length is None else bytes(page[: min(length, HEAD_BYTES)])

    def _read(self, key: bytes, flag: int, size: int | None, *views: memoryview) -> int | None:
        """Read a block's file from its start. Returns how many bytes were read, or None if there is no such file.

        Returns 0 if the file is not a regular file, has a size other than `size`, or can't be read.
        """
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flag
            fd = os.open(path_of(key), flags, dir_fd=self._folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            return 0
        try:
            found = os.fstat(fd)
            fits = stat.S_ISREG(found.st_mode) and size in (None, found.st_size)
            return _move(os.preadv, fd, *views) if fits else 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return 0  # one bad sector does not mean that the disk has failed
        finally:
            os.close(fd)

    def _flag(self, body: memoryview) -> int:
        """Return O_DIRECT if the body's address and length allow it, else 0."""
        if not body.nbytes:
            return self._direct
        address = np.frombuffer(body, np.uint8).__array_interface__["data"][0]
        return 0 if address % PAGE or body.nbytes % PAGE else self._direct

    def _files(self, strangers: Strangers) -> Iterator[tuple[str, os.stat_result]]:
        """Yield files that have a block's name or a temporary name. Adds all other things to `strangers`."""
        for name in sorted(set(os.listdir(self._folder)) - {*FOLDERS, "lock"}):
            if not name.startswith("probe-"):  # another store that opens a shared folder writes a probe
                strangers.add(name)
        for name in FOLDERS:
            try:
                folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._folder)
            except NotADirectoryError:
                strangers.add(name)
                continue
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        with contextlib.suppress(FileNotFoundError):  # renamed or deleted meanwhile
                            path, found = f"{name}/{entry.name}", entry.stat(follow_symlinks=False)
                            if stat.S_ISREG(found.st_mode) and (key_of(path) or _TEMPORARY.fullmatch(path)):
                                yield path, found
                            else:
                                strangers.add(path)
            finally:
                os.close(folder)


def _path(url: TierUrl) -> str:
    path = unquote(url.parts.path)
    if url.parts.netloc not in ("", "localhost") or not path.strip("/"):
        raise ValueError(f"external={url.text}: a file URL has three slashes before its path: file:///mnt/nvme/raykv")
    return path


def _own_folder(path: str, url: TierUrl) -> tuple[int, int]:
    """Return descriptors of the first subfolder that no other store uses, and of its lock file. Locks this file."""
    for number in count():
        folder = _folder(path, str(number), url)
        fd = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        if lock(fd, 0, 1):
            return folder, fd
        os.close(fd)
        os.close(folder)
    raise AssertionError


def _folder(path: str, name: str, url: TierUrl) -> int:
    """Return a subfolder's descriptor. Raises ValueError if other users could put links into an unshared folder."""
    there = os.path.join(path, name)
    os.makedirs(there, 0o700, exist_ok=True)
    folder = os.open(there, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    info = os.fstat(folder)
    if url.shared or is_private(info):
        return folder
    os.close(folder)
    raise ValueError(
        f"external={url.text}: {there} is of user {info.st_uid} with mode {info.st_mode & 0o777:o}, and this store's "
        f"user is {os.getuid()}: others could write there. chown and chmod 700 it, or name another folder"
    )


def _direct_flag(folder: int) -> int:
    """Return O_DIRECT, or 0 if the file system refuses it. Raises OSError if the folder can't be written."""
    try:
        _probe(folder, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _probe(folder, 0)
        return 0
    return os.O_DIRECT


def _probe(folder: int, flag: int) -> None:
    name = f"probe-{secrets.token_hex(8)}"
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | flag, 0o600, dir_fd=folder)
        try:
            os.write(fd, mmap.mmap(-1, PAGE))
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)


def _move(call: Callable[[int, list[memoryview], int], int], fd: int, *views: memoryview) -> int:
    """Read or write all views. Returns the number of moved bytes. The number is smaller if the file ends early."""
    done, rest = 0, [view for view in views if view.nbytes]
    while rest and (moved := call(fd, rest, done)):
        done += moved
        while rest and moved >= rest[0].nbytes:
            moved -= rest.pop(0).nbytes
        if rest:
            rest[0] = rest[0][moved:]
    return done
