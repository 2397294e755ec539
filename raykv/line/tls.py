"""TLS for a pool's sockets, if Ray uses TLS. Both sides verify each other with Ray's certificates.

RAY_USE_TLS, RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT are settings of Ray's.
"""

import functools
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Self

FILES = "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"
TURNS = 3  # maximum number of steps that each side takes in a handshake
ADDRESS_MISMATCH = 64  # OpenSSL's X509_V_ERR_IP_ADDRESS_MISMATCH
RECEIVE_BYTES, SEND_BYTES = 128 << 10, 128 << 10  # maximum bytes that one system call receives or sends
HELLO_BYTES = 32 << 10  # maximum bytes of one side's handshake, and of answers that TLS itself sends
WORN_BYTES = 1 << 38  # maximum bytes under one unrenewed key: section 5.5 of RFC 8446 allows 2^24.5 records of 16 KiB


def used() -> bool:
    """Whether Ray uses TLS. If Ray does, all bytes between nodes must be encrypted."""
    return os.environ.get("RAY_USE_TLS", "").lower() in ("1", "true")


@functools.cache
def context(purpose: ssl.Purpose) -> ssl.SSLContext:
    """Return a context for connections to listeners (SERVER_AUTH) or clients (CLIENT_AUTH). OSError for a bad file."""
    missing = [name for name in FILES if not os.environ.get(name)]
    if missing:
        raise FileNotFoundError(f"RAY_USE_TLS is set, and {' and '.join(missing)} not: set them as for Ray")
    certificate, key, authority = (os.environ[name] for name in FILES)
    for name in FILES:
        if not os.access(os.environ[name], os.R_OK):
            raise PermissionError(f"{name} {os.environ[name]} can't be read by this user: Ray's processes must")
    made = ssl.create_default_context(purpose, cafile=authority)
    made.verify_mode = ssl.CERT_REQUIRED
    # like Ray's gRPC, trust an authority that is no root, and omit the strict checks of Python 3.13
    made.verify_flags = (made.verify_flags | ssl.VERIFY_X509_PARTIAL_CHAIN) & ~ssl.VERIFY_X509_STRICT
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    if purpose is ssl.Purpose.CLIENT_AUTH:
        made.num_tickets = 0  # nobody resumes a session
    made.load_cert_chain(certificate, key)
    return made


def check(host: str) -> None:
    """Raise OSError if other processes would refuse this process's certificate for the address `host`."""
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        client = context(ssl.Purpose.SERVER_AUTH).wrap_bio(ours, theirs, server_hostname=host)
        listener = context(ssl.Purpose.CLIENT_AUTH).wrap_bio(theirs, ours, server_side=True)
        for side in TURNS * (client, listener):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as error:
        wrong = f"other nodes refuse {os.environ[FILES[0]]}: {error}"
        if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code == ADDRESS_MISMATCH:
            wrong += f": have it made anew with subjectAltName = IP:{host}"
        raise OSError(wrong) from error
    except ValueError as error:
        raise OSError(f"{host!r} can't be in a certificate: {error}") from error


