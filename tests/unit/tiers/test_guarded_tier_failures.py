"""A guarded tier that fails is down. A tier that refuses writes is still read."""

import errno
import time
from collections.abc import Callable

import pytest
from helpers.pools import eventually
from helpers.tiers.guarded_tier import DEADLINE_S, NEXT, Keys, load, some_keys, store
from helpers.tiers.moody_dictionary import Moody, Timid

from raykv.tiers import guarded
from raykv.tiers.guarded import GuardedTier

FAILURES: dict[str, Callable[[Moody], object]] = {
    "waits": lambda moody: moody.open.clear(),
    "raises": lambda moody: setattr(moody, "error", OSError("no route")),
    "raises its own": lambda moody: setattr(moody, "error", type("RedisError", (Exception,), {})()),
    "answers too little": lambda moody: setattr(moody, "answer", lambda answers: answers[1:]),
    "answers nonsense": lambda moody: setattr(moody, "answer", lambda answers: None),
}
CALLS: dict[str, Callable[[GuardedTier, Keys], object]] = {
    "store": lambda tier, keys: any(store(tier, keys)),
    "load": lambda tier, keys: any(load(tier, keys)),
    "delete": lambda tier, keys: tier.delete([key.tobytes() for key in keys]),
    "clear": lambda tier, keys: tier.clear(NEXT),
    "scan": lambda tier, keys: len(list(tier.scan())) > 1,
}
NO_ANSWER, NO_DEADLINE, WRITES = ("delete", "scan"), ("scan",), ("store", "delete", "clear")
FAILING = [
    (call, failure)
    for call in CALLS
    for failure in FAILURES
    if not (call in NO_ANSWER and "answers" in failure) and not (call in NO_DEADLINE and failure == "waits")
    if call not in WRITES or failure == "waits"
]


@pytest.mark.parametrize(("call", "failure"), FAILING)
def test_a_tier_that_fails_is_down_until_a_probe_succeeds(
    opened: Callable[..., GuardedTier], hasty: None, call: str, failure: str
) -> None:
    moody, keys = Moody(), some_keys(2)
    tier = opened(moody)
    assert all(store(tier, keys))
    FAILURES[failure](moody)
    begin = time.monotonic()
    assert not CALLS[call](tier, keys)
    assert time.monotonic() - begin < DEADLINE_S + 5
    assert not tier.up and tier.faults[call] == 1
    calls = len(moody.calls)
    for other in ("store", "load", "delete"):
        assert not CALLS[other](tier, keys)
    assert len(moody.calls) == calls and tier.faults["down"] == 3
    eventually(lambda: tier.probe() is None and (tier.faults["probe"] >= 1 or failure == "waits"))
    assert not tier.up
    moody.error, moody.answer = None, lambda answers: answers
    moody.open.set()
    assert eventually(lambda: tier.probe() is not None)
    assert tier.up
    cleared, deleted = call == "clear", (call, failure) == ("delete", "waits")  # a late call is still carried out
    assert load(tier, keys) == [not cleared and not deleted] * 2
    assert all(store(tier, keys)) and load(tier, keys) == [True, True]


@pytest.mark.parametrize("call", WRITES)
@pytest.mark.parametrize("error", [OSError(errno.EROFS, "Read-only file system"), KeyError("READONLY a replica")])
def test_a_tier_that_refuses_to_be_written_is_read_as_before(
    opened: Callable[..., GuardedTier], monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    monkeypatch.setattr(guarded, "BACK_OFF_S", (60.0,))
    moody, keys = Moody(), some_keys(2)
    tier = opened(moody)
    assert all(store(tier, keys)) and tier.refusal == ""
    moody.refuses = error
    assert not CALLS[call](tier, keys)
    assert tier.up and not tier.writable and tier.refusal == str(error) and tier.faults[call] == 1
    calls = moody.calls.count("put") + moody.calls.count("delete")
    assert not any(store(tier, keys)) and not tier.delete([keys[0].tobytes()])
    assert moody.calls.count("put") + moody.calls.count("delete") == calls
    cleared = call == "clear"
    assert load(tier, keys) == [not cleared] * 2 and len(list(tier.scan())) > 1
    moody.refuses, tier._write_at = None, 0.0
    assert tier.probe() is None and tier.up
    assert load(opened(moody), keys) == [not cleared] * 2, "whoever opens it now knows of the clear"
    assert all(store(tier, keys)) and load(tier, keys) == [True, True]
    assert tier.writable and tier.refusal == ""


def test_a_full_tier_refuses_blocks_and_stays_up(opened: Callable[..., GuardedTier]) -> None:
    timid, keys = Timid(), some_keys(4)
    tier = opened(timid)
    assert store(tier, keys) == [True, True, False, False]
    assert tier.up and tier.faults["refused"] == 2
    assert load(tier, keys) == [True, True, False, False]
    tier.delete([keys[0].tobytes()])
    assert store(tier, keys[3:]) == [True]
