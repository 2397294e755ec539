"""Two GPUs of two processes, joined by an NCCL communicator for one direction.

NCCL blocks until the peer comes: in the constructor, and in the first group, which connects. So all calls are made in a
thread of the pair's own, which is abandoned where it hangs. Tested with CuPy 14 and NCCL 2.32.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from raykv.arena.gpu import cuda
from raykv.transports.base import translated

log = logging.getLogger("raykv")
READER, SENDER = 0, 1  # ranks
UNIQUE_BYTES = 128  # of a pair's name
POLL_S = 2e-4  # between checks whether a transfer is done
Result = TypeVar("Result")


def why_not() -> str:
    """Why this process can't use NCCL; "" if it can."""
    try:
        cuda.cupy()
        from cupy.cuda import nccl
    except ImportError as error:
        return str(error)
    return "" if nccl.available else "CuPy finds no NCCL: pip install nvidia-nccl-cu13"


def new_unique() -> bytes:
    """The name of a new pair: 128 bytes, which its SENDER must get from its READER."""
    from cupy.cuda import nccl

    with translated("NCCL"):
        return bytes(nccl.get_unique_id())


class Pair:
    """This process's end of a pair. Its tasks (`do`) run in order; after one has raised, no other runs. Thread-safe."""

    def __init__(self, ordinal: int, unique: bytes, rank: int) -> None:
        """ordinal: number of the GPU in this process. Returns at once; `ready` is done when the peer is connected."""
        self.unique, self._rank = unique, rank
        self._comm: Any = None
        self._dropped = False
        self._ended = threading.Event()
        self._why = "it was dropped"  # the pair has ended
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self.ready = self.do(_nothing)
        threading.Thread(target=self._run, args=(ordinal,), name="raykv-nccl", daemon=True).start()

    @property
    def usable(self) -> bool:
        """Whether the pair is connected, has not failed and was not dropped."""
        return self.ready.done() and not self._dropped and not self._ended.is_set()

    def do(self, task: Callable[[], Result]) -> "Future[Result]":
        """Run a task in the pair's thread. Its result is a ConnectionError if the pair ends before."""
        future: Future[Result] = Future()
        self._tasks.put((future, task))
        if self._ended.is_set():
            self._refuse()
        return future

    def idle(self) -> "Future[None]":
        """Done when all tasks given until now are done, or never will run."""
        return self.do(_nothing)

    def drop(self) -> "Future[None]":
        """Abort the transfer, and end. Done when nothing moves any more; never where NCCL hangs."""
        self._dropped = True
        return self.idle()

    def move(self, addresses: NDArray[np.int64], size: int, end: float) -> None:
        """In a task: receive or send blocks of `size` bytes, in order, and wait for them. The peer must do the same.

        addresses: (n,) in the GPU's memory; a block that is received for a 0 is thrown away. ConnectionError past `end`
        (time.monotonic()), where NCCL fails, or once the pair is dropped; nothing moves any more then.
        """
        try:
            with translated("NCCL"):
                self._post(addresses, size)
                self._wait(end)
        except BaseException:
            self._abort()
            raise

    # ------------------------------------------------------------------ the thread

    def _run(self, ordinal: int) -> None:
        try:
            with cuda.on(ordinal) as cupy:
                self._connect(cupy)
                while not self._dropped:
                    _do(*self._tasks.get())
        except Exception as error:
            log.debug("a pair of GPUs ends: %r", error)
            self._why = str(error)
        finally:
            with contextlib.suppress(ConnectionError):  # CUDA has failed: nothing moves
                self._abort()
            self._ended.set()
            self._refuse()

    def _connect(self, cupy: Any) -> None:
        from cupy.cuda import nccl

        self._cupy, self._nccl = cupy, nccl
        self._stream = cupy.cuda.Stream(non_blocking=True)  # does not wait for the legacy default stream
        self._scrap = cupy.cuda.Memory(1)
        with translated("NCCL"):
            self._comm = nccl.NcclCommunicator(2, self.unique, self._rank)
        self.move(np.zeros(1, np.int64), 1, math.inf)  # connects, so that no later group has to

    def _post(self, addresses: NDArray[np.int64], size: int) -> None:
        if not addresses.all() and size > self._scrap.size:
            self._scrap = self._cupy.cuda.Memory(size)
        act = self._comm.send if self._rank == SENDER else self._comm.recv
        self._nccl.groupStart()
        try:
            for address in np.where(addresses, addresses, self._scrap.ptr).tolist():
                act(address, size, self._nccl.NCCL_UINT8, 1 - self._rank, self._stream.ptr)
        finally:
            self._nccl.groupEnd()

    def _wait(self, end: float) -> None:
        while True:
            done = self._stream.done
            self._comm.check_async_error()  # after `done`: a transfer that failed is not taken for done
            if done:
                return
            if self._dropped or time.monotonic() > end:
                raise ConnectionError("the pair was dropped during a transfer" if self._dropped else "the peer stalls")
            time.sleep(POLL_S)

    def _abort(self) -> None:
        """Nothing moves when this returns. NCCL's abort then frees what both ends share, and may hang in that."""
        comm, self._comm = self._comm, None
        if comm is not None:
            threading.Thread(target=comm.abort, name="raykv-nccl-abort", daemon=True).start()
            with translated("NCCL"):
                self._stream.synchronize()

    def _refuse(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()[0].set_exception(ConnectionError(f"NCCL: the pair has ended: {self._why}"))


def _do(future: "Future[Result]", task: Callable[[], Result]) -> None:
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)
        raise


def _nothing() -> None:
    pass
