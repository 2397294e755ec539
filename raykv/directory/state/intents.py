"""The blocks that clients are about to compute.

Other clients can wait for these blocks instead of computing them too.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from raykv.protocol.clients import Call

KEYS_MAX = 1 << 18  # maximum number of keys of all intents together; nobody waits for further keys
TTL_S = 60.0  # seconds after which nobody waits for an intent any more


@dataclass(slots=True)
class Intended:
    """One intent. keys: its keys that no earlier intent has."""

    seq: int  # sequence number of the call with the intent
    since: float
    keys: list[bytes]


class Intents:
    """Intents by client and by the id that the client has chosen. A key belongs to the first client that announces it.

    A client never waits for its own intent: within one engine vLLM computes a prefix only once anyway.
    """

    def __init__(self) -> None:
        self._clients: dict[int, dict[int, Intended]] = {}
        self._owners: dict[bytes, int] = {}  # clients by key, oldest intent first

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def add(self, call: Call, intent: int, keys: list[bytes], now: float) -> None:
        """Note that a client is about to compute these keys. intent: an id that is not in use."""
        free = list(dict.fromkeys(key for key in keys if key not in self._owners))
        mine = free[: max(0, KEYS_MAX - len(self._owners))]
        if mine:
            self._clients.setdefault(call.client, {})[intent] = Intended(call.seq, now, mine)
            self._owners.update(dict.fromkeys(mine, call.client))

    def leading(self, client: int, keys: list[bytes]) -> int:
        """Return how many leading keys other clients are about to compute."""
        n = 0
        while n < len(keys) and self._owners.get(keys[n], client) != client:
            n += 1
        return n

    def end(self, client: int, intent: int) -> None:
        """End an intent: the client no longer computes its keys."""
        self._end(client, [intent])

    def end_unlisted(self, call: Call) -> None:
        """End intents that a call does not list. Intents that the client sent after the call stay."""
        if mine := self._clients.get(call.client):
            held = set(memoryview(call.held).cast("Q"))
            self._end(call.client, [i for i, it in mine.items() if i not in held and it.seq < call.seq])

    def end_all(self, client: int) -> None:
        """End all intents of a client that is gone."""
        self._end(client, list(self._clients.get(client, ())))

    def expire(self, now: float) -> None:
        """End intents older than TTL_S."""
        for client, theirs in list(self._clients.items()):
            self._end(client, [i for i, it in theirs.items() if now - it.since > TTL_S])

    def _end(self, client: int, intents: Iterable[int]) -> None:
        mine = self._clients.get(client, {})
        for intent in intents:
            if it := mine.pop(intent, None):
                for key in it.keys:
                    del self._owners[key]
        if not mine:
            self._clients.pop(client, None)
