"""A guarded tier gives records back unchanged, and notices a wrong byte in a record."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.tiers.guarded_tier import OURS, SIZE, file_of, load, some_keys, store
from helpers.tiers.moody_dictionary import Moody

from raykv.arena.arena import Arena
from raykv.arena.checksum import judge
from raykv.protocol.location import LOCATION
from raykv.protocol.transfers import ALTERED, PULLED
from raykv.tiers import guarded
from raykv.tiers.guarded import GuardedTier


def test_blocks_come_back_piece_by_piece_and_after_a_restart(
    tmp_path: Path, opened: Callable[..., GuardedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "PIECE_BYTES", 3 * SIZE)
    tier, keys = opened(tmp_path), some_keys(8)
    assert all(store(tier, keys[:7]))
    assert load(tier, keys) == [True] * 7 + [False]
    assert tier.up and tier.faults["missing"] == 1
    assert tier.probe() is None
    tier.close()
    again = opened(tmp_path)
    assert load(again, keys) == [True] * 7 + [False]
    assert sorted(again.scan())[0] and {key for batch in again.scan() for key, _ in batch} == {
        key.tobytes() for key in keys[:7]
    }
    again.delete([keys[0].tobytes()])
    assert load(again, keys) == [False] + [True] * 6 + [False]


@pytest.mark.parametrize("what", ["another key's", "cut short", "longer", "of another length", "no head", "gone"])
def test_a_record_of_another_block_is_a_miss(tmp_path: Path, opened: Callable[..., GuardedTier], what: str) -> None:
    tier, keys = opened(tmp_path), some_keys(3)
    assert all(store(tier, keys))
    path, other = (file_of(tmp_path, key.tobytes()) for key in keys[:2])
    data = path.read_bytes()
    if what == "another key's":
        shutil.copyfile(other, path)
    elif what == "gone":
        path.unlink()
    elif what == "of another length":
        assert load(tier, keys, SIZE // 2) == [False] * 3
        assert all(store(tier, keys[:1], size=SIZE // 2))
    else:
        path.write_bytes({"cut short": data[:-1], "longer": data + b"\0", "no head": bytes(len(data))}[what])
    assert load(tier, keys) == [False, True, True]
    assert tier.up


def test_a_head_is_believed_only_for_its_own_length(opened: Callable[..., GuardedTier]) -> None:
    moody, keys = Moody(), some_keys(1)
    tier = opened(moody)
    assert store(tier, keys) == [True]
    head, body = moody.blocks[keys[0].tobytes()]
    moody.blocks[keys[0].tobytes()] = head, body[: SIZE // 2]
    assert load(tier, keys, SIZE // 2) == [False]


def test_a_flipped_bit_is_noticed_before_the_block_is_ready(tmp_path: Path, opened: Callable[..., GuardedTier]) -> None:
    tier, keys = opened(tmp_path / "tier"), some_keys(3)
    assert all(store(tier, keys))
    path = file_of(tmp_path, keys[1].tobytes())
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    arena = Arena.create(str(tmp_path / "arena"), OURS, 1 << 20, 1)
    assert arena.raise_epoch(1) and arena.offer_next()
    locations = np.zeros(3, LOCATION)
    locations["slot"], locations["slab_gen"], locations["gen"], locations["bytes"] = (
        range(3),
        1 << 40,
        (1 << 40) + 1,
        SIZE,
    )
    ((piece, rows, sums, positions, there),) = tier.load(keys, SIZE)
    assert there.all() and piece == slice(0, 3)
    written = arena.write(locations, keys, rows, positions, sums)
    assert judge(written, rows, sums).tolist() == [PULLED, ALTERED, PULLED]
    out = np.zeros((3, SIZE), np.uint8)
    assert arena.read(locations, keys, out, True).tolist() == [True, False, True]
    arena.close(unlink=True)
