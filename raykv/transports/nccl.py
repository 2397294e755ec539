"""Transfers blocks between nodes by NCCL, from one GPU's slots into another GPU's slots, without packing the blocks.

NCCL takes seconds to connect two GPUs. It begins to connect when the peer's offer has arrived. Meanwhile another
transport reads.

A pull makes two calls to the peer's actor, which both return at once. The first call asks the peer to send, and returns
the headers of the blocks. Then NCCL transfers the blocks that are there. A slot may be overwritten while it is sent,
and no checksums are computed on a GPU. So the second call returns the headers again after the bytes have arrived. The
reader drops blocks that are no longer there.
"""

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError

from raykv.arena.arena import Arena
from raykv.arena.gpu import device
from raykv.protocol.location import KEY_BYTES, LOCATION, Locations
from raykv.protocol.transfers import ALTERED, FAILED, PULLED, data_deadline, seconds_left
from raykv.transports import nccl_pair
from raykv.transports.base import Peer, PullRequest, Transport, ask, records_of
from raykv.transports.block_server import CLAIM, claims_of
from raykv.transports.nccl_pair import READER, SENDER, UNIQUE_BYTES, Pair, new_unique, why_not

Offer = tuple[str, str]  # a name that outlives restarts, and a token that is new in every process


class Nccl(Transport):
    """Reads from GPUs of other nodes, and lets them read from a GPU here.

    Each direction between two GPUs has its own Pair. If both directions shared a Pair, its two ends might both receive
    first, and wait forever.
    """

    name = "nccl"

    def __init__(self, arena: Arena, gpu: device.Device) -> None:
        """gpu: the GPU that has the arena's slots. Raises ImportError if NCCL can't be used."""
        if why := why_not():
            raise ImportError(why)
        self._arena, self._ordinal = arena, gpu.ordinal
        self._name, self._token = f"{gpu.uuid}{arena.path}", secrets.token_hex(8)
        self._reading: dict[str, tuple[str, Pair]] = {}  # by the peer's name: the peer's token, and the pair
        self._sending: dict[str, Pair] = {}  # by the reader's name
        self._mutex = threading.Lock()  # guards both tables; no SlotLocks are taken meanwhile

    def offer(self) -> Offer:
        return self._name, self._token

    # ------------------------------------------------------------------ for peers

    def serve(self, token: str, what: str, *args: Any) -> bytes:
        """Answer a reader that has this process's token. what: "join" a pair, "send" blocks, or return "headers"."""
        if token != self._token:
            raise ValueError(f"{self._name} belongs to another process now: ask for the offer again")
        answers: dict[str, Callable[..., bytes]] = {"join": self._join, "send": self._send, "headers": self._claims}
        if what not in answers:
            raise ValueError(f"{what!r} is no question: ask {', '.join(answers)}")
        return answers[what](*args)

    def _join(self, reader: str, unique: bytes) -> bytes:
        """Make this end of the pair that `unique` names. Raises ValueError for an invalid name.

        If a reader joins again, it no longer uses its earlier pair.
        """
        if len(unique) != UNIQUE_BYTES:
            raise ValueError(f"a pair is named by {UNIQUE_BYTES} bytes, not {len(unique)}")
        with self._mutex:
            if reader in self._sending:
                self._sending[reader].drop()
            self._sending[reader] = Pair(self._ordinal, unique, SENDER)
        return b""

    def _send(self, reader: str, unique: bytes, locations: bytes, keys: bytes) -> bytes:
        """Like `_claims`, but also begin to send the blocks that are there.

        Raises ValueError unless all blocks have the same size.
        """
        source = np.frombuffer(locations, LOCATION)
        if len(np.unique(source["bytes"])) != 1:  # otherwise the send would go past the end of the smaller slots
            raise ValueError(f"{len(source)} blocks of {np.unique(source['bytes']).tolist()} bytes: ask for one size")
        with self._mutex:  # held until the send is queued, so that `withdraw` waits for the send
            pair = self._sending.get(reader)
            if pair is None or not pair.usable or pair.unique != unique:
                raise ConnectionError(f"{self._name} has no such pair with {reader}")
            claims = np.frombuffer(self._claims(locations, keys), CLAIM)
            there, size = source[claims["there"]], int(source["bytes"][0])
            end = time.monotonic() + data_deadline(size * len(there))
            pair.do(partial(pair.move, self._arena.addresses(there), size, end))
        return claims.tobytes()

    def _claims(self, locations: bytes, keys: bytes) -> bytes:
        """Return (n,) CLAIM as bytes, from the current headers at n LOCATIONs."""
        source, source_keys = np.frombuffer(locations, LOCATION), np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        return claims_of(self._arena.read_headers(source, source_keys)).tobytes()

    def withdraw(self, slab: int) -> None:
        """Wait until no block is being sent. Raises TimeoutError after the deadline for sending a whole slab."""
        with self._mutex:
            pairs = list(self._sending.values())
        for pair in pairs:
            if not pair.ready.done():  # otherwise this pair could connect later, and then send from the slab
                pair.drop()
        sent = wait([pair.idle() for pair in pairs if pair.ready.done()], data_deadline(self._arena.slab_bytes))
        if sent.not_done:
            raise TimeoutError(
                f"{self._name} still sends to {len(sent.not_done)} readers: slab {slab} can't be discarded yet"
            )

    def close(self) -> None:
        """Abort all transfers, and wait until they have ended. Then the GPU's memory may be freed."""
        with self._mutex:
            pairs = [*self._sending.values(), *(pair for _, pair in self._reading.values())]
        drops = [(pair.ready.done(), pair.drop()) for pair in pairs]
        wait([dropped for connected, dropped in drops if connected], data_deadline(0))

    # ------------------------------------------------------------------ from peers

    def connecting(self, peer: Peer, offer: Offer) -> bool:
        """See Transport."""
        try:
            return not self._pair_with(peer, offer).ready.done()
        except ConnectionError:
            return False

    def forget(self, peer: str) -> None:
        """See Transport. Ends all pairs with the peer's GPU, which frees the pairs' memory on this GPU."""
        gpu = peer.rpartition("/")[2]
        with self._mutex:
            reading = [self._reading.pop(name)[1] for name in list(self._reading) if name.startswith(gpu)]
            sending = [self._sending.pop(name) for name in list(self._sending) if name.startswith(gpu)]
        for pair in reading + sending:
            pair.drop()

    def pull(self, peer: Peer, offer: Offer, request: PullRequest) -> NDArray[np.uint8]:
        """See Transport. Raises ConnectionError after half of the time, to leave half for another transport."""
        source, keys, arena, target, end = request
        stop = time.monotonic() + (end - time.monotonic()) / 2
        pair = self._pair_with(peer, offer)
        if not pair.ready.done():
            raise ConnectionError(
                f"NCCL has not connected {self._name} and {offer[0]} yet: `connecting` says when it has"
            )
        ask = partial(_ask, peer, stop, offer[1])
        try:
            pair.ready.result()
            answer = ask("send", self._name, pair.unique, source.tobytes(), keys.tobytes())
            claims = records_of(answer, CLAIM, len(source))
            there = claims["there"]
            recheck = partial(ask, "headers", source[there].tobytes(), keys[there].tobytes())
            incoming = IncomingBlocks(pair, claims[there], int(source["bytes"][0]), stop, recheck)
            verdicts = np.full(len(source), ALTERED, np.uint8)
            verdicts[there] = _result(pair.do(partial(incoming.write, arena, target[there], keys[there])), end)
            return verdicts
        except BaseException:  # the next pull must not receive this pull's blocks
            pair.drop()
            raise

    def _pair_with(self, peer: Peer, offer: Offer) -> Pair:
        """Return the pair with a peer; a new pair begins to connect. Raises ConnectionError if NCCL can't make one."""
        name, token = offer
        with self._mutex:
            before, pair = self._reading.get(name, ("", None))
            if pair is None or before != token or pair.dropped:
                if pair:
                    pair.drop()
                unique = new_unique()
                pair = Pair(self._ordinal, unique, READER, partial(self._invite, peer, token, unique))
                self._reading[name] = token, pair
            return pair

    def _invite(self, peer: Peer, token: str, unique: bytes) -> None:
        _ask(peer, time.monotonic() + nccl_pair.CONNECT_S, token, "join", self._name, unique)


