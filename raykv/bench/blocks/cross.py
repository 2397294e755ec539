"""`raykv bench cross`: reads of another node's blocks, beside Ray and a socket on the same route."""

import socket
import statistics
import threading
import time
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

import raykv
from raykv.bench.testbed import local_cluster, local_pool, on_node, rows_cache
from raykv.bench.timing import gbps
from raykv.client.cache import KVCache
from raykv.config import MIB
from raykv.keys import Keys

POOL = "bench-cross"
BLOCK_BYTES, BLOCKS = 2 * MIB, 64  # 128 MiB per read
WARM, PAIRS = 24, 24


class Writer:
    """The other node's process. It stores the blocks, and serves the same bytes through Ray and a socket."""

    def __init__(self) -> None:
        self.cache = rows_cache(raykv.attach(POOL), BLOCK_BYTES)
        self.blocks = np.random.default_rng(0).integers(0, 255, (BLOCKS, BLOCK_BYTES), np.uint8)

    def store(self, turn: int) -> int:
        return self.cache.store(_keys(self.cache, turn), self.blocks)

    def array(self) -> NDArray[np.uint8]:
        return self.blocks

    def listen(self) -> int:
        """Listen for one TCP peer, and answer each byte from the peer with all blocks. Returns the port."""
        server = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            peer, _ = server.accept()
            while peer.recv(1):
                peer.sendall(self.blocks.reshape(-1).data)

        threading.Thread(target=serve, daemon=True).start()
        port: int = server.getsockname()[1]
        return port


class Reader:
    def __init__(self, writer: Any) -> None:
        self.pool = raykv.attach(POOL)
        self.cache = rows_cache(self.pool, BLOCK_BYTES)
        self.writer = writer
        self.out = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)

    def connect(self, port: int) -> None:
        self.peer = socket.create_connection(("127.0.0.1", port))

    def pool_read(self, turn: int) -> float:
        keys = _keys(self.cache, turn)
        begin = time.perf_counter()
        with self.cache.match(keys) as match:
            assert self.pool.node_id not in match.nodes
            count = match.read(self.out)
        seconds = time.perf_counter() - begin
        assert count == BLOCKS, f"{count} of {BLOCKS} blocks read: {self.pool.session.directory.faults}"
        return seconds

    def ray_read(self) -> float:
        begin = time.perf_counter()
        array = ray.get(self.writer.array.remote())
        seconds = time.perf_counter() - begin
        assert array.nbytes == self.out.nbytes
        return seconds

    def socket_read(self) -> float:
        view, got = self.out.reshape(-1).data, 0
        begin = time.perf_counter()
        self.peer.sendall(b"?")
        while got < len(view):
            got += self.peer.recv_into(view[got:])
        return time.perf_counter() - begin


def run(transport: str) -> dict[str, Any]:
    """Median GB/s (1e9 bytes), and the transport that the pool used.

    Each read from the pool asks for blocks that were never on the reader's node.
    """
    rounds: list[list[float]] = []
    with local_cluster(2, 1024 * MIB) as (here, there), local_pool(POOL, 1024 * MIB, transport=transport) as pool:
        writer = on_node(Writer, there)
        reader = on_node(Reader, here, writer)
        ray.get(reader.connect.remote(ray.get(writer.listen.remote())))
        for turn in range(WARM + PAIRS):
            pool.clear()  # gives the writer's node room, so that it stores all blocks itself
            assert ray.get(writer.store.remote(turn)) == BLOCKS
            reads = reader.pool_read.remote(turn), reader.ray_read.remote(), reader.socket_read.remote()
            rounds.append(ray.get(list(reads)))
        (route,) = (route for route in pool.stats()["transports"] if route["reader"] == here)
    ours, ray_gets, sockets = zip(*rounds[WARM:], strict=True)
    return {
        "transport": route["transport"],
        "failed": sum(route["failed"].values()),
        "read_gbps": gbps(BLOCKS * BLOCK_BYTES, ours),
        "ray_get_gbps": gbps(BLOCKS * BLOCK_BYTES, ray_gets),
        "socket_gbps": gbps(BLOCKS * BLOCK_BYTES, sockets),
        "read_of_ray_get": statistics.median(b / a for a, b in zip(ours, ray_gets, strict=True)),
        "pairs": float(PAIRS),
    }


def _keys(cache: KVCache, turn: int) -> Keys:
    return cache.keys(np.arange(BLOCKS * 16) + turn * BLOCKS * 16)
