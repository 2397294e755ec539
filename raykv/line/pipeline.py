"""Requests and answers on one socket, several in flight, from any thread and any event loop.

Answers come in the order of their requests. There is no reader thread: a thread that waits for an answer reads the
socket, and delivers other threads' answers, until its own answer comes. Then the next waiting thread reads. An event
loop that waits for an answer watches the socket.

A signal handler may raise in the main thread wherever a call returns or a function begins. If the handler raised
between a lock's `acquire` and its `try`, the lock would stay locked for good. Therefore no lock guards reading.
Instead, inside a `try`, a thread puts its mark into a dict that has no mark yet. Then the thread may read. Afterwards
it deletes its mark without any call.
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
RECEIVE_BYTES = 256 << 10  # maximum bytes that one system call receives
ANSWER_BYTES = 1 << 30  # maximum length of an answer
SEND_S = 0.25  # deadline for a peer to take a request; after it, the request fails
Answer = bytes | ConnectionError
READER = "reader"
Deliver = Callable[[Answer], None]  # called with an answer, or the connection's error, by the thread that reads


class Request:
    """A request whose answer a thread waits for.

    answer: None until the answer comes. gone: whether nobody waits any more.
    """

    __slots__ = ("answer", "gone", "woken")

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.gone = False
        # gets an item when the answer arrives, or when this request's thread must read, as no other thread reads
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def deliver(self, answer: Answer) -> None:
        self.answer = answer
        self.woken.put(None)


class Pipeline:
    """A connection to a Listener. Thread-safe. Once it has failed, every request fails: make another Pipeline.

    address: the listener's address. socket: the connection, only for watching. alive: whether the connection works.
    """

    def __init__(self, address: Address, side: bytes = CLIENT) -> None:
        """side: see `wire.connect`, whose errors this raises."""
        self.address = address
        self.socket = wire.connect(address, side)
        self._readable, self._usable = select.poll(), select.poll()
        self._readable.register(self.socket, select.POLLIN)
        self._usable.register(self.socket, select.POLLIN | select.POLLOUT)
        self._sending = threading.Lock()  # held so that requests are sent whole, and in the order of `_due`
        self._turn: dict[str, object] = {}  # READER: mark of the thread that may read, use _inbox, and take from _due
        self._due: deque[Deliver] = deque()
        self._waiting: deque[Request] = deque()  # requests of the threads in `wait`
        self._inbox, self._buffer = bytearray(), memoryview(bytearray(RECEIVE_BYTES))
        self._loops: Counter[asyncio.AbstractEventLoop] = Counter()  # number of requests that each loop waits for
        self.alive, self._why = True, "the connection has failed"

    @property
    def is_read(self) -> bool:
        """Whether somebody reads now."""
        return READER in self._turn

    def send(self, body: bytes, deliver: Deliver) -> None:
        """Send a request. ConnectionError if this fails. If the connection breaks now, `deliver` gets that error too.

        deliver: must neither use this pipeline nor wait.
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
            except BaseException:  # a signal handler's error: half a request may have been sent
                self.alive = False
                self._hang_up()
                raise
        self._fail(why)
        raise ConnectionError(why)

    def wait(self, request: Request, seconds: float) -> bytes:
        """Wait for the answer to a request that was sent with `request.deliver`.

        TimeoutError or ConnectionError if there is no answer.
        """
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
            self._pass_on()  # this thread may have had the turn to read
        return _checked(request.answer)

    async def answer(self, body: bytes, seconds: float) -> bytes:
        """Send a request, and wait for the answer without blocking the loop. Raises TimeoutError, ConnectionError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        if not self._loops[loop]:
            loop.add_reader(self.socket, self.look)  # if a thread reads already, it delivers the answer
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
        """Deliver answers that nobody waits for, and notice a failed connection. Does not wait."""
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
        """End the connection. Waiting requests fail."""
        self._fail("the connection was closed")

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the socket was never connected
            self.socket.close()

    # ------------------------------------------------------------------

    def _put(self, data: memoryview) -> None:
        """Send all of `data` within SEND_S.

        Reads answers meanwhile, since a peer takes no requests while nobody reads its answers.
        """
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
        """Read and deliver answers until the request's answer has arrived. Raises queue.Empty at `end`."""
        while request.answer is None:
            if (left := end - time.monotonic()) <= 0:
                raise queue.Empty
            self._read(left)
            if not self.alive and request.answer is None:  # a signal interrupted the answer's delivery
                raise ConnectionError(self._why)

    def _read(self, seconds: float) -> None:
        """Wait for bytes, for at most `seconds`, and deliver the complete answers."""
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
        except BaseException:  # a signal's error: an answer may be lost, and its request would get the next answer
            self._hang_up()
            raise

    def _pass_on(self) -> None:
        """Give the turn to read to a waiting thread. A thread that reads now passes the turn on when it is done."""
        waiting = self._waiting
        with contextlib.suppress(IndexError, ValueError):  # others have removed it meanwhile
            while waiting and (first := waiting[0]).gone:
                waiting.remove(first)
            if waiting and not self.is_read:
                waiting[0].woken.put(None)
        if self._due and not self.alive and not self.is_read:  # the connection failed while another thread read
            self.look()

    def _fail(self, why: str) -> None:
        """Fail all waiting requests: now, or, if a thread is reading, when that thread is done."""
        self._why = why
        self._hang_up()
        self.look()

    def _end(self, why: str) -> None:
        """Fail all waiting requests. For the thread that reads. A later request fails and calls this again."""
        self._hang_up()
        while self._due:
            _deliver(self._due.popleft(), ConnectionError(why))

    def _hang_up(self) -> None:
        """Wake threads that read or send. The socket stays open, as they may be using the descriptor."""
        self.alive = False
        with contextlib.suppress(OSError):  # the socket is no longer connected
            self.socket.shutdown(socket.SHUT_RDWR)


def _checked(answer: Answer) -> bytes:
    if isinstance(answer, ConnectionError):
        raise ConnectionError(*answer.args)  # each waiting thread gets an exception of its own
    return answer


def _deliver(deliver: Deliver, answer: Answer) -> None:
    try:
        deliver(answer)
    except Exception as error:  # `deliver` is at fault, not the thread that reads
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
