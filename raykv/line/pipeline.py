"""Requests and answers on one socket, several in flight, from any thread and any event loop.

Answers come in the order of their requests. No thread reads for the others: whoever waits for an answer reads, and
delivers what comes for others, until its own is there; then the next who waits goes on reading. A loop that waits has
the socket among those that it watches.

A signal's handler may raise in the main thread wherever a call returns or a function begins. Between `acquire` and its
`try` a lock would stay taken for good. So the turn to read is an item of a dict: it is taken inside of a `try`, and
given up without any call.
"""

import asyncio
import contextlib
import logging
import queue
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from raykv.line import wire
from raykv.protocol.calls import CLIENT
from raykv.protocol.location import Address

log = logging.getLogger("raykv")
RECEIVE_BYTES = 256 << 10  # at a time
ANSWER_BYTES = 1 << 30  # the longest
SEND_S = 0.25  # for a peer to take a request; then it is given up
Answer = bytes | ConnectionError
READER = "reader"
Deliver = Callable[[Answer], None]  # called with an answer, or with what ended the connection, by whoever reads it


class Request:
    """A request whose answer a thread waits for. answer: None until it is there. gone: nobody waits any more."""

    __slots__ = ("answer", "gone", "woken")

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.gone = False
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()  # the answer is there, or nobody reads

    def deliver(self, answer: Answer) -> None:
        self.answer = answer
        self.woken.put(None)


