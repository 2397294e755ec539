"""Blocks cross nodes over TCP, out of one store's slots and into the other's.

It was measured at three times the speed of Ray's object store, which copies into shared memory on both nodes. A
connection begins as raykv.system.wire says. Then the reader sends requests, each a frame of n LOCATIONs and n keys. It
gets n CLAIMs (whether a block is there, and what its header says) and the bytes of the blocks that are there.
"""

import contextlib
import logging
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from raykv.arena.arena import Arena, BlockHeaders, PeerBlocks
from raykv.arena.checksum import judge
from raykv.config import KEYS_PER_CALL, MIB
from raykv.errors import DeviceError
from raykv.protocol import ALTERED, KEY_BYTES, LOCATION, data_deadline, seconds_left
from raykv.system import wire
from raykv.system.listener import Connection, Listener
from raykv.system.wire import Address
from raykv.transports.base import Peer, PullRequest, Transport, records_of

log = logging.getLogger("raykv")

# What a header says of a block. sum: xxh3_64, computed when the block was written
CLAIM = np.dtype([("there", "?"), ("position", "<u4"), ("sum", "<u8")])
REQUEST_BYTES = LOCATION.itemsize + KEY_BYTES  # a block
WINDOW_BYTES = 2 * MIB  # received at a time: still in a core's cache when it is copied into slots
SENDERS = 64  # threads that send blocks; a reader that takes its bytes slowly keeps one


class BlockServer:
    """Serves an arena's blocks to readers that know its token. A connection has a thread only while blocks are sent."""

    def __init__(self, arena: Arena, host: str) -> None:
        """host: an address of this node to listen at. OSError where that is not possible."""
        self._arena = arena
        self._senders = ThreadPoolExecutor(SENDERS, thread_name_prefix="raykv-send")
        self._senders.submit(int)  # one thread at least: see _lend
        self._listener = Listener(host, "raykv-listen", KEYS_PER_CALL * REQUEST_BYTES, self._lend)
        self.address = self._listener.address

    def close(self) -> None:
        """Serve nobody from now on."""
        self._listener.close()
        self._senders.shutdown(wait=False, cancel_futures=True)

    def _lend(self, connection: Connection, request: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # no thread can be started: one of those that there are takes its turn
            self._senders.submit(self._send_blocks, connection, request)

    def _send_blocks(self, connection: Connection, request: bytes) -> None:
        try:
            self._answer(connection.socket, request)
        except Exception as error:
            expected = isinstance(error, (OSError, ValueError, DeviceError))  # else it is a bug of ours
            level = logging.DEBUG if expected else logging.ERROR
            log.log(level, "a connection that reads from here ends: %r", error, exc_info=not expected)
            self._listener.drop(connection)
        else:
            self._listener.give_back(connection)

    def _answer(self, peer: socket.socket, request: bytes) -> None:
        count, rest = divmod(len(request), REQUEST_BYTES)
        if rest:
            raise ValueError(f"a request of {len(request)} bytes is no multiple of {REQUEST_BYTES}")
        locations = np.frombuffer(request, LOCATION, count)
        keys = np.frombuffer(request, np.uint8, offset=locations.nbytes).reshape(-1, KEY_BYTES)
        blocks = self._arena.read_for_peer(locations, keys)
        peer.settimeout(data_deadline(int(locations["bytes"][blocks.there].sum())))
        peer.sendall(claims_of(blocks).tobytes())
        for run in blocks.runs:
            peer.sendall(run.data)  # unverified: the reader verifies


def claims_of(headers: BlockHeaders | PeerBlocks) -> NDArray[np.void]:
    """(n,) CLAIM."""
    claims = np.zeros(len(headers.there), CLAIM)
    claims["there"], claims["position"], claims["sum"] = headers.there, headers.positions, headers.checksums
    return claims


class Tcp(Transport):
    """Pulls over TCP, and serves the pulls of peers. It keeps a connection to each peer."""

    name = "tcp"

    def __init__(self, arena: Arena, host: str) -> None:
        """Serve an arena at the address `host`, if it is possible to listen there."""
        self._connections: dict[Peer, socket.socket] = {}  # needs no lock: of one peer there is one pull at a time
        self._server: BlockServer | None = None
        try:
            self._server = BlockServer(arena, host)
        except OSError as error:
            log.warning("%s: can't listen at %s, peers read through Ray's object store: %r", arena.path, host, error)

    def offer(self) -> Address | None:
        """Where blocks are served, and the token that a reader needs."""
        return self._server.address if self._server else None

    def pull(self, peer: Peer, offer: Address, request: PullRequest) -> NDArray[np.uint8]:
        connection = self._connections.pop(peer, None) or wire.connect(Address(*offer))
        try:
            verdicts = _pull(connection, request)
        except BaseException:  # the rest of the answer would be taken for the next one
            connection.close()
            raise
        self._connections[peer] = connection
        return verdicts

    def close(self) -> None:
        if self._server:
            self._server.close()


def _pull(peer: socket.socket, request: PullRequest) -> NDArray[np.uint8]:
    source, keys, arena, target, end = request
    order = np.lexsort((source["slot"], source["slab"]))  # neighbours are sent in one piece
    peer.settimeout(seconds_left(end))
    peer.sendall(wire.frame(source[order].tobytes() + keys[order].tobytes()))
    claims = records_of(wire.receive(peer, len(source) * CLAIM.itemsize, end), CLAIM, len(source))
    verdicts = np.full(len(source), ALTERED, np.uint8)
    there, size = np.flatnonzero(claims["there"]), int(source["bytes"][0])
    buffer = np.empty((max(1, min(len(there), WINDOW_BYTES // size)), size), np.uint8)
    for start in range(0, len(there), len(buffer)):
        part = there[start : start + len(buffer)]
        blocks, which, checksums = buffer[: len(part)], order[part], claims["sum"][part]
        wire.receive_into(peer, blocks.reshape(-1).data, end)
        written = arena.write(target[which], keys[which], blocks, claims["position"][part], checksums)
        verdicts[which] = judge(written, blocks, checksums)
    return verdicts
