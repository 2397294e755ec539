"""How blocks get from the memory of one node store into that of another."""

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from raykv.arena.arena import Arena
from raykv.protocol import seconds_left


class Peer(NamedTuple):
    """Memory of another node that is read from."""

    name: str  # as the directory has it: see `raykv.protocol.host_of`
    store: Any  # the actor
    external: bool = False  # its external tier, which is waited for, and not by what comes from memory


class PullRequest(NamedTuple):
    """Blocks of a peer, and slots of an arena for them."""

    source: NDArray[np.void]  # (n,) LOCATION there
    keys: NDArray[np.uint8]  # (n, 16)
    arena: Arena
    target: NDArray[np.void]  # (n,) LOCATION here
    end: float  # time.monotonic() until which they are waited for


class Transport:
    """One way to read from peers. Thread-safe; of one peer there is one pull at a time."""

    name: ClassVar[str]

    def offer(self) -> Any:
        """What peers need to read from here by it; another one with every process. None: they can't."""
        return None

    def serve(self, *args: Any) -> Any:
        """What the `pull` of a peer asks of this node, by `NodeStore.serve`."""
        raise ValueError(f"{self.name} is not asked for anything")

    def pull(self, peer: Peer, offer: Any, wanted: PullRequest) -> NDArray[np.uint8]:
        """Copy blocks of a peer, which offers that; (n,) verdicts FAILED, PULLED, or ALTERED there.

        Raises TimeoutError at their `end`; what is written from then on is under the slots' locks. OSError or RayError
        where the peer can't be read by it: another transport may.
        """
        raise NotImplementedError

    def withdraw(self, slab: int) -> None:
        """The memory of one of this arena's slabs is about to go."""

    def close(self) -> None:
        """Nobody reads by it any more."""


def ask(peer: Peer, end: float, transport: str, *args: Any) -> Any:
    """What the `serve` of a peer's transport answers. TimeoutError at the time `end`."""
    answer = peer.store.serve.remote(peer.name, transport, *args)
    return ray.get(answer, timeout=seconds_left(end))


@contextlib.contextmanager
def translated(library: str) -> Iterator[None]:
    """Whatever a library raises, which has no exceptions in common, is a ConnectionError."""
    try:
        yield
    except ConnectionError:
        raise
    except Exception as error:
        raise ConnectionError(f"{library}: {error!r}") from error
