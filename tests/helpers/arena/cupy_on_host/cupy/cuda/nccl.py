"""NCCL on host memory: communicators of two ranks, in one process or in two, over a Unix socket.

Like the real NCCL, it waits for ever for a peer: in the constructor and in the first group until the peer comes, and on
the stream until the peer posts. A send is done when the peer has received it. Tests replace `before_connect`,
`after_meeting` and `before_move` to wait for `aborted`, or to fail. With `silent` a communicator is not told that its
peer is gone, as over NVLink.

A communicator takes memory of its GPU from when both ranks have met until it is aborted. If its init fails, the end of
its object does not give the memory back, as on a GPU. Whoever has kept the object must abort it.
"""

import contextlib
import ctypes
import queue
import secrets
import socket
import struct
import threading

from cupy import cuda
from cupy.cuda import runtime

available = True
NCCL_UINT8 = 1
_NAMES = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR",
    2: "NCCL_ERROR_SYSTEM_ERROR",
    3: "NCCL_ERROR_INTERNAL_ERROR",
    4: "NCCL_ERROR_INVALID_ARGUMENT",
    5: "NCCL_ERROR_INVALID_USAGE",
    6: "NCCL_ERROR_REMOTE_ERROR",
}
_SIZE = struct.Struct("<q")
_roots = {}  # sockets at which rank 0 listens, by unique id
_group = threading.local()
_BYTES = 1 << 20  # of GPU memory that a communicator takes
_streams = {}  # by a stream's handle, the event that the last moves on it are done

communicators = []
silent = False


def before_connect(communicator):
    pass


def after_meeting(communicator):
    """Called in the middle of an init, when the memory is taken."""


def before_move(communicator, number):
    """Called before each move. number: how many blocks this communicator has moved before."""


class NcclError(RuntimeError):
    def __init__(self, status):
        self.status = status
        super().__init__(f"{_NAMES[status]}: unhandled")


def get_unique_id():
    unique = f"\0raykv-nccl-{secrets.token_hex(8)}".encode().ljust(128, b".")
    root = socket.socket(socket.AF_UNIX)
    root.bind(unique[:100])
    root.listen()
    _roots[unique] = root
    return unique


def groupStart():
    _group.depth = getattr(_group, "depth", 0) + 1
    if _group.depth == 1:
        _group.moves = []


def groupEnd():
    _group.depth -= 1
    if _group.depth == 0:
        for communicator in {move.communicator: None for move in _group.moves}:
            communicator._launch([move for move in _group.moves if move.communicator is communicator])


def end():
    """Have all communicators that wait for a peer fail."""
    for root in _roots.values():
        _shut(root)
    for communicator in communicators:
        communicator._hang_up()


class _Move:
    def __init__(self, communicator, sends, address, size):
        self.communicator, self.sends, self.address, self.size = communicator, sends, address, size


class NcclCommunicator:
    def __new__(cls, *_, **__):
        self = super().__new__(cls)
        self.aborted, self.error, self.moved, self._connected = threading.Event(), 0, 0, False
        self._turn = threading.Lock()
        self._launched = queue.SimpleQueue()  # moves, which are done in order, as on a stream
        self._peer = socket.socket(socket.AF_UNIX)
        self._memory, self._there = None, False
        return self

    def __init__(self, ndev, commId, rank, config=None):
        assert type(commId) is bytes and len(commId) == 128 and ndev in (1, 2) and rank in range(ndev)
        runtime.check()
        self.rank, self.device, self.unique, self._partner = rank, runtime.getDevice(), commId, ndev - 1 - rank
        self._there = True
        communicators.append(self)
        before_connect(self)
        if self._partner != self.rank:
            try:
                self._meet()
            except OSError:
                raise NcclError(2) from None
        self._memory = runtime.malloc(_BYTES)
        after_meeting(self)
        if self.aborted.is_set():
            raise NcclError(3)

    def _meet(self):
        if self.aborted.is_set():
            raise OSError("aborted")
        if self.rank == 0:
            self._peer, _ = _roots[self.unique].accept()
        else:
            self._peer.connect(self.unique[:100])
        self._peer.sendall(b"!")
        self._receive(1)

    def send(self, sendbuf, count, datatype, peer, stream):
        self._post(True, sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._post(False, recvbuf, count, datatype, peer, stream)

    def check_async_error(self):
        assert not self.aborted.is_set(), "of a communicator that is gone"
        if self.error:
            raise NcclError(self.error)

    def abort(self):
        if not self._there:
            return
        assert not self.aborted.is_set(), "twice is a crash"
        before = runtime.getDevice()
        runtime.setDevice(self.device)
        self.aborted.set()
        self._hang_up()
        if self.rank == 0 and self.unique in _roots:  # ends an init that waits for the peer
            _shut(_roots[self.unique])
        if self._memory is not None:
            runtime.forget(self._memory)
        runtime.setDevice(before)

    def _post(self, sends, address, size, datatype, peer, stream):
        assert datatype == NCCL_UINT8 and peer == self._partner and not self.aborted.is_set()
        with runtime._mutex:
            runtime.reach(self.device, address, size)
        groupStart()
        move = _Move(self, sends, address, size)
        move.stream = stream
        _group.moves.append(move)
        groupEnd()

    def _launch(self, moves):
        if self._partner == self.rank:
            sends, receives = ([move for move in moves if move.sends is kind] for kind in (True, False))
            for of, to in zip(sends, receives, strict=True):
                runtime.memcpyAsync(to.address, of.address, of.size, runtime.memcpyDefault, of.stream)
            return
        if not self._connected:  # the first group waits for the peer's
            try:
                self._peer.sendall(b"?")
                self._receive(1)
            except OSError:
                raise NcclError(6) from None
            self._connected = True
        done = threading.Event()
        (stream,) = {move.stream for move in moves}
        _streams[stream] = done
        runtime.enqueue(stream, done.wait)
        self._launched.put((moves, done))
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        with self._turn:
            moves, done = self._launched.get()
            try:
                for move in moves:
                    before_move(self, self.moved)
                    if self.aborted.is_set():
                        break
                    self._send(move) if move.sends else self._receive_into(move)
                    self.moved += 1
            except OSError:
                self.error = 0 if silent else self.error or 6
                self.aborted.wait()
            done.set()

    def _send(self, move):
        self._peer.sendall(_SIZE.pack(move.size) + ctypes.string_at(move.address, move.size))
        self._receive(1)

    def _receive_into(self, move):
        (size,) = _SIZE.unpack(self._receive(_SIZE.size))
        if size != move.size:
            self.error = 5
            self._hang_up()
            raise OSError("sizes differ")
        data = self._receive(size)
        if not self.aborted.is_set():
            ctypes.memmove(move.address, data, size)
        self._peer.sendall(b".")

    def _receive(self, count):
        data = b""
        while len(data) < count:
            more = self._peer.recv(count - len(data))
            if not more:
                raise OSError("the peer is gone")
            data += more
        return data

    def _hang_up(self):
        _shut(self._peer)


def _shut(connection):
    with contextlib.suppress(OSError):  # the peer has hung up already
        connection.shutdown(socket.SHUT_RDWR)


def _done(stream):
    return stream.ptr not in _streams or _streams[stream.ptr].is_set()


cuda.Stream.done = property(_done)
