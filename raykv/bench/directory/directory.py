"""Costs of a large directory: bytes per entry, and times of match, release, store with eviction, and loss of a node.

The bench calls public methods of `raykv.directory.directory.Directory`. The floor (baseline) is a plain model that
keeps the same state in dicts.
"""

import itertools
import statistics
import sys
import time
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.config import KEYS_PER_CALL
from raykv.directory.directory import Directory
from raykv.protocol.clients import Call, CommitRequest, MatchRequest, ReserveRequest
from raykv.protocol.location import LOCATION
from raykv.protocol.stores import ArenaDescription, Inventory

KeyArray = NDArray[np.uint64]  # (n, 2)

LENGTHS = (64, 512, 8192)  # numbers of keys of a match
SHORT, LONG = 512, 8192  # blocks per chain; half of the entries are in short chains, half in long chains
MIN_ENTRIES = 200_000
FLOOR_ENTRIES = 1_000_000  # maximum entries of the plain model; more would take minutes and gigabytes
MIN_NODES, NODE_BLOCKS = 8, 1_000_000
SLAB_SLOTS = 16_384
BLOCK_BYTES = 4096
PER_CALL = 4096  # keys per call while the directory is filled
STORE = 1024  # blocks of a timed store: a prompt of 16,384 tokens
TURNS = 12
IN_A_TURN = 5  # calls of one side; the first call does not count: the CPU caches hold the other side's data
WRITERS = 16 * LONG  # total blocks of chains that grow at the same time, interleaved at random
CHURN = 0.4  # share of blocks that are replaced before the first timing


