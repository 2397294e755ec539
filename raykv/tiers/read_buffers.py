"""Memory into which an external tier's blocks are read. It is kept for the next reads."""

import mmap
import threading

from raykv.protocol.location import ALIGN


class ReadBuffers:
    """Buffers aligned to pages, as direct I/O needs. Thread-safe."""

    def __init__(self, most: int) -> None:
        """most: how many free buffers are kept."""
        self._most, self._free = most, list[mmap.mmap]()
        self._lock = threading.Lock()  # guards `_free`; taken last

    def take(self, size: int) -> mmap.mmap:
        """A buffer of at least `size` bytes. Prefers a used buffer, whose memory the kernel has already allocated."""
        with self._lock:
            for i, buffer in enumerate(self._free):
                if len(buffer) >= size:
                    return self._free.pop(i)
        return mmap.mmap(-1, -(-size // ALIGN) * ALIGN)

    def give_back(self, buffer: mmap.mmap) -> None:
        """Keep a buffer that nobody writes to any more."""
        with self._lock:
            if len(self._free) < self._most:
                self._free.append(buffer)
