"""A pull over TCP, in pieces that several streams receive. Pieces for host memory arrive directly in slots."""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from raykv.arena import block_copy
from raykv.arena.checksum import judge
from raykv.arena.gpu_arena import GpuArena
from raykv.config import MIB
from raykv.line import wire
from raykv.line.wire import Stream
from raykv.protocol.transfers import ALTERED, FAILED, PULLED, seconds_left
from raykv.transports.base import PullRequest, records_of
from raykv.transports.block_server import CLAIM

PIECE_BYTES = 4 * MIB  # maximum bytes of a piece: a broken stream loses its piece, and a slow stream delays its piece
AHEAD = 2  # number of pieces that a stream requests ahead, so that the peer always has a piece to send
STALLED_S = 1.0  # time without data after which a stream is closed, if other streams have received their pieces

Mask = NDArray[np.bool_]
Indices = NDArray[np.intp]
Verdicts = NDArray[np.uint8]


class TcpPull:
    """The pieces of a request. Thread-safe: each stream has a thread that calls `carry`.

    size: number of requested bytes. bytes: number of bytes that have arrived. left: number of pieces that have not
    arrived yet. verdicts: (n,) verdicts of the blocks; FAILED until the block arrives.
    """

    def __init__(self, request: PullRequest, streams: int) -> None:
        """streams: expected number of streams that will transfer the pull."""
        source, self._size = request.source, int(request.source["bytes"][0])
        order = np.lexsort((source["slot"], source["slab"]))  # adjacent slots are sent together
        self.size = len(source) * self._size
        share = min(PIECE_BYTES, -(-self.size // streams))
        each = max(1, share // self._size)
        self._pieces = deque(order[i : i + each] for i in range(0, len(order), each))
        self._request = request
        self._mutex = threading.Lock()  # guards all fields below, and `_pieces`
        self._finished = 0.0  # time.monotonic() at which the latest piece arrived
        self._carrying, self._carried = 0, 0  # number of streams in `carry` now, and number of all calls of `carry`
        self.verdicts = np.full(len(source), FAILED, np.uint8)
        self.left, self.bytes = len(self._pieces), 0

    def carry(self, stream: Stream, give_way: Callable[["TcpPull"], None]) -> None:
        """Request pieces and receive them until no piece is left.

        give_way: called before pieces are taken; waits for other pulls that have priority.
        Raises OSError if the stream breaks, so that other streams transfer its pieces, and TimeoutError at the
        request's end.
        """
        asked: deque[Indices] = deque()
        with self._mutex:
            self._carrying, self._carried = self._carrying + 1, self._carried + 1
        try:
            while True:
                if self.waiting:
                    give_way(self)
                while len(asked) < AHEAD and (piece := self._take()) is not None:
                    asked.append(piece)
                    self._ask(stream, piece)
                if not asked:
                    return
                self._receive(stream, asked[0])
                asked.popleft()
        finally:
            with self._mutex:
                self._carrying -= 1
                self._pieces.extendleft(reversed(asked))

    @property
    def waiting(self) -> bool:
        """Whether there is a piece that no stream has taken."""
        return bool(self._pieces)

    def _is_last(self) -> bool:
        """Whether several streams have worked on the pull, and only one of them still does."""
        return self._carrying == 1 < self._carried

    def _take(self) -> Indices | None:
        with self._mutex:
            return self._pieces.popleft() if self._pieces else None

    def _ask(self, stream: Stream, piece: Indices) -> None:
        wire.set_limits(stream, seconds_left(self._request.end))
        stream.sendall(wire.frame(self._request.source[piece].tobytes() + self._request.keys[piece].tobytes()))

    def _receive(self, stream: Stream, piece: Indices) -> None:
        """Receive a piece: the blocks that the peer still has. Set the verdicts of all blocks of the piece."""
        data = bytearray(len(piece) * CLAIM.itemsize)
        self._receive_into(stream, [memoryview(data)])
        claims = records_of(bytes(data), CLAIM, len(piece))
        there = piece[claims["there"]]
        receive = self._into_gpu if isinstance(self._request.arena, GpuArena) else self._into_slots
        verdicts = receive(stream, there, claims[claims["there"]])
        with self._mutex:
            self.verdicts[piece] = ALTERED
            self.verdicts[there] = verdicts
            self.left, self._finished = self.left - 1, time.monotonic()
            self.bytes += len(there) * self._size

    def _into_slots(self, stream: Stream, there: Indices, claims: NDArray[np.void]) -> Verdicts:
        _, keys, arena, target, _ = self._request
        altered = np.zeros(len(there), np.bool_)

        def fill(which: Mask, addresses: NDArray[np.int64]) -> list[int]:
            places = np.zeros(len(which), np.int64)
            places[which] = addresses
            self._receive_into(stream, [self._view(at) for at in places.tolist()])
            sums = block_copy.sums(addresses, self._size)
            altered[which] = np.array(sums, np.uint64) != claims["sum"][which]
            return sums

        written = arena.fill(target[there], keys[there], fill, claims["position"], claims["sum"])
        return np.where(written, PULLED, np.where(altered, ALTERED, FAILED)).astype(np.uint8)

    def _view(self, address: int) -> memoryview:
        """Return a slot's memory. Address 0 means that another writer locks the slot; then return unused memory."""
        memory = (ctypes.c_char * self._size).from_address(address) if address else bytearray(self._size)
        return memoryview(memory).cast("B")

    def _into_gpu(self, stream: Stream, there: Indices, claims: NDArray[np.void]) -> Verdicts:
        _, keys, arena, target, _ = self._request
        blocks = np.empty((len(there), self._size), np.uint8)
        self._receive_into(stream, [blocks.reshape(-1).data])
        written = arena.write(target[there], keys[there], blocks, claims["position"], claims["sum"])
        return judge(written, blocks, claims["sum"])

    def _receive_into(self, stream: Stream, views: list[memoryview]) -> None:
        """Fill these views. Raises TimeoutError at the request's end, ConnectionError if the stream fails or stalls."""
        moved, views = time.monotonic(), [view for view in views if view.nbytes]
        while views:
            if time.monotonic() >= self._request.end:
                raise TimeoutError("the blocks did not arrive in time")
            wire.set_limits(stream, min(STALLED_S, seconds_left(self._request.end)))
            try:
                got = wire.receive_some(stream, views)
            except BlockingIOError:
                if self._finished > moved or self._is_last():
                    raise ConnectionError(f"nothing came for {STALLED_S} s, but over other streams") from None
                continue
            moved = time.monotonic()
            views = wire.after(views, got)
