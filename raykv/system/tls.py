"""TLS around the sockets of a pool, where Ray uses it: with Ray's certificates, which both sides verify.

RAY_USE_TLS, RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT are settings of Ray's.
"""

import functools
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

FILES = "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"
T = TypeVar("T")
TURNS = 3  # of each side, in which a handshake is done


def used() -> bool:
    """Whether Ray uses TLS: all that crosses nodes must be encrypted then."""
    return os.environ.get("RAY_USE_TLS", "0").lower() not in ("0", "false")


@functools.cache
def context(purpose: ssl.Purpose) -> ssl.SSLContext:
    """For connections to listeners (SERVER_AUTH) or of clients (CLIENT_AUTH). OSError where Ray's files are no good."""
    missing = [name for name in FILES if not os.environ.get(name)]
    if missing:
        raise FileNotFoundError(f"RAY_USE_TLS is set, and {' and '.join(missing)} not: set them as for Ray")
    certificate, key, authority = (os.environ[name] for name in FILES)
    for name in FILES:
        if not os.access(os.environ[name], os.R_OK):
            raise PermissionError(f"{name} {os.environ[name]} can't be read by this user: Ray's processes must")
    made = ssl.create_default_context(purpose, cafile=authority)
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags &= ~ssl.VERIFY_X509_STRICT  # Ray takes certificates that Python 3.13 is too strict for
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.options |= getattr(ssl, "OP_ENABLE_KTLS", 0)  # from Python 3.12; of no effect where the kernel has none
    if purpose is ssl.Purpose.CLIENT_AUTH:
        made.num_tickets = 0  # nobody resumes a session
    made.sslsocket_class = TlsSocket
    made.load_cert_chain(certificate, key)
    return made


def check(host: str) -> None:
    """OSError unless other processes take this one's certificate for that of the address `host`."""
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context(ssl.Purpose.SERVER_AUTH).wrap_bio(ours, theirs, server_hostname=host)
    listener = context(ssl.Purpose.CLIENT_AUTH).wrap_bio(theirs, ours, server_side=True)
    try:
        for side in TURNS * (client, listener):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as error:
        what_to_do = f"let RAY_TLS_CA_CERT sign one for {host} (subjectAltName = IP:{host})"
        raise OSError(f"{os.environ[FILES[0]]} is no certificate for {host}: {error}; {what_to_do}") from error


def wrapped(peer: socket.socket, host: str = "") -> "TlsSocket":
    """A connection that goes on in TLS, after `shake`. It takes over the socket.

    host: the address of the listener; "" on its side.
    """
    purpose = ssl.Purpose.SERVER_AUTH if host else ssl.Purpose.CLIENT_AUTH
    made = context(purpose).wrap_socket(
        peer, server_side=not host, server_hostname=host or None, do_handshake_on_connect=False
    )
    assert isinstance(made, TlsSocket)
    made.mutex = threading.Lock()
    socket.socket.settimeout(made, 0.0)  # for good: a call waits by itself
    return made


class TlsSocket(ssl.SSLSocket):
    """A connection in TLS, with what raykv asks of sockets: MSG_DONTWAIT, and limits of a call.

    Threads may share it: none is kept from OpenSSL by another that waits for the peer.
    """

    mutex: threading.Lock  # held while OpenSSL works, which can't do two things at once
    _seconds: float | None = None  # that a call waits; None: for ever
    _late: type[OSError] = TimeoutError

    def settimeout(self, value: float | None) -> None:
        self._seconds, self._late = value, TimeoutError if value else BlockingIOError

    def setblocking(self, flag: bool) -> None:
        self.settimeout(None if flag else 0.0)

    def set_limits(self, seconds: float) -> None:
        """Have each call wait so long. BlockingIOError where nothing moved."""
        self._seconds, self._late = seconds, BlockingIOError

    def shake(self) -> None:
        """Go on with the handshake. OSError where the other side has no certificate of the authority's."""
        limits = self._seconds, self._late
        try:
            self._tried(self.do_handshake)
        finally:
            self._seconds, self._late = limits  # do_handshake sets what it takes for the socket's

    def send(self, data: Any, flags: int = 0) -> int:
        return self._tried(functools.partial(super().send, data), flags)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        return self._tried(functools.partial(super().recv, buflen), flags)

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        return self._tried(functools.partial(super().recv_into, buffer, nbytes or None), flags)

    def send_some(self, views: Iterable[memoryview]) -> int:
        """Send of these what the peer takes. Waits only until it takes some."""
        return self._tried(functools.partial(self._send_now, views))

    def receive_some(self, view: memoryview) -> int:
        """Fill this with what has come. Waits only until something has."""
        return self._tried(functools.partial(self._receive_now, view))

    def _send_now(self, views: Iterable[memoryview]) -> int:
        send, done = super().send, 0
        try:
            for view in views:
                at = 0
                while at < len(view):
                    at += (sent := send(view[at:]))
                    done += sent
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not done:
                raise
        return done

    def _receive_now(self, view: memoryview) -> int:
        receive, done = super().recv_into, 0
        try:
            while done < len(view) and (got := receive(view[done:])):  # a record at a time
                done += got
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not done:
                raise
        return done

    def shutdown(self, how: int) -> None:
        """From any thread: others that use the connection fail, as with a plain one."""
        socket.socket.shutdown(self, how)

    def _tried(self, step: Callable[[], T], flags: int = 0) -> T:
        """Take a step of OpenSSL's, as soon as the peer lets it."""
        seconds, late = (0.0, BlockingIOError) if flags & socket.MSG_DONTWAIT else (self._seconds, self._late)
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                with self.mutex:
                    return step()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            except ssl.SSLError as error:  # what a plain socket calls so
                raise ConnectionError(f"TLS failed: {error}") from error
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise late("the peer neither sent nor took anything in time")
            ready = select.poll()
            ready.register(self, event)
            ready.poll(None if left is None else left * 1e3)
