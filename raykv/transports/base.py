"""A transport: one way to copy blocks from the memory of another node's store into the memory of this node's store.

A transport has a reading end (`pull`) and a serving end (`offer`, `serve`); every node store has both ends. To add a
transport, write a subclass of Transport and list it in `raykv.transports.selector.open_transports`, and its name in
`raykv.config.TRANSPORTS` if users may choose it. TransportSelector chooses between the transports.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.arena.arena import Arena
from raykv.cluster import ray_calls
from raykv.protocol.location import Locations
from raykv.protocol.transfers import seconds_left


class Peer(NamedTuple):
    """Another node's memory or external tier, to read blocks from."""

    name: str  # the memory's name in the directory: see `raykv.protocol.location.host_of`
    store: Any  # handle of the node store's actor
    external: bool = False  # whether to read the node's external tier; its store has separate threads for this


class PullRequest(NamedTuple):
    """Blocks of a peer to copy into slots of an arena."""

    source: Locations  # (n,) LOCATION in the peer's memory or tier
    keys: NDArray[np.uint8]  # (n, 16)
    arena: Arena
    target: Locations  # (n,) LOCATION in `arena`
    end: float  # time.monotonic() at which the pull must end


class Transport:
    """One way to read from peers. Thread-safe."""

    name: ClassVar[str]  # in PoolConfig, stats and offers
    concurrent: ClassVar[bool] = False  # whether several pulls from one peer may run at the same time

    def offer(self) -> Any:
        """Return the data that peers need to read from here, or None if they can't. A restarted store has new data."""
        return None

    def serve(self, *args: Any) -> Any:
        """Answer a question that a peer's `pull` asks through `NodeStore.serve`.

        args: sent by this transport's `pull` on another node; check every index and length. Returns an answer in the
        form that `pull` expects. Raises ValueError for an invalid question.
        """
        raise ValueError(f"transport {self.name} answers no questions of peers")

    def forget(self, peer: str) -> None:
        """Forget a peer whose node is permanently gone. peer: the name of the node's memory."""

    def connecting(self, peer: Peer, offer: Any) -> bool:
        """Begin to connect to a peer, without waiting. Returns True until the two nodes are connected.

        While this returns True, other transports read from the peer. After a failure to connect, this returns False,
        and `pull` raises the error. peer: the owner of the memory. offer: the peer's offer.
        """
        return False

    def pull(self, peer: Peer, offer: Any, request: PullRequest) -> NDArray[np.uint8]:
        """Copy blocks from a peer.

        peer: the owner of the memory. offer: the peer's offer. request: the blocks, and the slots for them.
        Returns (n,) uint8 verdicts FAILED, PULLED, or ALTERED (the peer no longer has that block).
        Raises TimeoutError at the request's `end`. If bytes arrive later, their slots must still be locked. Raises
        OSError or RayError if this transport can't read from the peer. Then another transport is tried.
        """
        raise NotImplementedError

    def withdraw(self, slab: int) -> None:
        """Stop reading into the slab with this number, and stop serving it: its memory is about to be freed."""

    def close(self) -> None:
        """Stop serving. No `pull` follows."""


def ask(peer: Peer, end: float, transport: str, *args: Any) -> Any:
    """Call `serve` of a peer's transport, and return the answer. end: time.monotonic(). args: picklable.

    Raises TimeoutError at `end`, and RayError if the peer does not answer or refuses.
    """
    answer = peer.store.serve.remote(peer.name, transport, *args)
    return ray_calls.get(answer, timeout=seconds_left(end))


def records_of(answer: bytes, kind: np.dtype[np.void], count: int) -> NDArray[np.void]:
    """Decode a peer's answer about `count` blocks: one record of `kind` per block, with a bool field `there`.

    Raises ConnectionError for any other answer, so that another transport is tried.
    """
    if not isinstance(answer, bytes) or len(answer) != count * kind.itemsize:
        raise ConnectionError(f"a peer did not answer with a record for each of {count} blocks: {answer!r:.80}")
    records = np.frombuffer(answer, kind).copy()
    records["there"] = records["there"].view(np.uint8) != 0  # NumPy counts a bool whose byte is 2 as two True values
    return records


@contextlib.contextmanager
def translated(library: str) -> Iterator[None]:
    """Raise every error of a library as a ConnectionError: the library's exceptions have no common base class."""
    try:
        yield
    except ConnectionError:
        raise
    except Exception as error:
        raise ConnectionError(f"{library}: {error!r}") from error