class Pipeline:
    """A connection to a Listener. Thread-safe. Once it has failed, every request fails: make another.

    address: of the listener. socket: to it, to be watched only. alive: whether it has not failed.
    """

    def __init__(self, address: Address, side: bytes = CLIENT) -> None:
        """side: see `wire.connect`, which also says what is raised."""
        self.address = address
        self.socket = wire.connect(address, side)
        self._readable, self._usable = select.poll(), select.poll()
        self._readable.register(self.socket, select.POLLIN)
        self._usable.register(self.socket, select.POLLIN | select.POLLOUT)
        self._sending = threading.Lock()  # guards that requests are sent whole, in the order of `_due`
        self._turn: dict[str, object] = {}  # READER: who reads the socket, uses _inbox, and takes from _due
        self._due: deque[Deliver] = deque()
        self._waiting: deque[Request] = deque()  # what threads are in `wait` for
        self._inbox, self._buffer = bytearray(), memoryview(bytearray(RECEIVE_BYTES))
        self._loops: Counter[asyncio.AbstractEventLoop] = Counter()  # requests that each waits for
        self.alive, self._why = True, "the connection has failed"

    @property
    def is_read(self) -> bool:
        """Whether somebody reads now."""
        return READER in self._turn

    def send(self, body: bytes, deliver: Deliver) -> None:
        """Send a request. Raises ConnectionError where that fails; that is delivered, too.

        deliver: must not use this pipeline, nor wait.
        """
        data = memoryview(wire.frame(body))
        with self._sending:
            if not self.alive:
                raise ConnectionError("the connection has failed")
            self._due.append(deliver)
            try:
                self._put(data)
                return
            except OSError as error:
                self.alive, why = False, f"a request could not be sent: {error!r}"
            except BaseException:  # a signal's: half a request may have been sent
                self.alive = False
                self._hang_up()
                raise
        self._fail(why)
        raise ConnectionError(why)

    def wait(self, request: Request, seconds: float) -> bytes:
        """The answer to a request whose `deliver` was sent along. Raises TimeoutError, ConnectionError."""
        end = time.monotonic() + seconds
        try:
            self._waiting.append(request)
            while request.answer is None:
                if self._turn.setdefault(READER, request) is request:
                    self._read_until(request, end)
                else:
                    request.woken.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(f"no answer in {seconds:.2f} s") from None
        finally:
            request.gone = True
            try:
                if self._turn[READER] is request:
                    del self._turn[READER]
            except KeyError:  # nobody reads
                pass
            self._pass_on()  # it may have been this one's turn to read
        return _checked(request.answer)

    async def answer(self, body: bytes, seconds: float) -> bytes:
        """Send a request, and wait for its answer without blocking the loop. Raises TimeoutError, ConnectionError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        if not self._loops[loop]:
            loop.add_reader(self.socket, self.look)  # where a thread reads, that delivers the answer
        self._loops[loop] += 1
        try:
            self.send(body, lambda answer: _resolve_in(loop, future, answer))
            async with asyncio.timeout(seconds):
                return _checked(await future)
        finally:
            self._loops[loop] -= 1
            if not self._loops[loop]:
                del self._loops[loop]
                loop.remove_reader(self.socket)

    def look(self) -> None:
        """Deliver answers that nobody waits for, and see whether the connection has failed. Does not wait."""
        mine = object()
        try:
            if self._turn.setdefault(READER, mine) is mine:
                if self.alive:
                    self._read(0.0)
                if not self.alive:
                    self._end(self._why)
        finally:
            try:
                if self._turn[READER] is mine:
                    del self._turn[READER]
            except KeyError:  # nobody reads
                pass
            self._pass_on()

    def close(self) -> None:
        """End the connection. Requests that wait fail."""
        self._fail("the connection was closed")

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it never was connected
            self.socket.close()

    # ------------------------------------------------------------------

    def _put(self, data: memoryview) -> None:
        """Send all of it, in SEND_S. Reads meanwhile: a peer whose answers nobody reads takes no requests."""
        end = time.monotonic() + SEND_S
        while data:
            try:
                data = data[self.socket.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                left = end - time.monotonic()
                if left <= 0 or not self._usable.poll(left * 1e3):
                    raise TimeoutError(f"the peer did not take it in {SEND_S:.2f} s") from None
                self.look()

    def _read_until(self, request: Request, end: float) -> None:
        """Read and deliver until the request's answer is there. queue.Empty at `end`."""
        while request.answer is None:
            if (left := end - time.monotonic()) <= 0:
                raise queue.Empty
            self._read(left)
            if not self.alive and request.answer is None:  # a signal took it from who was to deliver it
                raise ConnectionError(self._why)

    def _read(self, seconds: float) -> None:
        """Wait for bytes so long, and deliver the answers that are whole."""
        if not self._readable.poll(seconds * 1e3):
            return
        try:
            got = self.socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
            if not got:
                raise ConnectionError("the peer closed the connection")
            self._inbox += self._buffer[:got]
            while (body := wire.take_frame(self._inbox, ANSWER_BYTES)) is not None:
                if not self._due:
                    raise ConnectionError("the peer answered what nobody asked")
                _deliver(self._due.popleft(), body)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(str(error))
        except BaseException:  # a signal's: an answer may have been lost, and the next would be taken for it
            self._hang_up()
            raise

    def _pass_on(self) -> None:
        """Have a thread read that waits for its answer; whoever reads now does so when it is done."""
        with contextlib.suppress(IndexError, ValueError):  # none waits, or others have removed it
            while (first := self._waiting[0]).gone:
                self._waiting.remove(first)
            if not self.is_read:
                first.woken.put(None)
        if self._due and not self.alive and not self.is_read:  # it failed while somebody else read
            self.look()

    def _fail(self, why: str) -> None:
        """All that waits fails, at once or when whoever reads now is done."""
        self._why = why
        self._hang_up()
        self.look()

    def _end(self, why: str) -> None:
        """For the reader: fail all that waits. What is sent from now on fails, and calls this again."""
        self._hang_up()
        while self._due:
            _deliver(self._due.popleft(), ConnectionError(why))

    def _hang_up(self) -> None:
        """Who reads or sends wakes up. The socket is not closed: others may be using the descriptor."""
        self.alive = False
        with contextlib.suppress(OSError):  # not connected any more
            self.socket.shutdown(socket.SHUT_RDWR)


def _checked(answer: Answer) -> bytes:
    if isinstance(answer, ConnectionError):
        raise ConnectionError(*answer.args)  # an exception of its own for everybody who waits
    return answer


def _deliver(deliver: Deliver, answer: Answer) -> None:
    try:
        deliver(answer)
    except Exception as error:  # it is not the fault of who reads
        log.error("an answer could not be delivered: %r", error, exc_info=error)


def _resolve_in(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Answer], answer: Answer) -> None:
    if asyncio._get_running_loop() is loop:
        _resolve(future, answer)
        return
    with contextlib.suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(_resolve, future, answer)


def _resolve(future: asyncio.Future[Answer], answer: Answer) -> None:
    if not future.done():
        future.set_result(answer)
