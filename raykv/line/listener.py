"""A listener: one thread that accepts connections, checks each peer's proof of the token, and passes frames on.

Connections without proof are limited in number, time and bytes, and cost no thread. No error ends the loop.
"""

import contextlib
import hmac
import logging
import resource
import secrets
import selectors
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

from raykv.line import tls, wire
from raykv.line.tls import TlsSocket
from raykv.line.wire import CHALLENGE_BYTES, PROOF_BYTES, TOKEN_BYTES
from raykv.protocol.location import Address

log = logging.getLogger("raykv")

UNPROVEN = 1024  # maximum connections without proof; at most an eighth of the files that may be open
ACCEPTS = 16  # maximum connections that are accepted between two rounds of answers
ACCEPT_AGAIN_S = 0.1  # pause after a failed accept, such as for lack of file descriptors
RECEIVE_BYTES = 256 << 10  # maximum bytes that one system call receives
UNHURRIED_BYTES = 16 << 10  # an `Unhurried` answer is sent at once if this many bytes already wait on its connection
SHAKE_S = 0.005  # time for steps of TLS handshakes between two rounds of answers
BULK_BYTES = 128 << 10  # minimum size of a frame that is served alone, between two rounds of shorter frames


class Unhurried(bytes):
    """An answer that nobody waits for. It is sent with the next answer, to save a system call."""


