"""Buffers into which an external tier's blocks are read. Free buffers are kept for later reads."""

import mmap
import threading

from raykv.protocol.location import ALIGN


class ReadBuffers:
    """Buffers aligned to pages, as direct I/O requires. Thread-safe."""

    def __init__(self, most: int) -> None:
        """most: maximum number of free buffers to keep."""
        self._most, self._free = most, list[mmap.mmap]()
        self._lock = threading.Lock()  # guards `_free`; no other lock is taken while it is held

    def take(self, size: int) -> mmap.mmap:
        """Return a buffer of at least `size` bytes. Prefers a used buffer, as its memory is already allocated."""
        with self._lock:
            for i, buffer in enumerate(self._free):
                if len(buffer) >= size:
                    return self._free.pop(i)
        return mmap.mmap(-1, -(-size // ALIGN) * ALIGN)

    def give_back(self, buffer: mmap.mmap) -> None:
        """Keep a buffer that nobody writes to any longer."""
        with self._lock:
            if len(self._free) < self._most:
                self._free.append(buffer)
