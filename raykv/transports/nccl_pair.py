"""Two GPUs of two processes, joined by an NCCL communicator for one direction.

Two NCCL calls block until the peer makes the same call: the init of a communicator, and its first group of transfers.
So each pair has a thread that makes all NCCL calls. If NCCL has not connected within CONNECT_S, another thread aborts
the communicator, which ends the blocked call. Tested with CuPy 14 and NCCL 2.28 and 2.32.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from raykv.arena.gpu import cuda
from raykv.line import tls
from raykv.transports import base

log = logging.getLogger("raykv")
READER, SENDER = 0, 1  # ranks
UNIQUE_BYTES = 128  # bytes of a pair's name
POLL_S = 2e-4  # time between two checks whether a transfer is done
CONNECT_S = 120.0  # maximum time to connect: NCCL takes 2 s on a warm H100, and up to a minute if nothing is loaded
# GPU memory of NCCL's kernels and of each pair, for NCCL 2.28 on an H100 with pairs over sockets.
KERNELS_BYTES, PAIR_BYTES = 446 << 20, 18 << 20
# The last two of NCCL's statuses, for which CuPy 14 raises KeyError.
UNNAMED = {
    7: "NCCL_ERROR_IN_PROGRESS: NCCL returned before it was done: unset NCCL_COMM_BLOCKING where Ray starts",
    8: "NCCL_ERROR_TIMEOUT: the peer did not answer NCCL in time",
}
Result = TypeVar("Result")


def why_not() -> str:
    """Return why this process can't use NCCL, or "" if it can."""
    if tls.used():
        return "RAY_USE_TLS is set, and NCCL does not encrypt"
    try:
        cuda.cupy()
        from cupy.cuda import nccl
    except ImportError as error:
        return str(error)
    return "" if nccl.available else "CuPy finds no NCCL: pip install nvidia-nccl-cu13"


def memory_of(pairs: int) -> int:
    """Return the bytes of GPU memory that this number of pairs takes."""
    return KERNELS_BYTES + pairs * PAIR_BYTES if pairs else 0


def new_unique() -> bytes:
    """Return the name of a new pair: 128 bytes, which the READER must give to the SENDER."""
    from cupy.cuda import nccl

    with translated():
        return bytes(nccl.get_unique_id())


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise NCCL's errors in the `with` block as ConnectionErrors."""
    with base.translated("NCCL"):
        try:
            yield
        except KeyError as error:
            raise ConnectionError(f"NCCL: {UNNAMED.get(error.args[0], repr(error))}") from error


def _nothing() -> None:
    pass


class Pair:
    """This process's end of a pair. Its tasks (`do`) run in order; after an error no more tasks run. Thread-safe."""

    def __init__(self, ordinal: int, unique: bytes, rank: int, invite: Callable[[], object] = _nothing) -> None:
        """Return at once. The future `ready` is done when the peer has connected. If this fails, `ready` has an error.

        ordinal: number of the GPU in this process. invite: makes the peer's end; called in the pair's thread.
        """
        self.unique, self._ordinal, self._rank, self._invite = unique, ordinal, rank, invite
        self._comm: Any = None
        self._mutex = threading.Lock()  # guards `_comm` and `_calls`, so that a communicator is aborted only once
        self._calls = True  # False once NCCL's connecting calls have returned; these calls may hang
        self.dropped = False
        self._ended = threading.Event()
        self._why = "it was dropped"  # why the pair has ended
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self.ready = self.do(_nothing)
        threading.Thread(target=self._run, name="raykv-nccl", daemon=True).start()

    @property
    def usable(self) -> bool:
        """Whether tasks run now, or will run once the pair is connected."""
        return not self.dropped and not self._ended.is_set()

    def do(self, task: Callable[[], Result]) -> "Future[Result]":
        """Run a task in the pair's thread. The future has a ConnectionError if the pair ends before the task."""
        future: Future[Result] = Future()
        self._tasks.put((future, task))
        if self._ended.is_set():
            self._refuse()
        return future

    def idle(self) -> "Future[None]":
        """Return a future that is done once each task given so far is done or will never run."""
        return self.do(_nothing)

    def drop(self) -> "Future[None]":
        """Abort the transfer, and end the pair. The returned future is done when no transfer is running.

        A pair that is still connecting ends once it is connected, or after CONNECT_S.
        """
        self.dropped = True
        return self.idle()

    def move(self, addresses: NDArray[np.int64], size: int, end: float) -> None:
        """In a task: receive or send blocks of `size` bytes, in order, and wait for them. The peer must do the same.

        addresses: (n,) addresses in the GPU's memory; a block received for address 0 is discarded. Raises
        ConnectionError after `end` (time.monotonic()), if NCCL fails, or once the pair is dropped. The transfer has
        ended before the error is raised.
        """
        try:
            with translated():
                self._post(addresses, size)
                self._wait(end)
        except BaseException:
            self._abort()
            raise

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            with cuda.on(self._ordinal) as cupy:
                self._connect(cupy)
                while not self.dropped:
                    _do(*self._tasks.get())
        except Exception as error:
            log.debug("a pair of GPUs ends: %r", error)
            self._why = (str(error).strip() or repr(error)).splitlines()[-1]  # Ray's errors contain a traceback
        finally:
            with contextlib.suppress(ConnectionError):  # CUDA has failed, so no transfer is running
                self._abort()
            self._ended.set()
            self._refuse()

    def _connect(self, cupy: Any) -> None:
        from cupy.cuda import nccl

        self._cupy, self._nccl = cupy, nccl
        self._stream = cupy.cuda.Stream(non_blocking=True)  # does not wait for the legacy default stream
        self._scrap = cupy.cuda.Memory(1)
        self._invite()
        limit = threading.Timer(CONNECT_S, self._abort_hung)
        limit.name, limit.daemon = "raykv-nccl-abort", True
        limit.start()
        try:
            with translated():
                self._call()
        finally:
            limit.cancel()
            with self._mutex:
                hung, self._calls = self._comm is None, False
            if hung:
                raise ConnectionError(f"NCCL has not connected in {CONNECT_S:.0f} s: the peer's end does not come")
        with translated():
            self._wait(time.monotonic() + CONNECT_S)

    def _call(self) -> None:
        """Make the communicator, and transfer a byte, so that no later group has to connect. Waits for the peer."""
        kind = self._nccl.NcclCommunicator
        self._comm = kind.__new__(kind)  # set before NCCL fills it, so that it is aborted if NCCL fails or hangs
        self._comm.__init__(2, self.unique, self._rank)
        self._post(np.zeros(1, np.int64), 1)

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
            self._comm.check_async_error()  # after `done`, so that a failed transfer does not count as finished
            if done:
                return
            if self.dropped or time.monotonic() > end:
                raise ConnectionError("the pair was dropped during a transfer" if self.dropped else "the peer stalls")
            time.sleep(POLL_S)

    def _abort(self) -> None:
        """Abort the transfer, and wait for its end. Another thread frees the communicator, as freeing may hang."""
        with self._mutex:
            comm, self._comm = self._comm, None
        if comm is not None:
            threading.Thread(target=self._free, args=(comm,), name="raykv-nccl-abort", daemon=True).start()
            with translated():
                self._stream.synchronize()

    def _abort_hung(self) -> None:
        """Abort a pair that is still connecting. Then the call of NCCL in the pair's thread fails."""
        with self._mutex:
            comm, self._comm = (self._comm, None) if self._calls else (None, self._comm)
        if comm is not None:
            self._free(comm)

    def _free(self, comm: Any) -> None:
        with cuda.on(self._ordinal):
            comm.abort()

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