class Connection:
    """An accepted connection. Only the listener's thread uses it, or the thread to which it is lent.

    outbox: unsent bytes of at most one answer. events: events that the listener waits for; 0 while lent or queued.
    side: the side that the peer has proved. frame_bytes: maximum length of a frame from the peer. greeted: whether the
    TLS handshake has begun.
    """

    def __init__(self, peer: socket.socket) -> None:
        self.socket: wire.Stream = peer
        self.inbox, self.outbox = bytearray(), bytearray()
        self.unhurried = b""  # answers to send with the next answer
        self.challenge = self.side = b""
        self.frame_bytes = 0
        self.prove_until = time.monotonic() + wire.HANDSHAKE_S
        self.proven, self.greeted, self.events = False, False, selectors.EVENT_READ
        self.gone: OSError | None = None  # the error of a peer that is gone; its earlier requests are still served

    def send(self, data: bytes) -> None:
        """Send without waiting. Unsent bytes are sent later. Sends nothing to a peer that is gone."""
        if self.gone:
            return
        try:
            if not self.outbox:
                data = data[self.socket.send(data) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self.gone = error
            return
        self.outbox += data


class Listener:
    """Serves connections at one port. Calls `serve` with every frame, in the listener's thread.

    address: address and token that a peer needs to connect. served: connections that have proved the token. unproven:
    the other connections, oldest first. most_unproven: maximum length of `unproven`; beyond it, the oldest connection
    ends.
    """

    def __init__(
        self, host: str, name: str, frame_bytes: dict[bytes, int], serve: Callable[[Connection, bytes], bytes | None]
    ) -> None:
        """host: an address of this node. name: name of the thread. frame_bytes: maximum frame length, by allowed side.

        serve: returns the bytes of the answer, or None if it has lent the connection to another thread. The listener
        does not use a lent connection until `give_back` or `drop`. An error of `serve` ends the connection. Raises
        OSError if it can't listen at `host`, or if Ray uses TLS and has no certificate for the host.
        """
        if tls.used():
            tls.check(host)
        self._serve, self._frame_bytes = serve, frame_bytes
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.most_unproven = min(UNPROVEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._socket = socket.create_server((host, 0), family=family, backlog=UNPROVEN)
        self._socket.setblocking(False)
        host, port = self._socket.getsockname()[:2]
        self.address = Address(host, port, secrets.token_bytes(TOKEN_BYTES))
        self.unproven: OrderedDict[Connection, None] = OrderedDict()
        self.served: set[Connection] = set()
        self._returned: deque[Connection] = deque()  # connections from `give_back`
        self._bulk: deque[tuple[Connection, bytes]] = deque()  # long frames that wait for their turn
        self._shaking: deque[Connection] = deque()  # connections that wait for a step of TLS, which takes a millisecond
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._closed = False
        self._accept_at = 0.0  # time.monotonic() when accepting begins again; 0: it accepts now
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._selector.register(self._socket, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections, and accept no more. Any thread may call it."""
        self._closed = True
        self._notify()

    def give_back(self, connection: Connection) -> None:
        """Listen again to a connection that was lent. Any thread may call it."""
        self._returned.append(connection)
        self._notify()
        if self._closed:
            self.drop(connection)

    def next_frame(self, connection: Connection) -> bytes | None:
        """Return the next frame of a lent connection; None until a frame is complete.

        For the thread that has the connection. OSError if the peer is gone, or sends a frame that is too long.
        """
        body = wire.take_frame(connection.inbox, connection.frame_bytes)
        if body is None:
            with contextlib.suppress(BlockingIOError):
                connection.inbox += connection.socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
                body = wire.take_frame(connection.inbox, connection.frame_bytes)
        return body

    def drop(self, connection: Connection) -> None:
        """End a connection that was lent. Any thread may call it."""
        self.served.discard(connection)
        connection.socket.close()

    def _notify(self) -> None:
        with contextlib.suppress(OSError):  # the waker is full, so the thread wakes up anyway; or it is closed
            self._waker.send(b"\0")

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._closed:
            try:
                self._round()
            except Exception as error:  # if the loop ended, everybody would be refused for good
                log.error("a listener goes on after %r", error, exc_info=error)
                time.sleep(ACCEPT_AGAIN_S)
        for connection in [*self.unproven, *self.served.copy()]:
            self._hang_up(connection)
        for connection in [*self._shaking, *(connection for connection, _ in self._bulk)]:
            connection.socket.close()
        self.served.clear()
        for each in (self._socket, self._wake, self._waker, self._selector):
            each.close()

    def _round(self) -> None:
        for key, _ in self._selector.select(self._pause()):
            if key.fileobj is self._socket:
                self._accept()
            elif key.fileobj is self._wake:
                self._take_back()
            else:
                self._attempt(self._attend, key.data)
        if self._bulk:
            connection, body = self._bulk.popleft()
            self._attempt(partial(self._answer_bulk, body), connection)
        until = time.monotonic() + SHAKE_S
        while self._shaking and time.monotonic() < until:
            self._attempt(self._shake, self._shaking.popleft())
        self._expire()

    def _pause(self) -> float | None:
        """Return the seconds that the thread may wait for bytes of peers; None: no limit, as nothing else is due."""
        if self._bulk or self._shaking:
            return 0.0
        due = [self._accept_at] if self._accept_at else []
        due += [connection.prove_until for connection in list(self.unproven)[:1]]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _expire(self) -> None:
        now = time.monotonic()
        if self._accept_at and now >= self._accept_at:
            self._selector.register(self._socket, selectors.EVENT_READ, None)
            self._accept_at = 0.0
        while self.unproven and (oldest := next(iter(self.unproven))).prove_until <= now:
            self._end(oldest)

    # ------------------------------------------------------------------ connections

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                peer, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the peer is gone already, or no file descriptor is left
                log.debug("a connection could not be accepted: %r", error)
                self._selector.unregister(self._socket)
                self._accept_at = time.monotonic() + ACCEPT_AGAIN_S
                return
            self._attempt(partial(self._greet, peer), Connection(peer))

    def _greet(self, peer: socket.socket, connection: Connection) -> None:
        self.unproven[connection] = None
        if len(self.unproven) > self.most_unproven:
            oldest = next((each for each in self.unproven if each.events), connection)  # others wait for their turn
            if oldest.challenge:
                self._attempt(self._attend, oldest)  # its proof may have arrived meanwhile
            if oldest in self.unproven:
                self._end(oldest)
        wire.prepare(peer)
        peer.setblocking(False)
        if tls.used():
            connection.socket = TlsSocket(peer)
            self._watch(connection)  # the peer speaks first
        else:
            self._watch(connection)
            self._challenge(connection)

    def _challenge(self, connection: Connection) -> None:
        connection.challenge = wire.challenge()
        connection.send(connection.challenge)

    def _shake(self, connection: Connection) -> None:
        """Continue the TLS handshake. When the handshake is done, send the challenge."""
        if connection in self.unproven and isinstance(connection.socket, TlsSocket):  # the connection lives
            self._watch(connection)
            connection.greeted = True
            if connection.socket.shake():
                self._challenge(connection)

    def _attend(self, connection: Connection) -> None:
        """Send the rest of an answer to a peer. If there is none, read requests from the peer and serve them."""
        if not connection.challenge:
            self._leave_alone(connection)
            add = self._shaking.appendleft if connection.greeted else self._shaking.append  # begun handshakes first
            add(connection)
            return
        if connection.outbox:
            del connection.outbox[: connection.socket.send(connection.outbox)]
        else:
            got = connection.socket.recv_into(self._buffer)
            if not got:
                raise ConnectionError("the peer closed the connection")
            connection.inbox += self._buffer[:got]
        self._work(connection)

    def _work(self, connection: Connection) -> None:
        """Serve the complete frames in the inbox, up to the first long frame."""
        if not connection.proven:
            self._prove(connection)
        while connection.proven and not connection.outbox:
            body = wire.take_frame(connection.inbox, connection.frame_bytes)
            if body is None:
                break
            if len(body) >= BULK_BYTES:
                self._leave_alone(connection)
                self._bulk.append((connection, body))
                return
            if not self._answer(connection, body):
                return
        if connection.gone:
            raise connection.gone
        self._listen_to(connection)

    def _answer_bulk(self, body: bytes, connection: Connection) -> None:
        """Serve this long frame, and then the other frames of its connection."""
        self._watch(connection)
        if self._answer(connection, body):
            self._work(connection)

    def _answer(self, connection: Connection, body: bytes) -> bool:
        """Serve a frame. Returns False if the connection was lent."""
        answer = self._serve(connection, body)
        if answer is None:
            self._leave_alone(connection)
            return False
        if isinstance(answer, Unhurried) and len(connection.unhurried) < UNHURRIED_BYTES:
            connection.unhurried += answer
        else:
            connection.send(connection.unhurried + answer)
            connection.unhurried = b""
        return True

    def _watch(self, connection: Connection) -> None:
        """Listen to a peer until `_leave_alone`."""
        connection.events = selectors.EVENT_READ
        self._selector.register(connection.socket, connection.events, connection)

    def _leave_alone(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.events = 0

    def _listen_to(self, connection: Connection) -> None:
        events = selectors.EVENT_WRITE if connection.outbox else selectors.EVENT_READ
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.socket, events, connection)

    def _attempt(self, step: Callable[[Connection], None], connection: Connection) -> None:
        """Run a step with a connection. An error ends that connection only."""
        try:
            step(connection)
        except BlockingIOError:  # the socket only seemed ready
            pass
        except (OSError, ValueError) as error:
            log.debug("a connection ends: %r", error)
            self._end(connection)
        except Exception as error:  # a bug of raykv's, not of the peer's
            log.error("a connection ends: %r", error, exc_info=error)
            self._end(connection)

    def _prove(self, connection: Connection) -> None:
        """Check a peer's proof, and answer with a proof. ConnectionError if the peer does not know the token."""
        if len(connection.inbox) < CHALLENGE_BYTES + PROOF_BYTES:
            return
        shown = bytes(connection.inbox[: CHALLENGE_BYTES + PROOF_BYTES])
        theirs, given = shown[:CHALLENGE_BYTES], shown[CHALLENGE_BYTES:]
        del connection.inbox[: len(shown)]
        token, both = self.address.token, connection.challenge + theirs
        for side, frame_bytes in self._frame_bytes.items():
            if hmac.compare_digest(given, wire.proof(token, side, both)):
                connection.side, connection.frame_bytes = side, frame_bytes
                break
        else:
            raise ConnectionError("the peer does not know the token")
        connection.send(wire.proof(token, wire.LISTENER, both))
        connection.proven = True
        del self.unproven[connection]
        self.served.add(connection)

    def _take_back(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(1024, socket.MSG_DONTWAIT)
        while self._returned:
            self._attempt(self._resume, self._returned.popleft())

    def _resume(self, connection: Connection) -> None:
        connection.socket.setblocking(False)
        self._watch(connection)
        self._work(connection)  # frames that came before the connection was lent

    def _end(self, connection: Connection) -> None:
        self.unproven.pop(connection, None)
        self.served.discard(connection)
        with contextlib.suppress(KeyError, ValueError):  # not registered any more
            self._selector.unregister(connection.socket)
        connection.socket.close()

    def _hang_up(self, connection: Connection) -> None:
        """End a connection that may be lent. The thread that borrowed it still uses the descriptor, and closes it."""
        with contextlib.suppress(OSError):  # the connection has ended already
            connection.socket.shutdown(socket.SHUT_RDWR)
        if connection.events:
            connection.socket.close()
