"""Requests and answers on one socket, several in flight, from any thread and any event loop.

Answers come in the order of their requests. No thread reads for the others: whoever waits for an answer reads, and
delivers what comes for others, until its own is there; then the next who waits goes on reading. A loop that waits has
the socket among those that it watches.
"""

import asyncio
import contextlib
import queue
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from raykv.system import wire
from raykv.system.wire import LENGTH, Address

RECEIVE_BYTES = 256 << 10  # at a time
SEND_S = 0.25  # until a peer that takes no bytes is given up
Answer = bytes | ConnectionError
Box = queue.SimpleQueue[Answer | None]  # None in it: it is your turn to read the socket


class Request:
    """A request whose answer is due. deliver: called with the answer, or with what ended the connection.

    box: what a thread waits at; None if none does.
    """

    __slots__ = ("box", "deliver")

    def __init__(self, deliver: Callable[[Answer], None] | None = None) -> None:
        self.box: Box | None = None if deliver else queue.SimpleQueue()
        self.deliver = deliver or self.box.put  # type: ignore[union-attr]


class Pipeline:
    """A connection to a Listener. Thread-safe. Once it has failed, every request fails: make another.

    address: of the listener. alive: whether it has not failed.
    """

    def __init__(self, address: Address) -> None:
        """Raises ConnectionError where nobody answers."""
        self.address = address
        self._socket = wire.connect(address)
        seconds, rest = divmod(SEND_S, 1)
        timeout = struct.pack("ll", int(seconds), int(rest * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._sending = threading.Lock()  # guards that requests are sent in the order of `_due`
        self._reading = threading.Lock()  # held by who reads the socket; guards _inbox
        self._due: deque[Request] = deque()
        self._inbox, self._buffer = bytearray(), memoryview(bytearray(RECEIVE_BYTES))
        self._loops: Counter[asyncio.AbstractEventLoop] = Counter()  # requests that each waits for
        self.alive = True

    def send(self, body: bytes, request: Request) -> None:
        """Send a request. Raises ConnectionError where that fails; its answer is delivered then, too."""
        data = wire.frame(body)
        with self._sending:
            if not self.alive:
                raise ConnectionError("the connection has failed")
            self._due.append(request)
            try:
                self._socket.sendall(data)
                return
            except OSError as error:  # BlockingIOError: it takes no bytes, and half a request may have been sent
                failure = ConnectionError(f"a request could not be sent: {error!r}")
        self._fail(failure)
        raise failure

    def wait(self, request: Request, seconds: float) -> bytes:
        """The answer. Raises TimeoutError, ConnectionError."""
        box, end = request.box, time.monotonic() + seconds
        assert box is not None
        while (left := end - time.monotonic()) > 0:
            if self._reading.acquire(blocking=False):
                self._read_for(box, end)
            with contextlib.suppress(queue.Empty):
                if (answer := box.get(timeout=left)) is not None:
                    return _checked(answer)
        request.box = None
        self._wake_next()  # it may have been this one's turn to read
        raise TimeoutError(f"no answer in {seconds:.2f} s")

    async def answer(self, body: bytes, seconds: float) -> bytes:
        """Send a request, and wait for its answer without blocking the loop. Raises TimeoutError, ConnectionError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        request = Request(lambda answer: _call_in(loop, _resolve, future, answer))
        if not self._loops[loop]:
            loop.add_reader(self._socket, self.look)  # where a thread reads, that delivers the answer
        self._loops[loop] += 1
        try:
            self.send(body, request)
            async with asyncio.timeout(seconds):
                return _checked(await future)
        finally:
            self._loops[loop] -= 1
            if not self._loops[loop]:
                del self._loops[loop]
                loop.remove_reader(self._socket)

    def look(self) -> None:
        """Deliver answers that nobody waits for, and see whether the connection has failed. Does not wait."""
        if self._reading.acquire(blocking=False):
            try:
                self._read(0.0)
            finally:
                self._reading.release()
                self._wake_next()

    def close(self) -> None:
        """End the connection. Requests that wait fail."""
        self._fail(ConnectionError("the connection was closed"))

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it never was connected
            self._socket.close()

    # ------------------------------------------------------------------ reading

    def _read_for(self, box: Box, end: float) -> None:
        """Read and deliver until something is in the box, or `end`. Releases `_reading`."""
        try:
            while box.empty() and (left := end - time.monotonic()) > 0:
                self._read(left)
        finally:
            self._reading.release()
            self._wake_next()  # also this one, if it has no answer: it goes on, or gives up

    def _read(self, seconds: float) -> None:
        """Wait for bytes so long, and deliver the answers that are whole."""
        if not self._poll.poll(seconds * 1e3):
            return
        try:
            got = self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
            if not got:
                raise ConnectionError("the peer closed the connection")
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error if isinstance(error, ConnectionError) else ConnectionError(repr(error)))
            return
        self._inbox += self._buffer[:got]
        while self._due and (body := _first_frame(self._inbox)) is not None:
            self._due.popleft().deliver(body)

    def _wake_next(self) -> None:
        """Have a thread read on that waits for its answer."""
        for request in tuple(self._due):
            box = request.box
            if box is not None:
                box.put(None)
                return

    def _fail(self, error: ConnectionError) -> None:
        with self._sending:
            self.alive = False
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)  # not closed: others may be using the descriptor
        while self._due:
            with contextlib.suppress(IndexError):  # another thread does the same
                self._due.popleft().deliver(error)


def _first_frame(inbox: bytearray) -> bytes | None:
    if len(inbox) < LENGTH.size:
        return None
    stop = LENGTH.size + LENGTH.unpack_from(inbox)[0]
    if len(inbox) < stop:
        return None
    body = bytes(inbox[LENGTH.size : stop])
    del inbox[:stop]
    return body


def _checked(answer: Answer) -> bytes:
    if isinstance(answer, ConnectionError):
        raise answer
    return answer


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(call, *arguments)


def _resolve(future: asyncio.Future[Answer], answer: Answer) -> None:
    if not future.done():
        future.set_result(answer)