def run(entries: int) -> dict[str, Any]:
    """Measure a directory of `entries` blocks. floor: figures of the plain model with at most a million blocks.

    match_us, release_us: by number of keys, for the least recently used chains. insert_per_s: stored blocks per
    second, in stores of `store_blocks` new blocks that evict the same number of blocks. remove_node_ms: time to remove
    a node of `remove_node_blocks` blocks. Times are medians. The directory and the model are timed in turn. Raises
    ValueError below 200,000 entries.
    """
    if entries < MIN_ENTRIES:
        raise ValueError(f"entries={entries}: give at least {MIN_ENTRIES}, so that every node holds long chains")
    nodes = max(MIN_NODES, entries // NODE_BLOCKS)
    few = min(entries, FLOOR_ENTRIES)
    loads = (_Load(_Pool(entries, nodes), entries, nodes), _Load(_Plain(few, MIN_NODES), few, MIN_NODES))
    for load in loads:
        load.fill()
    for length in LENGTHS:
        for load in loads * TURNS:
            for timed in range(IN_A_TURN):
                load.match(length, timed > 0)
    for load in loads * TURNS:
        for timed in range(IN_A_TURN):
            load.store(timed > 0)
    for _ in range(3):
        for load in loads:
            load.lose_node()
    result, floor = (load.figures() for load in loads)
    return {"nodes": nodes, "store_blocks": STORE, **result, "floor": floor}


class _Pool:
    """The real directory."""

    def __init__(self, entries: int, nodes: int) -> None:
        self.directory = Directory()
        self.calls = itertools.count(1)
        window = entries // nodes // 50  # staging slots: 2% of a node's capacity
        slots = entries // nodes + window
        slabs = -(-slots // SLAB_SLOTS)
        slab_bytes = -(-slots // slabs) * BLOCK_BYTES
        for node in range(nodes):
            arena = ArenaDescription(b"%d" % node, slab_bytes, slabs, 0)
            self.directory.join(str(node), arena, 0.0, window * BLOCK_BYTES)
            self.directory.adopt(str(node), Inventory(b"", b"", b"", b"", b""), 0.0)
            self.directory.heartbeat(str(node), slabs, 0.0)

    def prepare(self, keys: KeyArray) -> bytes:
        return keys.tobytes()

    def match(self, node: int, keys: bytes) -> int:
        """Match and lease. Returns the number of blocks found on `node`."""
        matched = self.directory.match(self._call(), MatchRequest(1, str(node), keys, BLOCK_BYTES, KEYS_PER_CALL), 0.0)
        return 0 if matched.staged else len(matched.source) // LOCATION.itemsize

    def release(self) -> None:
        self.directory.client_heartbeat(self._call(), 0.0)

    def store(self, node: int, keys: bytes) -> None:
        granted = self.directory.reserve(self._call(), ReserveRequest(2, str(node), keys, 0, BLOCK_BYTES), 0.0)
        indices = np.frombuffer(granted.indices, np.int32)
        chosen = np.frombuffer(keys, np.uint64).reshape(-1, 2)[indices].tobytes()
        held = np.uint64(2).tobytes()
        request = CommitRequest(2, granted.locations, chosen, b"\1" * len(indices))
        self.directory.commit(self._call(held), request, 0.0)

    def remove(self, node: int) -> int:
        """Remove a node. Returns the number of slots that it had."""
        return self.directory.remove_node(str(node), 0.0)

    def bytes_per_entry(self) -> float:
        return self.directory.nbytes / float(self.directory.stats(0.0)["keys"])

    def _call(self, held: bytes = b"") -> Call:
        return Call(1, next(self.calls), held)


class _Block:
    """A block of the plain model."""

    __slots__ = ("gen", "key", "node", "pins", "slot")

    def __init__(self, key: bytes, node: int, slot: int, gen: int) -> None:
        self.key, self.node, self.slot, self.gen, self.pins = key, node, slot, gen, 1


class _Plain:
    """The floor: one dict by key, and for each node an OrderedDict as its LRU."""

    def __init__(self, entries: int, nodes: int) -> None:
        self.capacity = entries // nodes
        self.blocks: dict[bytes, _Block] = {}
        self.lru: list[OrderedDict[bytes, _Block]] = [OrderedDict() for _ in range(nodes)]
        self.lease: list[_Block] = []
        self.gens = itertools.count(1)

    def prepare(self, keys: KeyArray) -> list[bytes]:
        packed = keys.tobytes()
        return [packed[i : i + 16] for i in range(0, len(packed), 16)]

    def match(self, node: int, keys: list[bytes]) -> int:
        found = []
        for key in keys:
            block = self.blocks.get(key)
            if block is None or block.node != node:
                break
            block.pins += 1
            found.append((block.node, block.slot, block.gen))
            self.lease.append(block)
        return len(found)

    def release(self) -> None:
        for block in reversed(self.lease):
            block.pins -= 1
            self.lru[block.node].move_to_end(block.key)
        self.lease = []

    def store(self, node: int, keys: list[bytes]) -> None:
        lru = self.lru[node]
        new = []
        for key in keys:
            if key in self.blocks:
                continue
            slot = len(lru)
            if slot >= self.capacity:
                old, victim = lru.popitem(last=False)
                del self.blocks[old]
                slot = victim.slot
            block = _Block(key, node, slot, next(self.gens))
            self.blocks[key] = lru[key] = block
            new.append(block)
        for block in reversed(new):
            block.pins -= 1
            lru.move_to_end(block.key)

    def remove(self, node: int) -> int:
        for key in self.lru[node]:
            del self.blocks[key]
        self.lru[node] = OrderedDict()
        return self.capacity

    def bytes_per_entry(self) -> float:
        block = next(iter(self.blocks.values()))
        small = sum(sys.getsizeof(x) for x in (block, block.key, block.slot, block.gen))
        return small + (sys.getsizeof(self.blocks) + sum(map(sys.getsizeof, self.lru))) / len(self.blocks)


class _Load:
    """Fills a side with chains, and times its calls. side: a _Pool or a _Plain; `prepare` converts keys for it."""

    def __init__(self, side: Any, entries: int, nodes: int) -> None:
        self.side, self.entries, self.nodes = side, entries, nodes
        self.random = np.random.default_rng(7)
        self.chains: dict[int, list[tuple[int, int]]] = {SHORT: [], LONG: []}  # (node, chain) by length
        self.ids = itertools.count()
        self.writer = itertools.count()
        self.match_s: dict[int, list[float]] = {length: [] for length in LENGTHS}
        self.release_s: dict[int, list[float]] = {length: [] for length in LENGTHS}
        self.store_s: list[float] = []
        self.lost: list[tuple[float, int]] = []
        self.bytes = 0.0

    def fill(self) -> None:
        """Fill all slots, use the chains in random order, replace CHURN of the blocks, and use the chains again."""
        per_node = self.entries // self.nodes
        self._grow(per_node)
        self._use()
        self._grow(int(per_node * CHURN))
        self._use()
        self.bytes = self.side.bytes_per_entry()

    def _grow(self, blocks: int) -> None:
        for length in (LONG, SHORT):
            chains = blocks // 2 // length + (length == SHORT)
            group = max(1, WRITERS // length)
            for node in range(self.nodes):
                ids = [next(self.ids) for _ in range(chains)]
                self.chains[length] += [(node, i) for i in ids]
                for at in range(0, chains, group):
                    self._write(node, np.array(ids[at : at + group]), length)

    def _write(self, node: int, ids: NDArray[np.int64], length: int) -> None:
        writer = self.random.permutation(np.repeat(np.arange(len(ids)), length))
        block = np.empty(len(writer), np.int64)
        block[np.argsort(writer, kind="stable")] = np.tile(np.arange(length), len(ids))
        for at in range(0, len(writer), PER_CALL):
            call = slice(at, at + PER_CALL)
            self.side.store(node, self.side.prepare(_keys(ids[writer[call]], block[call])))

    def _use(self) -> None:
        """Match every chain once, in random order. Keep only chains whose blocks are all found."""
        for length, chains in self.chains.items():
            kept = []
            for i in self.random.permutation(len(chains)):
                node, chain = chains[i]
                if self.side.match(node, self._prepared(chain, length)) == length:
                    kept.append((node, chain))
                self.side.release()
            self.chains[length] = kept

    def _prepared(self, chain: int, length: int) -> Any:
        return self.side.prepare(_keys(np.full(length, chain), np.arange(length)))

    def match(self, length: int, timed: bool) -> None:
        """Time a match and a release of the least recently used chain."""
        chains = self.chains[max(SHORT, length)]
        node, chain = chains.pop(0)
        chains.append((node, chain))
        keys = self._prepared(chain, length)
        start = time.perf_counter()
        n = self.side.match(node, keys)
        matched = time.perf_counter()
        self.side.release()
        released = time.perf_counter()
        if timed:
            self.match_s[length].append(matched - start)
            self.release_s[length].append(released - matched)
        if n != length:
            raise RuntimeError(f"a chain of {length} blocks matched {n}: it should have been whole")

    def store(self, timed: bool) -> None:
        """Time a store of new blocks that evicts the same number of blocks."""
        keys = self._prepared(next(self.ids), STORE)
        node = next(self.writer) % self.nodes
        start = time.perf_counter()
        self.side.store(node, keys)
        if timed:
            self.store_s.append(time.perf_counter() - start)

    def lose_node(self) -> None:
        """Time the loss of a node."""
        self.nodes -= 1
        start = time.perf_counter()
        slots = self.side.remove(self.nodes)
        self.lost.append((time.perf_counter() - start, slots))

    def figures(self) -> dict[str, Any]:
        """Return the medians."""
        return {
            "entries": self.entries,
            "bytes_per_entry": round(self.bytes, 1),
            "match_us": {str(n): statistics.median(s) * 1e6 for n, s in self.match_s.items()},
            "release_us": {str(n): statistics.median(s) * 1e6 for n, s in self.release_s.items()},
            "insert_per_s": STORE / statistics.median(self.store_s),
            "remove_node_ms": statistics.median([s for s, _ in self.lost]) * 1e3,
            "remove_node_blocks": self.lost[0][1],
        }


def _keys(chain: NDArray[np.int64], block: NDArray[np.int64]) -> KeyArray:
    """Return (n, 2) keys that are as random as hashes: two splitmix64 hashes of (chain, block)."""
    x = (chain.astype(np.uint64) << np.uint64(20)) + block.astype(np.uint64)
    keys = np.empty((len(x), 2), np.uint64)
    for i in range(2):
        z = (x + np.uint64(i << 50)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        keys[:, i] = z ^ (z >> np.uint64(31))
    return keys
