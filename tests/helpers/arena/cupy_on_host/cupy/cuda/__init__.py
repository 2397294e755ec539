"""Devices, streams, events and memory that is freed with its object."""

import mmap
import threading
import weakref
from types import SimpleNamespace

from cupy.cuda import driver, runtime

__all__ = ["Device", "Memory", "Stream", "alloc_pinned_memory", "driver", "get_current_stream", "runtime"]
_local = threading.local()


class Device:
    def __init__(self, ordinal):
        self.id = ordinal

    def __enter__(self):
        self._before = runtime.getDevice()
        runtime.setDevice(self.id)
        return self

    def __exit__(self, *_):
        runtime.setDevice(self._before)


class Stream:
    def __init__(self, non_blocking=False):
        runtime.check()
        driver.current()
        self.ptr = runtime.new_handle()

    def __enter__(self):
        self._before = get_current_stream()
        _local.stream = self
        return self

    def __exit__(self, *_):
        _local.stream = self._before

    def synchronize(self):
        runtime.streamSynchronize(self.ptr)


def get_current_stream():
    return getattr(_local, "stream", SimpleNamespace(ptr=0))


class Memory:
    def __init__(self, size):
        self.ptr, self.size = runtime.malloc(size), size
        weakref.finalize(self, runtime.forget, self.ptr)


class PinnedMemoryPointer(mmap.mmap):
    pass


def alloc_pinned_memory(size):
    memory = PinnedMemoryPointer(-1, size)
    address = runtime.address_of(memory)
    runtime.hostRegister(address, size, 0)
    weakref.finalize(memory, runtime._pinned.pop, address, None)
    return memory
