"""Sockets between the processes of a pool: the proof of the token, and the frames of messages.

The listener begins a connection with a challenge of 32 random bytes. The connecting side answers with its own challenge
and its proof: the HMAC-SHA256 of its side's name and both challenges. The HMAC's key is the listener's token, which the
connecting side got through Ray. The listener answers with its own proof. A side that gets a wrong proof ends the
connection. Then each side sends frames: a length (uint32, little-endian) and bytes of that length. If Ray uses TLS, all
bytes are in TLS. A frame of the directory's socket holds a call or its answer, packed by `raykv.protocol.packing`.
"""

import hmac
import os
import socket
import struct
import time
from collections.abc import Sequence

from raykv.line import tls
from raykv.line.tls import TlsSocket
from raykv.protocol.calls import CLIENT
from raykv.protocol.location import Address
from raykv.protocol.transfers import seconds_left

Stream = socket.socket | TlsSocket
LENGTH = struct.Struct("<I")
TIMEVAL = struct.Struct("@ll")  # seconds and microseconds, as the kernel takes them
CHALLENGE_BYTES = PROOF_BYTES = 32
TOKEN_BYTES = 32
LISTENER = b"listener"  # a side, like CLIENT and STORE. A proof names its side, so nobody can use another side's proof
HANDSHAKE_S = 1.0  # deadline to connect, and for both sides to prove the token
KEEPALIVE_IDLE_S = 5  # time until TCP probes an idle peer
KEEPALIVE_S = 2  # interval between TCP's probes of a peer that does not answer
KEEPALIVE_PROBES = 3
VIEWS = 64  # maximum number of memory views that one system call sends or receives
GONE_S = KEEPALIVE_IDLE_S + KEEPALIVE_PROBES * KEEPALIVE_S  # a peer that sends or takes nothing for this time is gone


def connect(address: Address, side: bytes = CLIENT) -> Stream:
    """Connect, and wait until both sides have proved the token.

    side: this process's side, CLIENT or STORE. ConnectionError if nobody answers in time, or if the other side lacks
    the token. OSError for unusable TLS files.
    """
    host, port, token = address
    try:
        peer = socket.create_connection((host, port), HANDSHAKE_S)
    except TimeoutError as error:
        raise ConnectionError(f"{host}:{port} does not answer") from error
    try:
        prepare(peer)
        end = time.monotonic() + HANDSHAKE_S
        stream: Stream = peer
        if tls.used():
            stream = encrypted = TlsSocket(peer, host)
            encrypted.agree(end)
        mine = challenge()
        both = receive(stream, CHALLENGE_BYTES, end) + mine
        stream.sendall(mine + proof(token, side, both))
        if not hmac.compare_digest(receive(stream, PROOF_BYTES, end), proof(token, LISTENER, both)):
            raise ConnectionError(f"who listens at {host}:{port} is not of the pool: it does not know the token")
        peer.settimeout(None)
    except TimeoutError as error:
        peer.close()
        raise ConnectionError(f"{host}:{port} says nothing") from error
    except BaseException:
        peer.close()
        raise
    return stream


def challenge() -> bytes:
    """32 random bytes for the other side."""
    return os.urandom(CHALLENGE_BYTES)


def proof(token: bytes, side: bytes, challenges: bytes) -> bytes:
    """Return the proof that a side knows the token. challenges: the listener's, then the connecting side's."""
    return hmac.digest(token, side + challenges, "sha256")


def prepare(peer: socket.socket) -> None:
    """Make a socket send small messages at once, and notice a peer that vanishes, or does not take bytes."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_S),
        (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        (socket.TCP_USER_TIMEOUT, int(GONE_S * 1e3)),
    ):
        peer.setsockopt(socket.IPPROTO_TCP, option, value)


def frame(body: bytes) -> bytes:
    """Return a message as it is sent, with its length before it."""
    return LENGTH.pack(len(body)) + body


def take_frame(inbox: bytearray, longest: int) -> bytes | None:
    """Remove and return the first message of the received bytes, or return None until the message is complete.

    ConnectionError if the message has more than `longest` bytes.
    """
    if len(inbox) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(inbox)
    if length > longest:
        raise ConnectionError(f"a frame of {length} bytes, of at most {longest}")
    stop = LENGTH.size + length
    if len(inbox) < stop:
        return None
    with memoryview(inbox) as view:
        body = bytes(view[LENGTH.size : stop])
    del inbox[:stop]
    return body


def receive(peer: Stream, count: int, end: float | None = None) -> bytes:
    """Receive `count` bytes. TimeoutError at `end` (time.monotonic()); ConnectionError if the peer closes first."""
    data = bytearray(count)
    view = memoryview(data)
    while len(view):
        peer.settimeout(None if end is None else seconds_left(end))
        view = view[receive_some(peer, [view]) :]
    return bytes(data)


def set_limits(peer: Stream, seconds: float) -> None:
    """Make a connection blocking, but limit each system call to `seconds`.

    A call that moves no byte in this time raises BlockingIOError.
    """
    peer.settimeout(None)
    if isinstance(peer, TlsSocket):
        peer.limit = seconds
    limit = TIMEVAL.pack(*divmod(max(1, int(seconds * 1e6)), 10**6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, limit)


def receive_some(peer: Stream, views: Sequence[memoryview]) -> int:
    """Fill the first views with bytes that arrive in time. Returns their number. ConnectionError if the peer closed."""
    got = peer.recvmsg_into(views[:VIEWS], 0, socket.MSG_WAITALL)[0]
    if not got:
        raise ConnectionError("the peer closed the connection")
    return got


def send_all(peer: Stream, views: Sequence[memoryview], end: float) -> None:
    """Send these views one after the other. BlockingIOError at the limit of `set_limits`; TimeoutError after `end`.

    end: a time of time.monotonic(). Without it, a peer that takes a few bytes now and then would block the thread
    forever.
    """
    left = list(views)
    while left:
        left = after(left, peer.sendmsg(left[:VIEWS]))
        if left and time.monotonic() > end:
            raise TimeoutError(f"a peer has not taken {sum(view.nbytes for view in left)} bytes in time")


def after(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the rest of the views after their first `done` bytes were sent or received."""
    for i, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[i + 1 :]]
        done -= len(view)
    return []
