"""A late call of a guarded tier keeps no caller waiting, and keeps its buffer."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.pools import eventually, payload
from helpers.tiers.guarded_tier import DEADLINE_S, SIZE, load, some_keys, store
from helpers.tiers.moody_dictionary import Moody

from raykv.tiers import guarded
from raykv.tiers.guarded import GuardedTier


def test_the_buffer_of_a_late_call_is_not_used_again(opened: Callable[..., GuardedTier], hasty: None) -> None:
    moody, keys = Moody(), some_keys(4)
    tier = opened(moody)
    assert all(store(tier, keys))
    assert load(tier, keys[:2]) == [True, True]
    release, read = threading.Event(), threading.Event()
    moody.before_read = lambda: release.wait(30)
    moody.after_read = lambda: read.set() if release.is_set() else None
    moody.buffers.clear()
    assert load(tier, keys[:2]) == []  # the tier reads later, into the buffer of this call
    late = set(moody.buffers)
    moody.before_read = lambda: None
    assert eventually(tier.probe) is True
    moody.buffers.clear()
    for _, rows, _, _, there in tier.load(keys[2:], SIZE):
        assert there.all() and not late & set(moody.buffers)
        before = rows.copy()
        release.set()
        assert read.wait(30)
        assert (rows == before).all() and (rows == payload(keys[2:], SIZE)).all()


def test_a_busy_tier_is_not_down(opened: Callable[..., GuardedTier], monkeypatch: pytest.MonkeyPatch) -> None:
    tier, keys = opened(moody := Moody()), some_keys(guarded.READERS + 1)
    assert all(store(tier, keys))
    monkeypatch.setattr(guarded, "data_deadline", lambda size: 60.0)
    moody.open.clear()
    with ThreadPoolExecutor(guarded.READERS) as threads:
        reading = [threads.submit(load, tier, keys[i : i + 1]) for i in range(guarded.READERS)]
        eventually(lambda: moody.calls.count("get") == guarded.READERS + 1)  # one more, for the marker
        monkeypatch.setattr(guarded, "data_deadline", lambda size: DEADLINE_S)
        assert load(tier, keys[-1:]) == [] and tier.up and not tier.faults["load"]
        moody.open.set()
        assert [one.result() for one in reading] == [[True]] * guarded.READERS
    assert load(tier, keys[-1:]) == [True]


def test_storing_tells_of_a_late_store(opened: Callable[..., GuardedTier], hasty: None) -> None:
    moody = Moody()
    tier = opened(moody)
    assert all(store(tier, some_keys(2)))
    eventually(lambda: not tier.storing)
    moody.open.clear()
    assert not any(store(tier, some_keys(2))) and tier.storing
    moody.open.set()
    eventually(lambda: not tier.storing)


def test_a_call_that_did_not_begin_in_time_is_cancelled(opened: Callable[..., GuardedTier], hasty: None) -> None:
    moody, keys = Moody(), some_keys(1)
    tier = opened(moody)
    moody.open.clear()
    with ThreadPoolExecutor(12) as threads:
        assert not any(map(any, threads.map(lambda _: load(tier, keys), range(12))))
    moody.open.set()
    assert eventually(tier.probe) is True
    assert moody.calls.count("get") <= guarded.READERS + 3  # the readers', the one of `open`, and probes
