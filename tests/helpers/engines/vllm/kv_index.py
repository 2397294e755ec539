"""What a router's index knows of one engine, from the KV events on the wire alone: as Dynamo's and llm-d's do it."""

from collections import Counter
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)  # of a replay
Place = tuple[str, Any]  # medium, and vLLM's hash of a block


class KVIndex:
    """Subscribes to an engine. It counts: a block is gone when it was removed as often as it was stored.

    counts: of blocks that are there. plain: of an index that does not count, what is there. removed: blocks that events
    told of, by medium. gone: those that were there before a batch, and not after it. ranks: in data
    parallel.
    """

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.counts: Counter[Place] = Counter()
        self.plain: set[Place] = set()
        self.removed: Counter[str] = Counter()
        self.gone: Counter[str] = Counter()
        self.ranks = set[int]()
        self.next: int | None = None  # number of the next batch
        self._blocks: dict[tuple[Any, tuple[int, ...]], Any] = {}  # by parent's hash and tokens, that of a block
        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)

    def close(self) -> None:
        self._socket.close(linger=0)

    def catch_up(self) -> "KVIndex":
        """Read what has come. AssertionError if something did not."""
        while self._socket.poll(50):
            _, number, payload = self._socket.recv_multipart()
            self._apply(number, payload)
        return self

    def replay(self, endpoint: str, seconds: float = 30.0) -> int:
        """Ask for all batches that the engine has kept. Returns how many those are."""
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
        """How many leading blocks of a prompt can be had from a medium. size: of a block, in tokens."""
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
