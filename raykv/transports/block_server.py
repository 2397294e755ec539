"""Serves an arena's blocks over TCP.

A connection begins as described in raykv.line.wire. Then the reader sends requests. Each request is a frame of n
LOCATIONs and n keys. The answer is n CLAIMs, and then the bytes of the blocks that are there. A CLAIM says whether a
block is there, and contains the position and checksum from its header. The reader must verify the bytes.
"""

import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from raykv.arena.arena import Arena, BlockHeaders, PeerBlocks
from raykv.config import KEYS_PER_CALL
from raykv.errors import DeviceError
from raykv.line import wire
from raykv.line.listener import Connection, Listener
from raykv.line.wire import Stream
from raykv.protocol.calls import CLIENT
from raykv.protocol.location import KEY_BYTES, LOCATION
from raykv.protocol.transfers import data_deadline

log = logging.getLogger("raykv")

# Fields of a block's header. sum: the block's xxh3_64 when it was written
CLAIM = np.dtype([("there", "?"), ("position", "<u4"), ("sum", "<u8")])
REQUEST_BYTES = LOCATION.itemsize + KEY_BYTES  # bytes of a request for each block
SENDERS = 64  # maximum number of threads that send blocks; each slow reader occupies one


class BlockServer:
    """Serves an arena's blocks to readers that know its token.

    A connection occupies a thread only while blocks are sent over it.
    """

    def __init__(self, arena: Arena, host: str) -> None:
        """host: an address of this node to listen on. Raises OSError if this is not possible."""
        self._arena = arena
        self._senders = ThreadPoolExecutor(SENDERS, thread_name_prefix="raykv-send")
        self._senders.submit(int)  # starts a first thread, which `_lend` relies on
        self._listener = Listener(host, "raykv-listen", {CLIENT: KEYS_PER_CALL * REQUEST_BYTES}, self._lend)
        self.address = self._listener.address

    def close(self) -> None:
        """Stop serving."""
        self._listener.close()
        self._senders.shutdown(wait=False, cancel_futures=True)

    def _lend(self, connection: Connection, request: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # if no thread can be started, a running thread will send
            self._senders.submit(self._send_blocks, connection, request)

    def _send_blocks(self, connection: Connection, request: bytes) -> None:
        """Answer a request, and then requests that have arrived meanwhile: a reader sends its next request early."""
        more: bytes | None = request
        try:
            while more is not None:
                self._answer(connection.socket, more)
                more = self._listener.next_frame(connection)
        except Exception as error:
            expected = isinstance(error, (OSError, ValueError, DeviceError))  # otherwise it is a bug in raykv
            level = logging.DEBUG if expected else logging.ERROR
            log.log(level, "a connection that reads from here ends: %r", error, exc_info=not expected)
            self._listener.drop(connection)
        else:
            self._listener.give_back(connection)

    def _answer(self, peer: Stream, request: bytes) -> None:
        count, rest = divmod(len(request), REQUEST_BYTES)
        if rest:
            raise ValueError(f"a request of {len(request)} bytes is no multiple of {REQUEST_BYTES}")
        locations = np.frombuffer(request, LOCATION, count)
        keys = np.frombuffer(request, np.uint8, offset=locations.nbytes).reshape(-1, KEY_BYTES)
        blocks = self._arena.read_for_peer(locations, keys)
        seconds = data_deadline(int(locations["bytes"][blocks.there].sum()))
        wire.set_limits(peer, seconds)
        views = [claims_of(blocks).data.cast("B"), *(run.data for run in blocks.runs)]
        wire.send_all(peer, views, time.monotonic() + seconds)  # the reader verifies


def claims_of(headers: BlockHeaders | PeerBlocks) -> NDArray[np.void]:
    """Return (n,) CLAIM for n headers."""
    claims = np.zeros(len(headers.there), CLAIM)
    claims["there"], claims["position"], claims["sum"] = headers.there, headers.positions, headers.checksums
    return claims
