"""A guarded tier knows its content after a clear, and beside other stores and strangers."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.pools import eventually
from helpers.tiers.guarded_tier import NEXT, OTHERS, OURS, SEED, contents, file_of, folder, load, some_keys, store
from helpers.tiers.moody_dictionary import Moody, Timid

from raykv.protocol.location import CONTENT_BYTES
from raykv.tiers import MARKER, Block, guarded
from raykv.tiers.guarded import GuardedTier
from raykv.tiers.head import MAGIC


@pytest.mark.parametrize("other", ["secret", "version"])
def test_content_of_others_is_refused_and_left_as_it_is(
    tmp_path: Path, opened: Callable[..., GuardedTier], other: str
) -> None:
    tier, keys = opened(tmp_path), some_keys(3)
    assert all(store(tier, keys))
    tier.close()
    marker = file_of(tmp_path, MARKER)
    if other == "version":
        marker.write_bytes(marker.read_bytes().replace(MAGIC, b"raykv\0t0"))
    before = contents(tmp_path)
    stranger = GuardedTier(lambda: folder(tmp_path), OTHERS if other == "secret" else OURS)
    with pytest.raises(ValueError, match=r"another secret or by another version.*another path"):
        stranger.check()
    assert not stranger.open(SEED) and not stranger.up  # `open` refuses the content, too
    assert load(stranger, keys) == [] and not any(store(stranger, keys))
    stranger.clear(NEXT)
    stranger.close()
    assert contents(tmp_path) == before
    if other == "secret":
        assert load(opened(tmp_path), keys) == [True] * 3


def test_a_tier_that_others_have_taken_over_is_left_to_them(opened: Callable[..., GuardedTier], hasty: None) -> None:
    moody, keys = Moody(), some_keys(2)
    tier = opened(moody)
    assert all(store(tier, keys))
    moody.error = OSError("gone")
    assert load(tier, keys) == []
    moody.error = None
    moody.blocks.clear()
    stranger = GuardedTier(lambda: moody, OTHERS)
    assert stranger.open(SEED)
    before = dict(moody.blocks)
    eventually(lambda: tier.probe() is None and tier.faults["probe"] > 2)
    assert not tier.up and moody.blocks == before
    stranger.close()


def test_cleared_blocks_are_never_read_again(tmp_path: Path, opened: Callable[..., GuardedTier]) -> None:
    folder = tmp_path / "tier"
    tier, keys = opened(folder), some_keys(3)
    assert all(store(tier, keys))
    old = {key.tobytes(): file_of(folder, key.tobytes()).read_bytes() for key in keys}
    tier.clear(NEXT)
    assert load(tier, keys) == [False] * 3
    assert all(store(tier, keys[:2]))
    assert load(tier, keys) == [True, True, False]
    file_of(folder, keys[1].tobytes()).write_bytes(old[keys[1].tobytes()])  # as a late write would leave it
    tier.close()
    again = opened(folder)
    assert load(again, keys) == [True, False, False]


def test_blocks_cleared_while_the_tier_is_down_are_not_read_when_it_is_back(
    opened: Callable[..., GuardedTier], hasty: None
) -> None:
    moody, keys = Moody(), some_keys(2)
    tier = opened(moody)
    assert all(store(tier, keys))
    moody.error = OSError("gone")
    assert load(tier, keys) == []
    tier.clear(NEXT)
    moody.error = None
    assert eventually(tier.probe) is True
    assert load(tier, keys) == [False, False]
    tier.close()
    assert load(opened(moody), keys) == [False, False]


def test_a_tier_that_is_full_can_be_cleared(opened: Callable[..., GuardedTier]) -> None:
    class Copying(Timid):
        """A tier that, as files do, takes a block's new bytes before it frees the old ones."""

        def put_many(self, blocks: Sequence[Block]) -> list[bool]:
            fits = [len(self.blocks) < self.room for _ in blocks]
            Moody.put_many(self, [block for block, ok in zip(blocks, fits, strict=True) if ok])
            return fits

    tier, keys = opened(Copying()), some_keys(2)
    assert [store(tier, keys[i : i + 1]) for i in range(2)] == [[True], [True]]
    tier.clear(NEXT)
    assert tier.up and load(tier, keys) == [False, False]
    assert tier.probe() is None


@pytest.mark.parametrize("when", ["opened", "lost"])
def test_stores_that_share_a_tier_agree_on_its_content(
    opened: Callable[..., GuardedTier], hasty: None, when: str
) -> None:
    """All stores find the tier empty before any of them writes the name of its content."""
    shared, barrier, keys = Moody(), threading.Barrier(3), some_keys(3)
    if when == "lost":
        stores = [opened(shared) for _ in range(3)]
        shared.error = OSError("killed")
        assert not any(any(load(one, keys)) for one in stores)
        shared.error = None
        shared.blocks.clear()

    def meet() -> None:
        barrier.wait(30)

    shared.after_read = meet
    with ThreadPoolExecutor(3) as threads:
        if when == "opened":
            stores = [GuardedTier(lambda: shared, OURS) for _ in range(3)]
            waits: list[Any] = [threads.submit(one.open, SEED) for one in stores]
            for wait in waits:  # each store waits in the second read of `open`
                wait.result(30)
        else:
            waits = [threads.submit(eventually, lambda one=one: one.probe() is not None) for one in stores]
            for wait in waits:
                wait.result(30)
    shared.after_read = lambda: None
    for i, one in enumerate(stores):
        assert all(store(one, keys[i : i + 1]))
    assert [load(one, keys) for one in stores] == [[True] * 3] * 3
    for one in stores:
        one.close()


def test_a_content_that_another_store_changed_is_taken_over(
    opened: Callable[..., GuardedTier], hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "CHECK_S", 0.05)
    shared, keys = Moody(), some_keys(2)
    one, other = opened(shared), opened(shared)
    assert all(store(one, keys))
    assert len(NEXT) == CONTENT_BYTES
    other.clear(NEXT)
    assert eventually(lambda: one.probe() is False)
    assert load(one, keys) == [False, False]
    assert all(store(one, keys)) and load(other, keys) == [True, True]
