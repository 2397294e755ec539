"""Blocks cross nodes over TCP, out of one store's slots and into the other's.

Measured at three times Ray's object store, which copies into shared memory on both nodes. A connection begins with the
listener's 32 random bytes, which the peer answers with their HMAC-SHA256 by a token that it got through Ray. Then, as
often as it likes, it sends n (uint32), n LOCATIONs and n keys, and gets n CLAIMs (whether a block is there, and what
its header says) and the bytes of those that are there.
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

from raykv.arena.arena import Arena
from raykv.arena.checksum import judge
from raykv.config import KEYS_PER_CALL, MIB
from raykv.errors import DeviceError
from raykv.protocol import ALTERED, KEY_BYTES, LOCATION, data_deadline, seconds_left
from raykv.transports.base import Peer, PullRequest, Transport

log = logging.getLogger("raykv")

CLAIM = np.dtype([("there", "?"), ("position", "<u4"), ("sum", "<u8")])  # sum: xxh3_64 when it was written
COUNT = struct.Struct("<I")
WINDOW_BYTES = 2 * MIB  # received at a time: still in a core's cache when it is copied into slots
HELLO_S = 1.0  # to connect, and to show the token
Address = tuple[str, int, bytes]  # host, port, token


class Listener:
    """Serves the blocks of an arena to those who know its token."""

    def __init__(self, arena: Arena, host: str) -> None:
        """Listen at an address of this node. OSError where that can't be."""
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
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a node that vanishes says nothing
                hello = os.urandom(32)
                peer.sendall(hello)
                if hmac.compare_digest(_receive(peer, 32, time.monotonic() + HELLO_S), _answer(self._token, hello)):
                    while True:
                        self._send_blocks(peer)
            except (OSError, ValueError, DeviceError) as error:
                log.debug("a peer that reads from here: %r", error)

    def _send_blocks(self, peer: socket.socket) -> None:
        (count,) = COUNT.unpack(_receive(peer, COUNT.size))
        if count > KEYS_PER_CALL:
            raise ValueError(f"{count} blocks asked for at a time, of at most {KEYS_PER_CALL}")
        request = _receive(peer, count * (LOCATION.itemsize + KEY_BYTES), time.monotonic() + HELLO_S)
        at = np.frombuffer(request, LOCATION, count)
        names = np.frombuffer(request, np.uint8, offset=at.nbytes).reshape(-1, KEY_BYTES)
        claims = np.zeros(count, CLAIM)
        claims["sum"], claims["position"], claims["there"], runs = self._arena.read_for_peer(at, names)
        ok = claims["there"]
        peer.settimeout(data_deadline(int(at["bytes"][ok].sum())))
        peer.sendall(claims.tobytes())
        for run in runs:
            peer.sendall(run.data)  # unchecked: the reader must verify


class Tcp(Transport):
    """Pulls over TCP, and serves those of peers."""

    name = "tcp"

    def __init__(self, arena: Arena, host: str) -> None:
        """Serve an arena at `host`, if that can be listened at."""
        self._connections: dict[Peer, socket.socket] = {}
        self._listener: Listener | None = None
        try:
            self._listener = Listener(arena, host)
        except OSError as error:
            log.warning(
                "%s: its blocks go through Ray's object store, since TCP does not listen: %r", arena.path, error
            )

    def offer(self) -> Address | None:
        """Where blocks are served, and the token that is asked for there."""
        return self._listener.address if self._listener else None

    def pull(self, peer: Peer, offer: Address, wanted: PullRequest) -> NDArray[np.uint8]:
        connection = self._connections.pop(peer, None) or _connect(offer)
        try:
            verdicts = _pull(connection, wanted)
        except BaseException:  # what ends early leaves bytes behind
            connection.close()
            raise
        self._connections[peer] = connection
        return verdicts

    def close(self) -> None:
        if self._listener:
            self._listener.close()


def _connect(address: Address) -> socket.socket:
    """Raises ConnectionError, not TimeoutError: nothing was asked for yet, and another way may be open."""
    host, port, token = address
    try:
        peer = socket.create_connection((host, port), HELLO_S)
    except TimeoutError as error:
        raise ConnectionError(f"{host}:{port} does not answer") from error
    try:
        _prepare(peer)
        peer.sendall(_answer(token, _receive(peer, 32, time.monotonic() + HELLO_S)))
    except TimeoutError as error:
        peer.close()
        raise ConnectionError(f"{host}:{port} says nothing") from error
    except BaseException:
        peer.close()
        raise
    return peer


def _pull(peer: socket.socket, wanted: PullRequest) -> NDArray[np.uint8]:
    source, keys, arena, target, end = wanted
    order = np.lexsort((source["slot"], source["slab"]))  # neighbours are sent at once
    peer.settimeout(seconds_left(end))
    peer.sendall(COUNT.pack(len(source)) + source[order].tobytes() + keys[order].tobytes())
    claims = np.frombuffer(_receive(peer, len(source) * CLAIM.itemsize, end), CLAIM)
    verdicts = np.full(len(source), ALTERED, np.uint8)
    there, size = np.flatnonzero(claims["there"]), int(source["bytes"][0])
    buffer = np.empty((max(1, min(len(there), WINDOW_BYTES // size)), size), np.uint8)
    for at in range(0, len(there), len(buffer)):
        part = there[at : at + len(buffer)]
        blocks, which, sums = buffer[: len(part)], order[part], claims["sum"][part]
        _receive_into(peer, blocks.reshape(-1).data, end)
        written = arena.write(target[which], keys[which], blocks, claims["position"][part], sums)
        verdicts[which] = judge(written, blocks, sums)
    return verdicts


def _prepare(peer: socket.socket) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.settimeout(HELLO_S)


def _answer(token: bytes, hello: bytes) -> bytes:
    return hmac.digest(token, hello, "sha256")


def _receive(peer: socket.socket, count: int, end: float | None = None) -> bytes:
    data = bytearray(count)
    _receive_into(peer, memoryview(data), end)
    return bytes(data)


def _receive_into(peer: socket.socket, view: memoryview, end: float | None) -> None:
    """Fill `view`. TimeoutError at the time `end`; ConnectionError if the peer goes before."""
    while len(view):
        peer.settimeout(end and seconds_left(end))
        got = peer.recv_into(view)
        if not got:
            raise ConnectionError("the peer is gone")
        view = view[got:]
