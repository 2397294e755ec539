"""Blocks cross nodes by NCCL, out of one GPU's slots and into another's, packed on neither side.

A reader asks the peer's actor to send; it answers what the headers say, and both post what is there. A slot may be
written anew while it is sent, and nothing on a GPU computes a sum: so the reader, who has the bytes by then, asks a
second time what the headers say, and drops what they no longer do. That is two calls a pull, both of which return at
once.
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
from raykv.protocol import ALTERED, FAILED, KEY_BYTES, LOCATION, PULLED, data_deadline, seconds_left
from raykv.transports.base import Peer, PullRequest, Transport, ask
from raykv.transports.nccl_pair import READER, SENDER, Pair, new_unique, why_not
from raykv.transports.tcp import CLAIM

Offer = tuple[str, str]  # what it is called, for good; a token, which is new with every process


class Nccl(Transport):
    """Reads out of the GPUs of other nodes, and has them read from one here.

    To read from a peer and to be read by it are two pairs: in one, two that both receive first would wait for good.
    """

    name = "nccl"

    def __init__(self, arena: Arena, gpu: device.Device) -> None:
        """gpu: whose memory the arena's slots are. ImportError without NCCL."""
        if why := why_not():
            raise ImportError(why)
        self._arena, self._ordinal = arena, gpu.ordinal
        self._name, self._token = f"{gpu.uuid}{arena.path}", secrets.token_hex(8)
        self._reading: dict[str, tuple[str, Pair]] = {}  # the peer's token, and the pair, by its name
        self._sending: dict[str, Pair] = {}  # by the reader's name
        self._mutex = threading.Lock()

    def offer(self) -> Offer:
        return self._name, self._token

    # ------------------------------------------------------------------ for peers

    def serve(self, token: str, what: str, *args: Any) -> bytes:
        """Of a reader who knows this process's token: `join` a pair, `send` by it, or say again what is `claimed`."""
        if token != self._token:
            raise ValueError(f"{self._name} is another process's by now: ask for its offer again")
        answers: dict[str, Callable[..., bytes]] = {"join": self._join, "send": self._send, "claimed": self._claimed}
        return answers[what](*args)

    def _join(self, reader: str, unique: bytes) -> bytes:
        """A reader that comes with another pair has given up the one before."""
        with self._mutex:
            if reader in self._sending:
                self._sending[reader].drop()
            self._sending[reader] = Pair(self._ordinal, unique, SENDER)
        return b""

    def _send(self, reader: str, unique: bytes, locations: bytes, keys: bytes) -> bytes:
        """As `claimed`. What is there is sent, from now on until it is all received, or should long have been."""
        at = np.frombuffer(locations, LOCATION)
        with self._mutex:  # `withdraw` waits for what was shown as there
            pair = self._sending.get(reader)
            if pair is None or pair.unique != unique:
                raise ConnectionError(f"{self._name} has no such pair with {reader}")
            claims = np.frombuffer(self._claimed(locations, keys), CLAIM)
            there, size = at[claims["there"]], int(at["bytes"][0])
            end = time.monotonic() + data_deadline(size * len(there))
            pair.do(partial(pair.move, self._arena.addresses(there), size, end))
        return claims.tobytes()

    def _claimed(self, locations: bytes, keys: bytes) -> bytes:
        """(n,) CLAIM: what the headers of n LOCATIONs say now."""
        at, names = np.frombuffer(locations, LOCATION), np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        claims = np.zeros(len(at), CLAIM)
        claims["sum"], claims["position"], claims["there"] = self._arena.read_headers(at, names)
        return claims.tobytes()

    def withdraw(self, slab: int) -> None:
        """Waits for what is being sent, which its own deadline ends. TimeoutError past what a slab may take."""
        with self._mutex:
            pairs = list(self._sending.values())
        for pair in pairs:
            if not pair.ready.done():  # nothing moves there; nor will it, from a slab that is gone
                pair.drop()
        sent = wait([pair.settled() for pair in pairs if pair.ready.done()], data_deadline(self._arena.slab_bytes))
        if sent.not_done:
            raise TimeoutError(f"{self._name} still sends to {len(sent.not_done)} readers: slab {slab} can't go yet")

    def close(self) -> None:
        """Abort all, and wait until nothing moves: the GPU's memory may go next."""
        with self._mutex:
            pairs = [*self._sending.values(), *(pair for _, pair in self._reading.values())]
        ends = [(pair.ready.done(), pair.drop()) for pair in pairs]
        wait([end for connected, end in ends if connected], data_deadline(0))

    # ------------------------------------------------------------------ from peers

    def pull(self, peer: Peer, offer: Offer, wanted: PullRequest) -> NDArray[np.uint8]:
        """As Transport's. ConnectionError when half of the time is gone: by then it is another transport's turn."""
        source, keys, arena, target, end = wanted
        stop = time.monotonic() + (end - time.monotonic()) / 2
        pair = self._pair_with(peer, offer, stop)
        ask = partial(_ask, peer, stop, offer[1])
        try:
            claims = np.frombuffer(ask("send", self._name, pair.unique, source.tobytes(), keys.tobytes()), CLAIM)
            there = claims["there"]
            again = partial(ask, "claimed", source[there].tobytes(), keys[there].tobytes())
            arrival = Arrival(pair, claims[there], int(source["bytes"][0]), stop, again)
            verdicts = np.full(len(source), ALTERED, np.uint8)
            verdicts[there] = _result(pair.do(partial(arrival.write, arena, target[there], keys[there])), end)
            return verdicts
        except BaseException:  # what only one side has posted must not meet what the other posts next
            pair.drop()
            raise

    def _pair_with(self, peer: Peer, offer: Offer, stop: float) -> Pair:
        """Made if there is none. One that takes longer goes on: it serves the next pull, or is given up by that."""
        name, token = offer
        before, pair = self._reading.get(name, ("", None))
        if pair is None or before != token or not pair.usable:
            if pair:
                pair.drop()
            pair = Pair(self._ordinal, new_unique(), READER)
            self._reading[name] = token, pair
            _ask(peer, stop, token, "join", self._name, pair.unique)
        try:
            pair.ready.result(seconds_left(stop))
        except TimeoutError as error:
            raise ConnectionError(f"NCCL has not connected {self._name} and {name} yet") from error
        return pair


