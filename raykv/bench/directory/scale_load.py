"""A process that simulates nodes for `raykv bench scale`, and sends their calls to a directory by its protocol.

A node consists of a store and ENGINES clients. The store has a connection for its inventory and heartbeats. Each client
has its own connection, as in production. Each second, RATE requests of an engine become due, even if earlier requests
still wait for answers. A request matches KEYS keys. Earlier requests have stored the first half of these keys. Then the
request reserves slots for the second half, and commits these keys without waiting for the answer.
"""

import heapq
import os
import random
import select
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from raykv.actors.directory.server import FRAME_BYTES
from raykv.actors.store.node_memory import pieces_of
from raykv.line import wire
from raykv.line.wire import Stream
from raykv.protocol.calls import CLIENT, STORE
from raykv.protocol.clients import MatchRequest
from raykv.protocol.location import KEY_BYTES, LOCATION, Address, Locations
from raykv.protocol.packing import packed, unpacked
from raykv.protocol.stores import ArenaDescription, Inventory, Joined, SlabReport

ENGINES, RATE = 8, 5.0  # engines per node; requests per second of an engine
KEYS = 200  # number of keys of a request; the engine has already stored the first half
PROMPTS = 32  # maximum number of stored prompts that an engine asks for in turn; small nodes store fewer
BLOCK_BYTES, SLAB_SLOTS = 2 << 20, 512
MIN_WINDOW, WINDOW_SHARE = 128, 50  # staging slots: one for each WINDOW_SHARE blocks, at least MIN_WINDOW
HEARTBEAT_S = 1.0  # seconds between two heartbeats of a store
CONNECTS = 4  # maximum number of new connections in a round
CONNECT_AGAIN_S = 0.25  # seconds to wait after the directory refused a connection
RECEIVE_BYTES = 1 << 20
SEND_S = 30.0  # maximum seconds to wait until a directory accepts more bytes
NICENESS = 10  # these processes simulate other machines, so they must not take the directory's core
OLD_BYTES = KEYS // 2 * KEY_BYTES

Deliver = Callable[[Any], None]


class Share(NamedTuple):
    """The nodes that one process simulates."""

    first: int  # number of its first node
    nodes: int
    blocks: int  # blocks of each node


class Figures(NamedTuple):
    """Counts and times since `reset`. The last three fields are the bytes of float64 arrays."""

    calls: int  # answered calls
    keys: int  # keys that matches asked for
    hits: int
    errors: int  # refused calls, and connections that failed or ended
    matched: bytes  # when each match was answered (time.monotonic())
    waited: bytes  # seconds from the due time of each match to its answer
    joined: bytes  # when the directory finished adopting each inventory


class Line:
    """A connection to the directory, which answers in the order of the calls."""

    period = HEARTBEAT_S  # seconds between two ticks
    side = CLIENT

    def __init__(self, load: "Load") -> None:
        self.load = load
        self.socket: Stream | None = None
        self.inbox = bytearray()
        self.due: deque[Deliver | None] = deque()  # receivers of the pending answers, in order

    def connect(self, address: Address) -> None:
        self.socket = wire.connect(address, self.side)
        self.socket.setblocking(False)
        self.inbox.clear()
        self.due.clear()
        self.on_connected()

    def ask(self, deliver: Deliver | None, method: str, *arguments: Any) -> None:
        """Send a call. deliver: called with the answer; None to ignore the answer."""
        assert self.socket is not None
        call = (method, *arguments) if deliver or method == "heartbeat" else (None, method, *arguments)
        data = memoryview(wire.frame(packed(call)))
        self.due.append(deliver)
        while data:
            try:
                data = data[self.socket.send(data) :]
            except BlockingIOError:  # an inventory may be longer than the socket's buffer
                select.select([], [self.socket], [], SEND_S)

    def read(self) -> None:
        """Deliver the answers received so far. Raises OSError if the directory is gone."""
        assert self.socket is not None
        data = self.socket.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the directory closed the connection")
        self.inbox += data
        while (body := wire.take_frame(self.inbox, FRAME_BYTES[STORE])) is not None:
            self._deliver(body)

    def _deliver(self, body: bytes) -> None:
        deliver = self.due.popleft()
        self.load.calls += 1
        if deliver is not None:
            done, answer = unpacked(body)
            if done:
                deliver(answer)
            else:
                self.load.errors += 1

    def on_connected(self) -> None: ...

    def tick(self, due: float) -> None: ...