class TlsSocket:
    """A TLS connection. It has the methods of a socket that raykv calls, with the same flags.

    One thread may send while another receives. Nothing is ever sent unencrypted. plain: the plain socket, whose timeout
    and limits apply to all calls.
    """

    def __init__(self, plain: socket.socket, host: str = "") -> None:
        """host: where the other side listens; "" on the listening side. OSError if Ray's files are unusable."""
        self.plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        made = context(ssl.Purpose.SERVER_AUTH if host else ssl.Purpose.CLIENT_AUTH)
        self._tls = made.wrap_bio(self._incoming, self._outgoing, server_side=not host, server_hostname=host or None)
        self._mutex = threading.RLock()  # held while OpenSSL works; a signal's handler may use the connection too
        self._records, self._owed = memoryview(b""), 0  # unsent records; number of bytes of plain text in them
        self.limit = plain.gettimeout()  # seconds that a call may wait; `wire.set_limits` sets it too
        self._said = self._received = 0  # received bytes of the handshake, and of plain text
        self._ended = False  # the peer has said that it sends no more

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self.plain.fileno()

    def close(self) -> None:
        self.plain.close()

    def shutdown(self, how: int) -> None:
        self.plain.shutdown(how)

    def settimeout(self, seconds: float | None) -> None:
        self.limit = seconds
        self.plain.settimeout(seconds)

    def setblocking(self, flag: bool) -> None:
        self.settimeout(None if flag else 0.0)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self.plain.setsockopt(level, option, value)

    @property
    def worn(self) -> bool:
        """Whether more than WORN_BYTES were received. The connection must then not be used for further requests."""
        return self._received > WORN_BYTES

    def agree(self, end: float) -> None:
        """Do the handshake on the connecting side. TimeoutError at `end` (time.monotonic()), and errors of `shake`."""
        done = self._shaken()
        while not done:
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError("TLS was not agreed on in time")
            self.settimeout(left)
            done = self.shake()

    def shake(self) -> bool:
        """Continue the handshake after bytes arrived. Returns whether the handshake is done.

        Raises the errors of a socket. ConnectionError if a side refuses the other side, or if the peer sends too many
        bytes.
        """
        received = self.plain.recv(HELLO_BYTES)
        self._said += len(received)
        if not received or self._said > HELLO_BYTES:
            raise ConnectionError(f"the peer said {self._said} bytes, and TLS is not agreed on")
        self._incoming.write(received)
        return self._shaken()

    def _shaken(self) -> bool:
        """Take a step of the handshake, and send the reply. Returns whether the handshake is done."""
        try:
            self._tls.do_handshake()
            return True
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise ConnectionError(f"TLS: {error}") from error
        finally:
            if said := self._outgoing.read():  # the reply fits into a socket that has sent nothing else
                with suppress(OSError):  # the next step finds the error
                    self.plain.send(said)

    def send(self, data: Any, flags: int = 0) -> int:
        """Like a socket's `send`. After BlockingIOError or 0, the next call must begin with the same bytes."""
        return self.sendmsg([memoryview(data)], (), flags)

    def sendall(self, data: Any) -> None:
        view = memoryview(data)
        while view:
            view = view[self.send(view) :]

    def sendmsg(self, views: Iterable[memoryview], ancillary: Iterable[Any] = (), flags: int = 0) -> int:
        """Like a socket's `sendmsg`, with the rule of `send`. After a result of 0, call it again."""
        if not self._records:
            with self._mutex:
                self._owed = self._encrypt(views)
                self._records = memoryview(self._outgoing.read())
        if self._records:
            self._records = self._records[self.plain.send(self._records, flags) :]
        return 0 if self._records else self._owed

    def recv(self, count: int, flags: int = 0) -> bytes:
        data = bytearray(count)
        return bytes(data[: self.recv_into(data, 0, flags)])

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Like a socket's `recv_into`.

        With a buffer of less than RECEIVE_BYTES, bytes may stay in this object, where `poll` does not see them.
        """
        view = memoryview(buffer)
        view = view[: nbytes or len(view)]
        limit = 0.0 if flags & socket.MSG_DONTWAIT else self.limit
        end = inf if limit is None else time.monotonic() + limit
        got = self._decrypt(view)
        while not got and len(view) and not self._ended:
            records = self.plain.recv(RECEIVE_BYTES, flags)
            if not records:
                return 0
            with self._mutex:
                self._incoming.write(records)
            got = self._decrypt(view)
            if not got and time.monotonic() >= end:  # only part of a record came, or a record without plain text
                raise TimeoutError("no record came in time") if self.plain.gettimeout() else BlockingIOError
        return got

    def recvmsg_into(
        self, views: Sequence[memoryview], ancillary: int = 0, flags: int = 0
    ) -> tuple[int, Any, int, Any]:
        """Like a socket's `recvmsg_into`, but fills the first view only, and ignores MSG_WAITALL."""
        view = views[0]
        done = got = self.recv_into(view)
        with suppress(BlockingIOError, TimeoutError):
            while got and done < len(view):
                done += (got := self.recv_into(view[done:], flags=socket.MSG_DONTWAIT))
        return done, [], 0, None

    def _encrypt(self, views: Iterable[memoryview]) -> int:
        """Make records of at most SEND_BYTES. Returns the number of bytes of plain text in them."""
        done = 0
        for view in views:
            while view and done < SEND_BYTES:
                taken = self._tls.write(view[: SEND_BYTES - done])
                done, view = done + taken, view[taken:]
        return done

    def _decrypt(self, view: memoryview) -> int:
        """Fill `view` from the records that arrived. Returns the number of written bytes."""
        done = 0
        with self._mutex:
            try:
                while done < len(view) and not self._ended:
                    got = int(self._tls.read(len(view) - done, view[done:]))
                    done, self._ended = done + got, not got
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise ConnectionError(f"TLS: {error}") from error
            if self._outgoing.pending > HELLO_BYTES:  # only `sendmsg` sends these answers
                raise ConnectionError("the peer wants too many answers of TLS itself")
        self._received += done
        return done
