"""A router's index of one engine, made from KV events on the wire alone, as Dynamo and llm-d make theirs."""

from collections import Counter
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)  # ends a replay
Place = tuple[str, Any]  # (medium, vLLM's hash of a block)


class KVIndex:
    """Subscribes to an engine. A block is gone when it was removed as often as it was stored.

    counts: how often each present block was stored. plain: the blocks of an index that does not count. removed: number
    of removals, by medium. gone: number of blocks of `plain` that batches removed, by medium. ranks: the data-parallel
    ranks that sent events.
    """

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.counts: Counter[Place] = Counter()
        self.plain: set[Place] = set()
        self.removed: Counter[str] = Counter()
        self.gone: Counter[str] = Counter()
        self.ranks = set[int]()
        self.next: int | None = None  # the expected number of the next batch
        self._blocks: dict[tuple[Any, tuple[int, ...]], Any] = {}  # a block's hash by its parent's hash and its tokens
        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)

    def close(self) -> None:
        self._socket.close(linger=0)

    def catch_up(self) -> "KVIndex":
        """Read all batches that have come. AssertionError if a batch is missing."""
        while self._socket.poll(50):
            _, number, payload = self._socket.recv_multipart()
            self._apply(number, payload)
        return self

    def replay(self, endpoint: str, seconds: float = 30.0) -> int:
        """Ask for all batches that the engine has kept. Returns their number."""
        asker: Any = zmq.Context.instance().socket(zmq.DEALER)
        asker.connect(endpoint)
        asker.send_multipart((b"", (0).to_bytes(8, "big")))
        batches = 0
        while asker.poll(seconds * 1e3):
            _, _, number, payload = asker.recv_multipart()
            if number == END:
                asker.close(linger=0)
                return batches
            self._apply(number, payload)
            batches += 1
        raise AssertionError(f"no end of the replay in {seconds} s")

    def blocks(self, tokens: list[int], size: int, medium: str = "CPU") -> int:
        """How many leading blocks of a prompt a medium has. size: tokens of a block."""
        found = [self._leading(tokens, size, medium, known) for known in (self.counts, self.plain)]
        assert found[0] == found[1]
        return found[0]

    def _leading(self, tokens: list[int], size: int, medium: str, known: Any) -> int:
        parent, n = None, 0
        for start in range(0, len(tokens) - size + 1, size):
            parent = self._blocks.get((parent, tuple(tokens[start : start + size])))
            if parent is None or (medium, parent) not in known:
                break
            n += 1
        return n

    def _apply(self, number: bytes, payload: bytes) -> None:
        sequence = int.from_bytes(number, "big")
        assert self.next is None or sequence == self.next, f"batch {sequence} came, {self.next} did not"
        self.next = sequence + 1
        _, events, rank = msgspec.msgpack.decode(payload)
        self.ranks.add(rank)
        before = self.plain.copy()
        for event in events:
            getattr(self, event["type"])(event)
        self.gone.update(medium for medium, _ in before - self.plain)

    def BlockStored(self, event: dict[str, Any]) -> None:
        parent, size, medium = event["parent_block_hash"], event["block_size"], event["medium"]
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        for i, block in enumerate(event["block_hashes"]):
            self._blocks[parent, tuple(event["token_ids"][i * size : (i + 1) * size])] = parent = block
            self.counts[medium, block] += 1
            self.plain.add((medium, block))

    def BlockRemoved(self, event: dict[str, Any]) -> None:
        medium = event["medium"]
        for block in event["block_hashes"]:
            self.removed[medium] += 1
            self.plain.discard((medium, block))
            self.counts[medium, block] -= 1
            if self.counts[medium, block] <= 0:
                del self.counts[medium, block]

    def AllBlocksCleared(self, event: dict[str, Any]) -> None:
        self.counts.clear()
        self.plain.clear()
