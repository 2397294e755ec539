"""Threads for callers that must not wait."""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from raykv.system import fork

P = ParamSpec("P")
T = TypeVar("T")

SEATS = 16  # maximum number of threads that work at a time: copies share the memory's bandwidth
THREADS = 256  # maximum number of threads, including threads that wait for another process
_thread = threading.local()  # seats: the Workers' semaphore that this thread's work has acquired


class Workers:
    """Threads. Up to SEATS threads work at a time. A thread frees its seat while it waits: see `giving_way`."""

    def __init__(self, name: str) -> None:
        """name: prefix of the threads' names."""
        self._seats = threading.Semaphore(SEATS)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=name)

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function in one of the threads."""
        return self._threads.submit(self._run, partial(function, *args, **kwargs))

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a thread, beside the event loop. A cancelled call waits until the function ends.

        The function may use the caller's memory until then. It runs in the caller's context, so in the caller's span.
        """
        fork.refuse_forked()
        work = partial(function, *args, **kwargs)
        running = asyncio.wrap_future(self.submit(contextvars.copy_context().run, work))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():  # keep waiting after a second cancellation too
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            raise

    def _run(self, work: Callable[[], Any]) -> Any:
        with self._seats:
            _thread.seats = self._seats
            return work()


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """Free this thread's seat while it waits for another process. Does nothing outside Workers' threads."""
    seats: threading.Semaphore | None = getattr(_thread, "seats", None)
    if seats is None:
        yield
        return
    seats.release()
    try:
        yield
    finally:
        seats.acquire()
