"""CUDA's runtime on host memory. Device memory is a memfd, which other processes open through /proc.

CUPY_ON_HOST_BYTES: memory of a device. CUPY_ON_HOST_WORLD: a name; processes with the same name share devices, and
memory stays taken until no such process maps it, and a context takes 1 MiB. Without a name, a process counts only
memory that it has taken itself.
CUDA_VISIBLE_DEVICES: numbers, of 0 and 1. After `lose()` every call fails.
"""

import collections
import contextlib
import ctypes
import itertools
import mmap
import os
import struct
import threading
from types import SimpleNamespace

from cupy.cuda import driver

memoryTypeUnregistered, memoryTypeHost, memoryTypeDevice, memoryTypeManaged = range(4)
memcpyHostToDevice, memcpyDefault, streamLegacy = 1, 4, 1
_ERRORS = {1: "InvalidValue", 2: "MemoryAllocation", 101: "InvalidDevice", 201: "DeviceUninitialized"}
_ERRORS |= {
    900: "StreamCaptureUnsupported",
    700: "IllegalAddress",
    712: "HostMemoryAlreadyRegistered",
    713: "HostMemoryNotRegistered",
}
_HANDLE = struct.Struct("<iiqqi")  # pid, fd, inode, size, GPU

_Block = collections.namedtuple("_Block", "device size memory fd")  # fd: None for another process's memory
_blocks = {}  # by address
_pinned = {}  # lengths by address
_queues = collections.defaultdict(collections.deque)  # by stream, the work that it has yet to do
_ran = collections.Counter()  # by stream, how many pieces of work it has done
_events = {}  # (stream, how many pieces of work the stream has done by then)
new_handle = itertools.count(1 << 20).__next__
_mutex = threading.RLock()
CONTEXT, _contexts = 1 << 20, []  # bytes of a context, and their memory
_lost = None


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        self.status = status
        super().__init__(f"cudaError{_ERRORS[status]}")


def lose(status=700):
    global _lost
    _lost = status


def check():
    if _lost:
        raise CUDARuntimeError(_lost)


