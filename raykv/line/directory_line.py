"""The line to the directory in charge: its socket, or calls through Ray if the socket can't be used."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from raykv.cluster import internal_kv, named_actors, ray_calls
from raykv.line.pipeline import Pipeline, Request
from raykv.line.wire import Stream
from raykv.protocol.calls import CLIENT
from raykv.protocol.location import Address
from raykv.protocol.packing import packed, unpacked

log = logging.getLogger("raykv")
SUCCESSION_S = 1.0  # after a directory's process ends, no call uses Ray for this time: another process replaces it
SOCKET_AGAIN_S = 5.0  # time until a failed socket is tried again; meanwhile calls go through Ray

ERRORS = (RayError, ConnectionError, TimeoutError, ValueError)  # errors of a call that the directory does not answer


class Sent(NamedTuple):
    """A call that was sent. ref: Ray's reference to the result. request, pipeline: set if sent over the socket."""

    method: str
    ref: Any = None
    request: Request | None = None
    pipeline: Pipeline | None = None


class DirectoryLine:
    """Calls methods of the directory (`raykv.actors.directory.directory.DirectoryActor`). Thread-safe except `find`.

    Arguments and answers are None, bool, int, str, bytes, and tuples and dicts of these. actor: the handle of the
    directory, or None if none was found. way: "socket" or "ray", as of the last `find`.
    """

    def __init__(self, pool: str, side: bytes = CLIENT) -> None:
        """Makes no connection yet. side: CLIENT or STORE; see `raykv.protocol.calls.CALLS`."""
        self._pool, self._side = pool, side
        self.actor: Any = None
        self._pipeline: Pipeline | None = None
        self._socket_at = 0.0  # time.monotonic() after which the socket is tried again
        self._last: Address | None = None  # address of the last connection
        self._ended_at = 0.0  # time.monotonic() when `_last` was first found closed; 0: it is open

    @property
    def way(self) -> str:
        return "socket" if self._pipeline is not None else "ray"

    @property
    def address(self) -> Address | None:
        """Address of the directory's socket; None while calls go through Ray."""
        pipeline = self._pipeline
        return None if pipeline is None else pipeline.address

    @property
    def connection(self) -> Stream | None:
        """The connection to the directory; None after it failed, and while calls go through Ray."""
        pipeline = self._pipeline
        return pipeline.socket if pipeline is not None and pipeline.alive else None

    def find(self) -> bool:
        """Find the directory in charge, and connect if not yet connected. Returns whether there is a directory.

        Only a call shows whether that directory answers. Waits for Ray's internal KV, and briefly for the directory's
        socket.
        """
        try:
            name, address = internal_kv.in_charge(self._pool)
            self.actor = named_actors.find(name)
        except (ValueError, RayError):
            return False
        pipeline = self._pipeline
        if pipeline is None or not pipeline.alive or pipeline.address != address:
            self.close()
            self._pipeline = self._connected(address)
            if self._is_being_replaced():
                return False
            self._socket_at = time.monotonic() + SOCKET_AGAIN_S
        return True

    def _connected(self, address: Address | None) -> Pipeline | None:
        self._ended_at, before = 0.0, self._ended_at
        try:
            pipeline = None if address is None else Pipeline(address, self._side)
            self._last = address
            return pipeline
        except OSError as error:
            if isinstance(error, ConnectionError) and address == self._last:  # refused, or reset as the process ended
                self._ended_at = before or time.monotonic()
            log.debug("pool %s: the directory is called through Ray: %r", self._pool, error)
            return None

    def _is_being_replaced(self) -> bool:
        """Whether the directory's process has just ended. Calls through Ray would then wait for the old directory."""
        return bool(self._ended_at) and time.monotonic() < self._ended_at + SUCCESSION_S

    def look(self) -> bool:
        """Deliver answers that nobody waits for, and retry the socket when due. For the thread that tends the line.

        Returns False if the connection has failed.
        """
        pipeline = self._pipeline
        if pipeline is None:
            if time.monotonic() > self._socket_at:
                self.find()
            return True
        pipeline.look()
        return pipeline.alive

    def send(self, method: str, *arguments: Any) -> Sent:
        """Call a method. ConnectionError if sending is known to fail."""
        pipeline = self._pipeline
        if pipeline is None:
            return Sent(method, self._remote(method, arguments))
        request = Request()
        pipeline.send(packed((method, *arguments)), request.deliver)
        return Sent(method, None, request, pipeline)

    def wait(self, sent: Sent, seconds: float) -> Any:
        """Wait for the answer. Raises one of ERRORS if none comes. ValueError: the call failed in the directory."""
        if sent.pipeline is None or sent.request is None:
            return _ray_get(sent.ref, seconds)
        return _result(sent.method, sent.pipeline.wait(sent.request, seconds))

    def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        """Call a method, and wait for its answer. Raises one of ERRORS."""
        return self.wait(self.send(method, *arguments), seconds)

    async def acall(self, method: str, *arguments: Any, seconds: float) -> Any:
        """Like `call`, but for event loops."""
        pipeline = self._pipeline
        if pipeline is None:
            async with asyncio.timeout(seconds):
                return await self._remote(method, arguments)
        return _result(method, await pipeline.answer(packed((method, *arguments)), seconds))

    def tell(self, method: str, *arguments: Any, deliver: Callable[[Any], None] | None = None) -> None:
        """Call a method without waiting for the answer. ConnectionError if sending is known to fail.

        deliver: called with the answer, or with None if the call failed, by the thread that reads answers. The
        directory sends the answer together with its next answer.
        """
        pipeline = self._pipeline
        if pipeline is None:
            ref = self._remote(method, arguments)
            if deliver is not None:
                ref.future().add_done_callback(lambda done: deliver(None if done.exception() else done.result()))
            return

        def on_answer(answer: bytes | ConnectionError) -> None:
            if deliver is not None:
                done, result = (False, None) if isinstance(answer, ConnectionError) else unpacked(answer)
                deliver(result if done else None)

        pipeline.send(packed((None, method, *arguments)), on_answer)

    def close(self) -> None:
        """End the connection. Waiting calls fail."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()

    def _remote(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method through Ray. Returns Ray's reference to the result."""
        if self.actor is None or not ray.is_initialized():  # a call would make Ray join a cluster
            raise ConnectionError(f"pool {self._pool!r} has no directory")
        return getattr(self.actor, method).remote(*plain(arguments))


def plain(argument: Any) -> Any:
    """Convert messages to plain tuples, which Ray pickles fastest. msgpack packs both alike."""
    return tuple(map(plain, argument)) if isinstance(argument, tuple) else argument


def _ray_get(ref: Any, seconds: float) -> Any:
    try:
        return ray_calls.get(ref, timeout=seconds)
    except SystemError as error:  # Ray turns an error of a signal handler into SystemError, except for Ctrl-C
        raise error.__cause__ or error from None


def _result(method: str, answer: bytes) -> Any:
    done, result = unpacked(answer)
    if not done:
        raise ValueError(f"the directory could not answer {method!r}: {result}")
    return result