class Arrival(NamedTuple):
    """Blocks on their way, all of which are received: the peer has posted them."""

    pair: Pair
    claims: NDArray[np.void]  # (n,) CLAIM: what their headers said before they were sent
    size: int  # bytes of each
    stop: float
    again: Callable[[], bytes]  # asks what their headers say

    def write(self, arena: Arena, target: NDArray[np.void], keys: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """In a task of the pair. It keeps the slots' locks until nothing moves any more. Returns (n,) verdicts."""
        same = np.ones(len(target), np.bool_)

        def fill(which: NDArray[np.bool_], slots: NDArray[np.int64]) -> list[int]:
            addresses = np.zeros(len(target), np.int64)
            addresses[which] = slots
            self.pair.move(addresses, self.size, self.stop)
            same[:] = np.frombuffer(self.again(), CLAIM)["there"]
            sums: list[int] = np.where(same, self.claims["sum"], ~self.claims["sum"])[which].tolist()
            return sums

        written = arena.fill(target, keys, fill, self.claims["position"], self.claims["sum"])
        return np.where(written, PULLED, np.where(same, FAILED, ALTERED)).astype(np.uint8)


def _ask(peer: Peer, stop: float, *args: Any) -> bytes:
    """What the peer serves. ConnectionError, not TimeoutError, past `stop`: there is time left for another way."""
    try:
        answer: bytes = ask(peer, stop, Nccl.name, *args)
    except GetTimeoutError as error:
        raise ConnectionError("NCCL: the peer's actor does not answer") from error
    return answer


def _result(job: "Future[NDArray[np.uint8]]", end: float) -> NDArray[np.uint8]:
    """TimeoutError where even the abort does not come to an end in time."""
    try:
        return job.result(seconds_left(end))
    except TimeoutError as error:
        raise TimeoutError("NCCL does not let go: the slots stay locked until it does") from error