def address_of(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _gpus():
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    return [int(name) for name in named if name.strip() in ("0", "1")]


def getDeviceCount():
    check()
    if not _gpus():
        raise CUDARuntimeError(101)
    return len(_gpus())


def getDeviceProperties(device):
    check()
    if not 0 <= device < len(_gpus()):
        raise CUDARuntimeError(101)
    return {"uuid": b"raykv on a host%d" % (_gpus()[device] + 1)}


def getDevice():
    return driver.current() if driver.ctxGetCurrent() else 0


def setDevice(device):
    check()
    driver.make_current(device)


def check_capture():
    """Fail, as calls do that would end other threads' captures, if a capture forbids this call."""
    check()
    if driver.forbids():
        raise CUDARuntimeError(900)
    driver.current()


def memGetInfo():
    check()
    total, device = int(os.environ.get("CUPY_ON_HOST_BYTES", 64 << 20)), getDevice()
    if "CUPY_ON_HOST_WORLD" in os.environ:
        return total - sum(_mapped(_name(device)).values()), total
    own = [block.size for block in _blocks.values() if block.device == device and block.fd is not None]
    return total - sum(own), total


def _name(device):
    return f"cupy-on-host-{os.environ.get('CUPY_ON_HOST_WORLD', '')}-{_gpus()[device]}"


def _mapped(name):
    """Bytes that processes have mapped of a device's memory, by inode."""
    found = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps") as lines:
            for line in lines:
                if f"/memfd:{name} " in line:
                    (start, end), inode = (int(word, 16) for word in line.split()[0].split("-")), line.split()[4]
                    found[inode] = max(found.get(inode, 0), end - start)
    return found


def _made(device):
    if "CUPY_ON_HOST_WORLD" in os.environ:
        fd = os.memfd_create(_name(device))
        os.ftruncate(fd, CONTEXT)
        _contexts.append(mmap.mmap(fd, CONTEXT))
        os.close(fd)


driver.made = _made


def malloc(size):
    check_capture()
    with _mutex:
        if size > memGetInfo()[0]:
            raise CUDARuntimeError(2)
        fd = os.memfd_create(_name(getDevice()))
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
        _blocks[address_of(memory)] = _Block(getDevice(), size, memory, fd)
        return address_of(memory)


def forget(address):
    with _mutex:
        block = _blocks.pop(address, None)
        if block is not None and block.fd is not None:
            os.close(block.fd)


def free(address):
    check_capture()
    if address not in _blocks or _blocks[address].fd is None:
        raise CUDARuntimeError(1)
    forget(address)


def ipcGetMemHandle(address):
    check()
    block = _blocks[address]
    inode = os.fstat(block.fd).st_ino
    return _HANDLE.pack(os.getpid(), block.fd, inode, block.size, _gpus()[block.device]).ljust(64, b"\0")


def ipcOpenMemHandle(handle, flags=1):
    check_capture()
    pid, fd, inode, size, gpu = _HANDLE.unpack_from(handle)
    if pid == os.getpid() or gpu != _gpus()[getDevice()]:
        raise CUDARuntimeError(201)
    try:
        with open(f"/proc/{pid}/fd/{fd}", "r+b") as opened:
            if os.fstat(opened.fileno()).st_ino != inode:
                raise CUDARuntimeError(1)
            memory = mmap.mmap(opened.fileno(), size)
    except OSError:
        raise CUDARuntimeError(1) from None
    _blocks[address_of(memory)] = _Block(getDevice(), size, memory, None)
    return address_of(memory)


def ipcCloseMemHandle(address):
    check_capture()
    if address not in _blocks or _blocks[address].fd is not None:
        raise CUDARuntimeError(1)
    forget(address)


def pointerGetAttributes(address):
    check()
    for start, block in list(_blocks.items()):
        if start <= address < start + block.size:
            return SimpleNamespace(type=memoryTypeDevice, device=block.device)
    return SimpleNamespace(type=memoryTypeUnregistered, device=-2)


def hostRegister(address, size, flags):
    check_capture()
    with _mutex:
        if any(start < address + size and address < start + length for start, length in _pinned.items()):
            raise CUDARuntimeError(712)
        _pinned[address] = size


def hostUnregister(address):
    check_capture()
    if _pinned.pop(address, None) is None:
        raise CUDARuntimeError(713)


def reach(device, address, length):
    """Lose the GPU if it cannot reach that memory."""
    ranges = [(start, block.size) for start, block in list(_blocks.items()) if block.device == device]
    ranges += list(_pinned.items())
    if not any(start <= address and address + length <= start + size for start, size in ranges):
        lose()
        check()


def move(device, to, of, length):
    reach(device, to, length)
    reach(device, of, length)
    ctypes.memmove(to, of, length)


def enqueue(stream, work):
    check()
    with _mutex:
        _queues[stream or streamLegacy].append(work)


def _catch_up(stream, count):
    while _ran[stream] < count:
        _ran[stream] += 1
        _queues[stream].popleft()()


def memcpyAsync(to, of, size, kind, stream):
    device = getDevice()
    enqueue(stream, lambda: move(device, to, of, size))


eventDisableTiming = 2


def eventCreateWithFlags(flags):
    assert flags == eventDisableTiming
    check()
    driver.current()
    return new_handle()


def eventDestroy(event):
    check()
    driver.current()
    _events.pop(event, None)


def eventRecord(event, stream):
    check()
    stream = stream or streamLegacy
    with _mutex:
        _events[event] = stream, _ran[stream] + len(_queues[stream])


def streamWaitEvent(stream, event, flags=0):
    with _mutex:
        recorded = _events[event]
        enqueue(stream, lambda: _catch_up(*recorded))


def streamSynchronize(stream):
    check()
    stream = stream or streamLegacy
    with _mutex:
        _catch_up(stream, _ran[stream] + len(_queues[stream]))