class Store(Line):
    """A node's store, full of blocks."""

    side = STORE

    def __init__(self, load: "Load", number: int, blocks: int) -> None:
        super().__init__(load)
        self.name, self.nonce, self.epoch = f"{number:056x}", b"%016d" % number, 1
        self.index, self.beats = -1, False
        self.written: list[tuple[bytes, bytes]] = []  # (locations, keys) that `inventory` has not recorded yet
        self.slabs = -(-(blocks + max(MIN_WINDOW, blocks // WINDOW_SHARE)) // SLAB_SLOTS)
        self.report = tuple(SlabReport(self.slabs, self.slabs, b""))
        self.keys = np.random.default_rng(number).integers(0, 1 << 63, (self.slabs * SLAB_SLOTS, 2), np.uint64)
        self.gens = np.zeros(len(self.keys), np.int64)  # 0: the slot is free
        self.gens[:blocks] = (self.epoch << 40) + np.arange(1, blocks + 1)
        self.slab_gens = (self.epoch << 40) + np.arange(1, self.slabs + 1)

    def prompt(self, number: int) -> bytes:
        """Keys of the stored prompt with this number. The prompts consist of the node's newest blocks."""
        stop = np.count_nonzero(self.gens) - number * KEYS // 2
        return self.keys[stop - KEYS // 2 : stop].tobytes()

    def on_connected(self) -> None:
        self.beats = False
        arena = ArenaDescription(self.nonce, BLOCK_BYTES * SLAB_SLOTS, self.slabs, self.epoch)
        self.ask(self._on_joined, "join", self.name, tuple(arena))

    def _on_joined(self, answer: Any) -> None:
        self.index, self.epoch = Joined(*answer)
        self.load.by_index[self.index] = self
        self.pieces = pieces_of(self.inventory())
        self._adopt()

    def _adopt(self, _: None = None) -> None:
        piece = next(self.pieces, None)
        if piece is not None:
            self.ask(self._adopt, "adopt", self.name, self.report, tuple(piece))
        else:
            self.beats = True
            self.load.joined.append(time.monotonic())

    def tick(self, due: float) -> None:
        if self.beats:
            self.ask(None, "heartbeat", self.name, self.report)

    def _note(self, locations: Locations, keys: bytes) -> None:
        """Record that these slots now hold the blocks of these keys."""
        if (locations["node"] != self.index).any():  # another node has some of the blocks
            return
        slots = locations["slab"].astype(np.int64) * SLAB_SLOTS + locations["slot"]
        self.keys[slots], self.gens[slots] = np.frombuffer(keys, np.uint64).reshape(-1, 2), locations["gen"]
        self.slab_gens[locations["slab"]] = locations["slab_gen"]

    def inventory(self) -> Inventory:
        """Return an inventory of all blocks. Newer blocks have later stamps."""
        for written, keys in self.written:
            self._note(np.frombuffer(written, LOCATION), keys)
        self.written.clear()
        slots = np.flatnonzero(self.gens)
        locations = np.zeros(len(slots), LOCATION)
        locations["slab"], locations["slot"] = np.divmod(slots, SLAB_SLOTS)
        locations["node"], locations["bytes"], locations["gen"] = self.index, BLOCK_BYTES, self.gens[slots]
        locations["slab_gen"] = self.slab_gens[locations["slab"]]
        stamps = np.argsort(np.argsort(self.gens[slots])).astype(np.uint32)
        positions = np.zeros(len(slots), np.uint32)
        return Inventory(
            locations.tobytes(), self.keys[slots].tobytes(), positions.tobytes(), stamps.tobytes(), writing=b""
        )


class Engine(Line):
    """A client that sends one request at a time. If another request becomes due meanwhile, that request waits."""

    period = 1 / RATE

    def __init__(self, load: "Load", store: Store, prompts: list[bytes]) -> None:
        super().__init__(load)
        self.store, self.prompts = store, deque(prompts)
        self.client, self.seq, self.hold = random.getrandbits(63), 0, 0
        self.waiting: deque[float] = deque()  # due times of waiting requests
        self.since = 0.0  # due time of the current request; 0 if there is none

    def on_connected(self) -> None:
        self.since = 0.0
        self.waiting.clear()

    def tick(self, due: float) -> None:
        if not self.load.asking:
            return
        if self.since:
            self.waiting.append(due)
        else:
            self._match(due)

    def _match(self, due: float) -> None:
        self.since, self.hold = due, self.hold + 1
        self.new = os.urandom(OLD_BYTES)
        self.wanted = self.prompts[0] + self.new
        request = MatchRequest(self.hold, self.store.name, self.wanted, BLOCK_BYTES, KEYS)
        self.ask(self._on_matched, "match", self._call(), tuple(request))

    def _call(self) -> tuple[Any, ...]:
        """A Call that lists only the latest lease or reservation."""
        self.seq += 1
        return self.client, self.seq, self.hold.to_bytes(8, "little"), b"", b""  # a Call

    def _on_matched(self, answer: Any) -> None:
        n = len(answer[1]) // LOCATION.itemsize
        self.load.on_matched(self.since, n)
        self.hold += 1
        self.ask(self._on_reserved, "reserve", self._call(), (self.hold, self.store.name, self.wanted, n, BLOCK_BYTES))

    def _on_reserved(self, answer: Any) -> None:
        _, _, indices, locations, _ = answer  # a Reserved
        keys = self._keys_at(indices)
        self.ask(None, "commit", self._call(), (self.hold, locations, keys, b"\1" * (len(indices) // 4)))
        self.load.on_written(locations, keys)
        self.prompts.rotate(-1)
        self.prompts[-1] = self.new
        self.since = 0.0
        if self.waiting:
            self._match(self.waiting.popleft())

    def _keys_at(self, indices: bytes) -> bytes:
        """Keys for which the directory granted a slot; normally all new keys."""
        if len(indices) == len(self.new) // KEY_BYTES * 4:
            return self.new
        return np.frombuffer(self.wanted, np.uint64).reshape(-1, 2)[np.frombuffer(indices, np.int32)].tobytes()


class Load:
    """All lines of a process, and when each line's next tick is due."""

    def __init__(self, share: Share) -> None:
        numbers = range(share.first, share.first + share.nodes)
        self.stores = [Store(self, number, share.blocks) for number in numbers]
        self.prompts = max(1, min(PROMPTS, share.blocks // (2 * ENGINES * KEYS)))
        self.engines = [engine for store in self.stores for engine in self._engines(store)]
        self.lines: list[Line] = [*self.stores, *self.engines]
        self.by_index: dict[int, Store] = {}
        self.by_socket: dict[int, Line] = {}
        self.to_connect: deque[Line] = deque()
        self.connect_at = 0.0  # time.monotonic()
        self.address: Address | None = None
        self.asking = False
        self.epoll = select.epoll()
        now = time.monotonic()
        self.due = [(now + random.random() * line.period, i, line) for i, line in enumerate(self.lines)]
        heapq.heapify(self.due)
        self.reset()

    def _engines(self, store: Store) -> Iterator[Engine]:
        for first in range(0, ENGINES * self.prompts, self.prompts):
            yield Engine(self, store, [store.prompt(i) for i in range(first, first + self.prompts)])

    # ------------------------------------------------------------------ what is seen

    def reset(self) -> None:
        self.calls = self.keys = self.hits = self.errors = 0
        self.matched: list[float] = []
        self.waited: list[float] = []
        self.joined: list[float] = []

    def figures(self) -> Figures:
        times = (np.array(seen).tobytes() for seen in (self.matched, self.waited, self.joined))
        return Figures(self.calls, self.keys, self.hits, self.errors, *times)

    def on_matched(self, due: float, hits: int) -> None:
        now = time.monotonic()
        self.matched.append(now)
        self.waited.append(now - due)
        self.keys += KEYS
        self.hits += hits

    def on_written(self, locations: bytes, keys: bytes) -> None:
        store = self.by_index.get(int.from_bytes(locations[:4], "little"))
        if store is not None:  # another process may simulate the node
            store.written.append((locations, keys))

    # ------------------------------------------------------------------ the loop

    def connect(self, address: Address) -> None:
        """Connect all lines to a directory, in random order."""
        for line in self.lines:
            if line.socket is not None:  # a connection to the previous directory
                self._lose(line)
        self.address, self.connect_at = address, 0.0
        self.to_connect = deque(random.sample(self.lines, len(self.lines)))

    def round(self) -> None:
        """Connect some lines, send the calls that are due, and read answers."""
        for _ in range(min(CONNECTS, len(self.to_connect))):
            if self.connect_at <= time.monotonic():
                self._connect(self.to_connect.popleft())
        while self.due[0][0] <= time.monotonic():
            due, number, line = self.due[0]
            heapq.heapreplace(self.due, (due + line.period, number, line))
            if line.socket is not None:
                self._attempt(line, line.tick, due)
        connecting = self.to_connect and self.connect_at <= time.monotonic()
        pause = 0.0 if connecting else min(0.05, max(0.0, self.due[0][0] - time.monotonic()))
        for number, _ in self.epoll.poll(pause):
            line = self.by_socket[number]
            self._attempt(line, line.read)

    def _connect(self, line: Line) -> None:
        if line.socket is not None or self.address is None:
            return
        try:
            line.connect(self.address)
        except OSError:
            self.errors += 1
            self.to_connect.append(line)
            self.connect_at = time.monotonic() + CONNECT_AGAIN_S
            return
        assert line.socket is not None
        self.by_socket[line.socket.fileno()] = line
        self.epoll.register(line.socket, select.EPOLLIN)

    def _attempt(self, line: Line, step: Callable[..., None], *arguments: float) -> None:
        try:
            step(*arguments)
        except BlockingIOError:
            pass
        except OSError:
            self.errors += 1
            self._lose(line)

    def _lose(self, line: Line) -> None:
        assert line.socket is not None
        self.epoll.unregister(line.socket)
        line.socket.close()
        line.socket = None
        self.to_connect.append(line)


def simulate(share: Share, orders: Connection) -> None:
    """The main function of a load process: follow orders, and meanwhile send the nodes' calls to a directory.

    Orders: ("connect", Address); ("ask", whether engines send requests); ("reset",); ("figures",), which sends Figures.
    """
    os.nice(NICENESS)
    load = Load(share)
    orders.send("ready")
    while True:
        while orders.poll():
            order, *arguments = orders.recv()
            if order == "ask":
                (load.asking,) = arguments
            elif order == "figures":
                orders.send(load.figures())
            else:
                getattr(load, order)(*arguments)
        load.round()