class IncomingBlocks(NamedTuple):
    """Blocks that the peer sends. The reader must receive all of these blocks."""

    pair: Pair
    claims: NDArray[np.void]  # (n,) CLAIM: the headers before the blocks were sent
    size: int  # bytes of each block
    stop: float  # time.monotonic() at which the transfer must end
    recheck: Callable[[], bytes]  # asks the peer for CLAIMs again

    def write(self, arena: Arena, target: Locations, keys: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Receive the blocks into slots. Returns (n,) verdicts.

        Runs as a task of the pair. Keeps the slots' locks until the transfer has ended.
        """
        unchanged = np.ones(len(target), np.bool_)

        def fill(which: NDArray[np.bool_], slots: NDArray[np.int64]) -> list[int]:
            addresses = np.zeros(len(target), np.int64)
            addresses[which] = slots
            self.pair.move(addresses, self.size, self.stop)
            unchanged[:] = records_of(self.recheck(), CLAIM, len(target))["there"]
            checksums: list[int] = np.where(unchanged, self.claims["sum"], ~self.claims["sum"])[which].tolist()
            return checksums

        written = arena.fill(target, keys, fill, self.claims["position"], self.claims["sum"])
        return np.where(written, PULLED, np.where(unchanged, FAILED, ALTERED)).astype(np.uint8)


def _ask(peer: Peer, stop: float, *args: Any) -> bytes:
    """Ask the peer. After `stop`, raises ConnectionError, not TimeoutError, as another transport still has time."""
    try:
        answer: bytes = ask(peer, stop, Nccl.name, *args)
    except GetTimeoutError as error:
        raise ConnectionError("NCCL: the peer's actor does not answer") from error
    return answer


def _result(job: "Future[NDArray[np.uint8]]", end: float) -> NDArray[np.uint8]:
    """Wait for a task. Raises TimeoutError after `end`, if the transfer could not even be aborted by then."""
    try:
        return job.result(seconds_left(end))
    except TimeoutError as error:
        raise TimeoutError("NCCL does not end the transfer: the slots stay locked until it does") from error
