"""A client of Mooncake Store in its own process, for `beside_mooncake.py`. It needs only `mooncake` and numpy.

    PYTHON mooncake_client.py PORT_OF_THE_MASTER

Each line of stdin is a JSON list: the name of a method of Client, and its arguments. The answer is a JSON line with the
method's result.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np

HOST = "127.0.0.1"
MIB = 1 << 20
BLOCK_BYTES, BLOCKS = 2 * MIB, 64  # as in raykv.bench.blocks.cross
SEGMENT_BYTES, BUFFER_BYTES = 1024 * MIB, 512 * MIB  # bytes that a client adds to the store; bytes of its local buffer


class Client:
    """Puts blocks into the memory of any client, and reads blocks into this process's memory."""

    def __init__(self, master: str) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(HOST, "P2PHANDSHAKE", SEGMENT_BYTES, BUFFER_BYTES, "tcp", "", f"{HOST}:{master}")
        assert code == 0, f"Mooncake's setup returned {code}"
        self._blocks = np.random.default_rng(0).integers(0, 255, (BLOCKS, BLOCK_BYTES), np.uint8)
        self._out = np.ones_like(self._blocks)
        for buffer in (self._blocks, self._out):
            assert self._store.register_buffer(buffer.ctypes.data, buffer.nbytes) == 0

    def name(self) -> str:
        """The name of this client's memory."""
        return str(self._store.get_hostname())

    def store(self, turn: int, memory: str) -> float:
        """Seconds to put this turn's blocks into a client's memory. memory: name of the memory."""
        from mooncake.store import ReplicateConfig

        config = ReplicateConfig()
        config.replica_num, config.preferred_segment = 1, memory
        keys, at = _keys(turn, BLOCKS), _addresses(self._blocks)
        begin = time.perf_counter()
        codes = self._store.batch_put_from(keys, at, [BLOCK_BYTES] * BLOCKS, config)
        seconds = time.perf_counter() - begin
        assert not any(codes), f"Mooncake's batch_put_from returned {codes}"
        return seconds

    def read(self, turn: int) -> float:
        """Seconds to get this turn's blocks from wherever they are."""
        keys, at = _keys(turn, BLOCKS), _addresses(self._out)
        begin = time.perf_counter()
        sizes = self._store.batch_get_into(keys, at, [BLOCK_BYTES] * BLOCKS)
        seconds = time.perf_counter() - begin
        assert set(sizes) == {BLOCK_BYTES}, f"Mooncake's batch_get_into returned {sizes}"
        assert np.array_equal(self._out, self._blocks)
        self._out[:] = 1
        return seconds

    def remove(self, turn: int) -> None:
        codes = self._store.batch_remove(_keys(turn, BLOCKS), True)
        assert not any(codes), f"Mooncake's batch_remove returned {codes}"

    def put_small(self, turn: int, count: int) -> None:
        """Store small values under `count` keys, for `ask`."""
        keys, at = _keys(turn, count), [self._blocks.ctypes.data] * count
        assert not any(self._store.batch_put_from(keys, at, [64] * count))

    def ask(self, turn: int, count: int) -> float:
        """Seconds to ask whether `count` keys exist."""
        keys = _keys(turn, count)
        self._store.batch_is_exist(keys)  # not timed, since earlier reads have filled the CPU caches
        begin = time.perf_counter()
        found = self._store.batch_is_exist(keys)
        seconds = time.perf_counter() - begin
        assert set(found) == {1}, f"Mooncake's batch_is_exist returned {found}"
        return seconds


def _keys(turn: int, count: int) -> list[str]:
    """Keys in the form of Mooncake's vLLM connector."""
    return [f"bench@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{turn:032x}{i:032x}" for i in range(count)]


def _addresses(blocks: "np.ndarray[Any, Any]") -> list[int]:
    return [block.ctypes.data for block in blocks]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Mooncake prints to stdout, which is redirected to stderr here
    client = Client(sys.argv[1])
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(client, name)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
