"""Intents: what clients are about to compute, by example. A differential test covers the other cases."""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.directory.pool import KEYS, PAGE, Pool, blocks

from raykv.directory.state import intents
from raykv.protocol.clients import Call, Intent, MatchedParts, MatchRequest

FIRST, SECOND = KEYS[:8], KEYS[100:108]  # keys of two parts


class Asked(Pool):
    """Clients that compute missing blocks, and wait for blocks that others compute."""

    def ask(self, client: str, *parts: list[bytes], wait: bool = True, stores: bool = True) -> tuple[int, MatchedParts]:
        """(intent, answer). stores: whether the client stores what it computes."""
        self.id += 1
        intent = self.id if stores else 0
        answer = self.match_parts(client, [("a", part) for part in parts], intent=Intent(intent, wait))[1]
        return intent, answer

    def intents(self) -> int:
        return int(self.directory.stats(self.now)["intents"])


def test_the_first_computes_and_the_others_wait_for_it() -> None:
    pool = Asked(slots=20)
    intent, got = pool.ask("one", FIRST, SECOND)
    assert (got.parts, got.pending) == ((), 0)
    assert pool.ask("two", FIRST, SECOND)[1].pending == pool.ask("three", FIRST[:5], SECOND[:5])[1].pending + 3 == 8
    hold, granted = pool.reserve("a", FIRST)
    pool.release("one", intent)
    assert pool.ask("two", FIRST, SECOND)[1].pending == 0, "of the second part nobody writes anything"
    pool.held["two"] = []
    pool.store("a", SECOND)
    assert pool.ask("two", FIRST, SECOND)[1].pending == 8, "they are being written"
    assert pool.directory.stats(pool.now)["leases"] == 0
    pool.commit("a", hold, granted, FIRST)
    got = pool.ask("two", FIRST, SECOND)[1]
    assert got.pending == 0 and [blocks(part) for part in got.parts] == [8, 8]


def test_who_waits_is_counted_once_and_touches_nothing() -> None:
    pool = Asked(slots=6)
    pool.store("a", FIRST[:3])
    pool.ask("one", FIRST)
    before = pool.directory.stats(pool.now)
    for _ in range(5):
        assert pool.ask("two", FIRST)[1] == MatchedParts(before["epoch"], (), 5)
    after = pool.directory.stats(pool.now)
    assert all(after[name] == before[name] for name in ("lookups", "hits", "leases", "intents"))


def test_who_waits_for_a_prefix_computes_what_follows() -> None:
    """If the first client then asks for the longer prefix, it waits for the second."""
    pool = Asked(slots=20)
    pool.ask("one", FIRST[:4])
    assert pool.ask("two", FIRST)[1].pending == 4
    pool.store("a", FIRST[:4])
    got = pool.ask("two", FIRST)[1]
    assert got.pending == 0 and blocks(got.parts[0]) == 4
    assert pool.ask("one", FIRST)[1].pending == 4


def test_who_stores_nothing_waits_for_others_and_nobody_for_it() -> None:
    pool = Asked(slots=20)
    assert pool.ask("reader", FIRST, stores=False)[1].pending == pool.intents() == 0
    assert pool.ask("one", FIRST)[1].pending == 0
    assert pool.ask("reader", FIRST, stores=False)[1].pending == 8
    pool.store("a", FIRST[:5])
    assert blocks(pool.ask("reader", FIRST, wait=False, stores=False)[1].parts[0]) == 5
    assert pool.intents() == 1, "it is the other's still"


def test_nobody_waits_for_its_own_nor_if_it_does_not_want_to() -> None:
    pool = Asked(slots=20)
    pool.ask("one", FIRST)
    assert pool.ask("one", FIRST)[1].pending == 0
    assert pool.ask("two", FIRST, wait=False)[1].pending == 0
    assert pool.intents() == 1, "nothing was left for the others"
    assert blocks(pool.match("a", FIRST)[1]) == 0


@pytest.mark.parametrize(
    "end",
    [
        lambda pool, intent: pool.release("one", intent),
        lambda pool, intent: pool.directory.disconnect(pool.call("one").client, pool.now),
        lambda pool, intent: setattr(pool, "now", 11.0),
    ],
    ids=["released", "disconnected", "silent"],
)
def test_nobody_waits_for_who_is_gone(end: Callable[[Asked, int], None]) -> None:
    pool = Asked(slots=20)
    intent = pool.ask("one", FIRST)[0]
    assert pool.ask("two", FIRST)[1].pending == 8 and pool.intents() == 1
    end(pool, intent)
    pool.heartbeat("two")
    assert pool.ask("two", FIRST)[1].pending == 0 and pool.intents() == 1
    assert pool.ask("three", FIRST)[1].pending == 8


def test_nobody_waits_for_one_that_takes_for_ever() -> None:
    pool = Asked(slots=20)
    pool.ask("one", FIRST)
    while pool.now < intents.TTL_S:
        assert pool.ask("two", FIRST)[1].pending == 8
        pool.now += 5.0
        pool.heartbeat("one")
    pool.now += 5.0
    pool.heartbeat("one")
    assert pool.ask("two", FIRST)[1].pending == 0


def test_intents_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intents, "KEYS_MAX", 10)
    pool = Asked(slots=20)
    pool.ask("one", FIRST)
    pool.ask("one", SECOND)
    assert pool.ask("two", FIRST)[1].pending == 8 and pool.ask("two", SECOND)[1].pending == 2


def test_an_id_that_is_none_is_no_message() -> None:
    pool = Asked(slots=20)
    pool.store("a", FIRST)
    request = MatchRequest(1, "a", b"".join(FIRST), PAGE, 0)
    refused: tuple[Any, ...] = ([], None, b"1")
    for wrong in refused:
        with pytest.raises(ValueError, match="intent"):
            pool.directory.match_parts(Call(7, 1), (request,), Intent(wrong, True), pool.now)
    assert pool.directory.stats(pool.now)["leases"] == 0
