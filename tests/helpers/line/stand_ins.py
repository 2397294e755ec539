"""Stand-ins for parts of a node that a fuzzer does without: other nodes, NIXL, a redis server."""

import contextlib
import threading
from collections import defaultdict
from typing import Any

from helpers.arena.guarded import Bytes, Locations
from raykv.arena.arena import Arena
from raykv.tiers.redis import RedisTier
from raykv.transports.base import Peer
from raykv.transports.nixl import Nixl, RemoteAgent


class Selector:
    """In place of the selector of a memory's transports."""

    def __init__(self, nixl: Nixl) -> None:
        self._nixl = nixl

    def pull(self, peer: Peer, source: Locations, keys: Bytes, arena: Arena, target: Locations) -> Bytes:
        raise ConnectionError("the peer is elsewhere")

    def serve(self, name: str, *args: Any) -> Any:
        return self._nixl.serve(*args)


class Agent:
    """In place of NIXL's agent. Memory that it is to register must be in the arena."""

    name = "agent"

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> None:
        first = self._arena.region(0)[0]
        for address, length, _, _ in regions:
            assert first <= address <= first + self._arena.slab_bytes * self._arena.slabs - length

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> str:
        return "remote"

    def remove_remote_agent(self, name: str) -> None:
        pass


def nixl_of(arena: Arena) -> Nixl:
    """raykv's transport Nixl with the stand-in for NIXL, which transfers nothing."""
    nixl: Any = object.__new__(Nixl)
    nixl._agent, nixl._arena, nixl._registered, nixl._version = Agent(arena), arena, {}, 0
    nixl._remote, nixl._mutex, nixl._transfer = defaultdict(RemoteAgent), threading.Lock(), lambda *_: None
    return nixl  # type: ignore[no-any-return]


class Values:
    """In place of redis-py's client and pipeline: strings by name."""

    def __init__(self) -> None:
        self.values: dict[bytes, Any] = {}
        self._answers: list[Any] = []

    def pipeline(self, transaction: bool) -> "contextlib.nullcontext[Values]":
        self._answers = []
        return contextlib.nullcontext(self)

    def getrange(self, name: bytes, first: int, last: int) -> None:
        value = self.values.get(name)
        self._answers.append(value if isinstance(value, Exception) else (value or b"")[first : last + 1])

    def strlen(self, name: bytes) -> None:
        value = self.values.get(name)
        self._answers.append(value if isinstance(value, Exception) else len(value or b""))

    def unlink(self, name: bytes) -> None:
        self.values.pop(name, None)

    def scan(self, cursor: int, pattern: bytes, count: int) -> tuple[int, list[bytes]]:
        return 0, list(self.values)

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        return self._answers

    def close(self) -> None:
        pass


class OwnRedisTier(RedisTier):
    """A redis tier on Values, without a server."""

    def __init__(self) -> None:
        self.shared, self._prefix = False, b"raykv:fuzz:"
        self.own = self._client = Values()  # type: ignore[assignment]

    def put_many(self, blocks: Any) -> list[bool]:
        self.own.values.update({self._name(key): bytes(head) + bytes(body) for key, head, body in blocks})
        return [True] * len(blocks)
