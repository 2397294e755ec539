"""Write locks on byte ranges of a file. The kernel drops a lock when its holder dies.

They are open-file-description locks (F_OFD_SETLK), which also work between PID namespaces. An arena's owner
locks the file's first page, a writer locks its slot's header, and a file tier locks its folder's lock file.
"""

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

AGAIN_S = 0.001  # seconds between two attempts to lock slots that others have locked
SHARED = 1 << 62  # offset of a byte beyond the end of every file: see SlotLocks.share
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, len, pid


def lock(fd: int, start: int, length: int) -> bool:
    """Lock a range of bytes, without waiting. Returns False if another open file has a lock in the range."""
    return _set(fd, fcntl.F_WRLCK, start, length)


def held_elsewhere(fd: int, start: int, length: int) -> bool:
    """Whether another open file has a lock in the range."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _set(fd: int, kind: int, start: int, length: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


class SlotLocks:
    """Write locks on numbered slots, between threads as well as processes.

    The kernel's locks belong to the open file description, which all threads share. So `_held` excludes other threads.
    """

    def __init__(self, fd: int, base: int, width: int) -> None:
        """fd: file descriptor, which the object now owns. It is closed after `close`, when the last lock is dropped.

        The range of slot i begins at byte base + i * width, and has `width` bytes.
        """
        self.fd = fd
        self._base, self._width = base, width
        self._held: set[int] = set()  # slots that a thread of this process has locked
        self._mutex = threading.Lock()  # guards `_held`, `_closed` and closing `fd`
        self._closed = False
        self._shares: set[int] = set()  # file descriptors that `share` opened
        _all.add(self)

    @contextmanager
    def locked(self, slots: Iterable[int], patience: float = 0.0) -> Iterator[set[int]]:
        """Lock the slots that nobody else has locked, and yield their numbers. Negative numbers are ignored.

        patience: seconds to wait for slots that other processes have locked.
        """
        mine = self._take({slot for slot in slots if slot >= 0}, patience)
        try:
            yield mine
        finally:
            self._drop(mine)

    def _take(self, slots: set[int], patience: float) -> set[int]:
        with self._mutex:
            if self._closed:
                return set()
            slots = slots - self._held
            self._held |= slots
        refused, end = slots, time.monotonic() + patience
        try:
            while (refused := self._refused(refused)) and time.monotonic() < end:
                time.sleep(AGAIN_S)
        except BaseException:
            self._drop(slots)
            raise
        with self._mutex:
            self._held -= refused
        return slots - refused

    def _refused(self, slots: set[int]) -> set[int]:
        """Lock slots. Returns the slots that other processes have locked."""
        refused: set[int] = set()
        for start, stop in runs(slots):
            if self._lock(start, stop):
                continue
            refused.update(range(start, stop))
            if stop - start > 1:
                refused.difference_update(i for i in range(start, stop) if self._lock(i, i + 1))
        return refused

    def _drop(self, slots: set[int]) -> None:
        with self._mutex:
            for start, stop in runs(slots):
                _set(self.fd, fcntl.F_UNLCK, self._base + start * self._width, (stop - start) * self._width)
            self._held -= slots
            if self._closed and not self._held:
                self._close_fd()

    def _lock(self, start: int, stop: int) -> bool:
        return lock(self.fd, self._base + start * self._width, (stop - start) * self._width)

    @contextmanager
    def locked_range(self, start: int, stop: int) -> Iterator[bool]:
        """Lock all slots from start to stop - 1, or none. Yields whether they are locked. Other threads must wait."""
        with self._mutex:
            got = not self._closed and not any(start <= i < stop for i in self._held) and self._lock(start, stop)
            try:
                yield got
            finally:
                if got:
                    _set(self.fd, fcntl.F_UNLCK, self._base + start * self._width, (stop - start) * self._width)

    def owned_elsewhere(self, length: int) -> bool:
        """Whether another open file has a lock in the first `length` bytes. Always False after `close`."""
        with self._mutex:
            return self.fd >= 0 and held_elsewhere(self.fd, 0, length)

    def share(self) -> Callable[[], None]:
        """Make `shared_elsewhere` true for other openers of the file, until the returned function is called.

        Raises OSError if the file can't be opened again or locked.
        """
        with self._mutex:
            if self.fd < 0:
                return lambda: None
            # a second open file description: it outlives `close`, and keeps no slot lock if a forked child inherits it
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
            self._shares.add(fd)

        def end() -> None:
            with self._mutex:
                if fd in self._shares:
                    self._shares.remove(fd)
                    os.close(fd)

        try:
            _set(fd, fcntl.F_RDLCK, SHARED, 1)
        except OSError:
            end()
            raise
        return end

    def shared_elsewhere(self) -> bool:
        """Whether an opener of the file has called `share`, and has not ended the share."""
        with self._mutex:
            return self.fd >= 0 and held_elsewhere(self.fd, SHARED, 1)

    def disown(self, length: int) -> None:
        """Drop the lock on the first `length` bytes. From now on `owned_elsewhere` is false in other processes."""
        with self._mutex:
            if self.fd >= 0:
                _set(self.fd, fcntl.F_UNLCK, 0, length)

    def busy(self, start: int, stop: int) -> set[int]:
        """Return the slots from start to stop - 1 that are locked by this process or another."""
        with self._mutex:
            busy = {i for i in self._held if start <= i < stop}
            todo = [(start, stop)] if not self._closed else []
            while todo:
                start, stop = todo.pop()
                found = self._conflict(start, stop)
                if found is not None:  # the kernel returns any of the locked runs, not always the first
                    busy.update(range(*found))
                    todo += [part for part in ((start, found[0]), (found[1], stop)) if part[0] < part[1]]
        return busy

    def _conflict(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return (start, stop) of a run of these slots that another open file has locked; None if there is none."""
        probe = (fcntl.F_WRLCK, os.SEEK_SET, self._base + start * self._width, (stop - start) * self._width, 0)
        answer = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, struct.pack(_FLOCK, *probe))
        kind, _, at, length, _ = struct.unpack(_FLOCK, answer)
        if kind == fcntl.F_UNLCK:
            return None
        first, last = (at - self._base) // self._width, -(-(at + length - self._base) // self._width)
        return max(start, first), min(stop, last) if length else stop

    @property
    def named(self) -> bool:
        """Whether the file still has a name. Always True after `close`."""
        with self._mutex:
            return self.fd < 0 or os.fstat(self.fd).st_nlink > 0

    def close(self) -> None:
        """Refuse new locks. Close the file when the last lock is dropped, as copies may still be running."""
        with self._mutex:
            self._closed = True
            if not self._held:
                self._close_fd()

    def _close_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def after_fork(self) -> None:
        """In a forked child: open the file again. A child must not keep the parent's locks after the parent's end."""
        inherited, self.fd = self.fd, -1
        self._mutex, self._held = threading.Lock(), set()
        for fd in self._shares:  # otherwise the child would keep the parent's locks
            os.close(fd)
        self._shares = set()
        try:
            if not self._closed:
                self.fd = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            self._closed = True
        if inherited >= 0:
            os.close(inherited)


_all: WeakSet[SlotLocks] = WeakSet()


def _after_fork() -> None:
    for locks in list(_all):
        locks.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def runs(slots: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each run of adjacent numbers."""
    start = stop = None
    for slot in sorted(slots):
        if slot != stop:
            if start is not None and stop is not None:
                yield start, stop
            start = slot
        stop = slot + 1
    if start is not None and stop is not None:
        yield start, stop
