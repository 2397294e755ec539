"""The oracle's intents: which client is about to compute which keys."""

import struct
from dataclasses import dataclass

from raykv.protocol.clients import Call, Intent

KEYS_MAX = 12
TTL_S = 3.0


@dataclass(eq=False)
class Intended:
    client: int
    intent: int
    seq: int
    since: float
    keys: set[bytes]


class Intents:
    """A list of intents. A key is in at most one of them."""

    def __init__(self) -> None:
        self.all: list[Intended] = []

    def owner(self, key: bytes) -> int | None:
        return next((it.client for it in self.all if key in it.keys), None)

    def add(self, call: Call, intent: Intent, missing: list[bytes], now: float) -> None:
        """Add an intent with the missing keys that no intent has yet, as far as there is room."""
        it = Intended(call.client, intent.intent, call.seq, now, set())
        for key in missing:
            if self.owner(key) is None and key not in it.keys and self.size + len(it.keys) < KEYS_MAX:
                it.keys.add(key)
        self.all += [it] if it.keys else []

    @property
    def size(self) -> int:
        return sum(len(it.keys) for it in self.all)

    def end(self, client: int, intent: int) -> None:
        self.all = [it for it in self.all if (it.client, it.intent) != (client, intent)]

    def end_unlisted(self, call: Call) -> None:
        held = struct.unpack(f"<{len(call.held) // 8}Q", call.held)
        self.all = [it for it in self.all if it.client != call.client or it.intent in held or it.seq >= call.seq]

    def end_all(self, client: int) -> None:
        self.all = [it for it in self.all if it.client != client]

    def expire(self, now: float) -> None:
        self.all = [it for it in self.all if now - it.since <= TTL_S]
