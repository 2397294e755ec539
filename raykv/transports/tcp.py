"""Blocks cross nodes over TCP, out of one store's slots and into the other's.

It was measured at three times the speed of Ray's object store, which copies into shared memory on both nodes. The
listener begins a connection with 32 random bytes; the reader answers with their HMAC-SHA256, keyed by a token that it
got through Ray. Then the reader sends requests: n (uint32), n LOCATIONs and n keys. It gets n CLAIMs (whether a block
is there, and what its header says) and the bytes of the blocks that are there.
"""

import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time

import numpy as np
from numpy.typing import NDArray

from raykv.arena.arena import Arena, BlockHeaders, PeerBlocks
from raykv.arena.checksum import judge
from raykv.config import KEYS_PER_CALL, MIB
from raykv.errors import DeviceError
from raykv.protocol import ALTERED, KEY_BYTES, LOCATION, data_deadline, seconds_left
from raykv.transports.base import Peer, PullRequest, Transport, records_of

log = logging.getLogger("raykv")

# What a header says of a block. sum: xxh3_64, computed when the block was written
CLAIM = np.dtype([("there", "?"), ("position", "<u4"), ("sum", "<u8")])
COUNT = struct.Struct("<I")
WINDOW_BYTES = 2 * MIB  # received at a time: still in a core's cache when it is copied into slots
HANDSHAKE_S = 1.0  # to connect, and to prove the token
Address = tuple[str, int, bytes]  # host, port, token


class Listener:
    """Serves an arena's blocks to readers that know its token. One thread accepts, another serves each connection."""

    def __init__(self, arena: Arena, host: str) -> None:
        """host: an address of this node to listen at. OSError where that is not possible."""
        self._arena, self._token = arena, secrets.token_bytes(32)
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: Address = (*self._socket.getsockname()[:2], self._token)
        threading.Thread(target=self._accept_forever, name="raykv-listen", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed before
            self._socket.shutdown(socket.SHUT_RDWR)  # else the thread that accepts would go on waiting
        self._socket.close()

    def _accept_forever(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:  # closed
                    return
                time.sleep(0.1)  # no file descriptor was left, say
                continue
            threading.Thread(target=self._serve, args=(peer,), name="raykv-serve", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            try:
                _prepare(peer)
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notices a node that vanished
                challenge = os.urandom(32)
                peer.sendall(challenge)
                proof = _receive(peer, 32, time.monotonic() + HANDSHAKE_S)
                if hmac.compare_digest(proof, _proof(self._token, challenge)):
                    while True:
                        self._send_blocks(peer)
            except (OSError, ValueError, DeviceError) as error:
                log.debug("a connection that reads from here ends: %r", error)

    def _send_blocks(self, peer: socket.socket) -> None:
        (count,) = COUNT.unpack(_receive(peer, COUNT.size))
        if count > KEYS_PER_CALL:
            raise ValueError(f"{count} blocks asked for at a time, of at most {KEYS_PER_CALL}")
        request = _receive(peer, count * (LOCATION.itemsize + KEY_BYTES), time.monotonic() + HANDSHAKE_S)
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
        self._listener: Listener | None = None
        try:
            self._listener = Listener(arena, host)
        except OSError as error:
            log.warning("%s: can't listen at %s, peers read through Ray's object store: %r", arena.path, host, error)

    def offer(self) -> Address | None:
        """Where blocks are served, and the token that a reader needs."""
        return self._listener.address if self._listener else None

    def pull(self, peer: Peer, offer: Address, request: PullRequest) -> NDArray[np.uint8]:
        connection = self._connections.pop(peer, None) or _connect(offer)
        try:
            verdicts = _pull(connection, request)
        except BaseException:  # the rest of the answer would be taken for the next one
            connection.close()
            raise
        self._connections[peer] = connection
        return verdicts

    def close(self) -> None:
        if self._listener:
            self._listener.close()


def _connect(address: Address) -> socket.socket:
    """Raises ConnectionError, not TimeoutError: there is time left for another transport."""
    host, port, token = address
    try:
        peer = socket.create_connection((host, port), HANDSHAKE_S)
    except TimeoutError as error:
        raise ConnectionError(f"{host}:{port} does not answer") from error
    try:
        _prepare(peer)
        peer.sendall(_proof(token, _receive(peer, 32, time.monotonic() + HANDSHAKE_S)))
    except TimeoutError as error:
        peer.close()
        raise ConnectionError(f"{host}:{port} says nothing") from error
    except BaseException:
        peer.close()
        raise
    return peer


def _pull(peer: socket.socket, request: PullRequest) -> NDArray[np.uint8]:
    source, keys, arena, target, end = request
    order = np.lexsort((source["slot"], source["slab"]))  # neighbours are sent in one piece
    peer.settimeout(seconds_left(end))
    peer.sendall(COUNT.pack(len(source)) + source[order].tobytes() + keys[order].tobytes())
    claims = records_of(_receive(peer, len(source) * CLAIM.itemsize, end), CLAIM, len(source))
    verdicts = np.full(len(source), ALTERED, np.uint8)
    there, size = np.flatnonzero(claims["there"]), int(source["bytes"][0])
    buffer = np.empty((max(1, min(len(there), WINDOW_BYTES // size)), size), np.uint8)
    for start in range(0, len(there), len(buffer)):
        part = there[start : start + len(buffer)]
        blocks, which, checksums = buffer[: len(part)], order[part], claims["sum"][part]
        _receive_into(peer, blocks.reshape(-1).data, end)
        written = arena.write(target[which], keys[which], blocks, claims["position"][part], checksums)
        verdicts[which] = judge(written, blocks, checksums)
    return verdicts


def _prepare(peer: socket.socket) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.settimeout(HANDSHAKE_S)


def _proof(token: bytes, challenge: bytes) -> bytes:
    return hmac.digest(token, challenge, "sha256")


def _receive(peer: socket.socket, count: int, end: float | None = None) -> bytes:
    data = bytearray(count)
    _receive_into(peer, memoryview(data), end)
    return bytes(data)


def _receive_into(peer: socket.socket, view: memoryview, end: float | None) -> None:
    """Fill `view`. TimeoutError at the time `end`; ConnectionError if the peer closes the connection before."""
    while len(view):
        peer.settimeout(end and seconds_left(end))
        got = peer.recv_into(view)
        if not got:
            raise ConnectionError("the peer closed the connection")
        view = view[got:]
