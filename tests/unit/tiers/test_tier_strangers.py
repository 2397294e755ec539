"""Records in a tier that are not ours are left alone, counted and named, and cost no block its place."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.pools import payload
from helpers.tiers.redis_server import RedisServer, redis_server
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from raykv.tiers import Tier, open_tier, parse
from raykv.tiers.base import MARKER, path_of
from raykv.tiers.file import PAGE
from raykv.tiers.guarded import GuardedTier

TIB = 1 << 40
SIZE = 8192
Keys = NDArray[np.uint8]
KEYS: Keys = np.random.default_rng(1).integers(1, 256, (30, 16), np.uint8)
ABSENT = [bytes([number]) * 16 for number in range(1, 16)]  # keys of blocks that nobody stored


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.WARNING, "raykv")
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


@pytest.fixture
def guard() -> Iterator[Callable[[Tier], GuardedTier]]:
    made = []

    def guard(tier: Tier) -> GuardedTier:
        made.append(GuardedTier(lambda: tier, b"fingerprint-ours"))
        assert made[-1].open(b"the seed")
        sums = np.array([xxh3_64_intdigest(row) for row in payload(KEYS, SIZE)], np.uint64)
        bodies = [row.data for row in payload(KEYS, SIZE)]
        assert made[-1].store(KEYS, sums, np.zeros(len(KEYS), np.uint32), bodies).all()
        return made[-1]

    yield guard
    for tier in made:
        tier.close()


def listed(tier: GuardedTier) -> list[tuple[bytes, int]]:
    return sorted(block for batch in tier.scan() for block in batch)


def missed(tier: GuardedTier) -> list[int]:
    """Numbers of the blocks that can't be read. AssertionError if another block is wrong."""
    there = list[bool]()
    for piece in tier.load(KEYS, SIZE):
        assert (piece.blocks[piece.there] == payload(KEYS[piece.which], SIZE)[piece.there]).all()
        there += piece.there.tolist()
    return [number for number, ok in enumerate(there) if not ok]


OURS = sorted((key.tobytes(), SIZE) for key in KEYS)


# ---------------------------------------------------------------------- files


def in_the_folder(folder: Path) -> list[Path]:
    """Put a foreign file of each kind into a folder. Returns their paths."""
    names = [folder / path_of(key) for key in ABSENT]
    for path, size in zip(names, (0, 1, 64, PAGE, PAGE + SIZE, 1 << 29, TIB), strict=False):
        path.touch()
        os.truncate(path, size)  # a sparse file
    record = (folder / path_of(KEYS[0].tobytes())).read_bytes()
    names[7].write_bytes(record)  # a block's record under another block's name
    names[8].write_bytes(record.replace(KEYS[0].tobytes(), ABSENT[8]) + b"longer")
    names[9].mkdir()
    os.mkfifo(names[10])
    names[11].symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(folder)  # the socket's whole path would be too long
        server.bind(path_of(ABSENT[12]))
    others = [folder / "README", folder / "00" / "notes.txt", folder / "lost+found"]
    others[0].write_text("not ours")
    others[1].write_text("not ours")
    others[2].mkdir()
    return [*names[:13], *others]


def test_what_is_no_block_is_left_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guard: Any, said: Callable[[], str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tier = guard(open_tier(parse(f"file://{tmp_path}/tier?capacity=64MiB")))
    assert listed(tier) == OURS and not said()
    strangers = in_the_folder(tmp_path / "tier" / "0")
    assert listed(tier) == OURS and missed(tier) == [] and tier.up
    assert all(os.path.lexists(path) for path in strangers)
    assert tier.faults["strangers"] == 9
    assert (
        "9 records under names of blocks are not what raykv wrote, left alone: '0" in said()
        and ABSENT[0].hex() in said()
    )
    assert "7 things in its folder are no blocks of raykv, left alone: " in said() and "'README'" in said()


def test_what_is_no_block_is_left_under_its_prefix(tmp_path: Path, guard: Any, said: Callable[[], str]) -> None:
    fsspec = pytest.importorskip("raykv.tiers.fsspec", exc_type=ImportError)
    tier = guard(fsspec.FsspecTier(parse(f"local://{tmp_path}?capacity=64MiB")))
    assert listed(tier) == OURS and not said()
    strangers = [*(tmp_path / path_of(key) for key in ABSENT[:4]), tmp_path / "README", tmp_path / "probe-1"]
    for path, size in zip(strangers, (0, 64, 10000, TIB, 1, 1), strict=True):
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.truncate(path, size)
    assert listed(tier) == OURS and missed(tier) == [] and tier.up
    assert all(path.exists() for path in strangers) and tier.faults["strangers"] == 4
    assert "4 records under names" in said() and "1 objects under its prefix are no blocks of raykv" in said()


def test_a_sparse_file_is_not_counted_as_room(tmp_path: Path, guard: Any) -> None:
    guard(open_tier(parse(f"file://{tmp_path}?capacity=64MiB"))).close()
    path = tmp_path / "0" / path_of(ABSENT[0])
    path.touch()
    os.truncate(path, TIB)
    disk = os.statvfs(tmp_path)
    with pytest.raises(ValueError, match="lower capacity"):
        open_tier(parse(f"file://{tmp_path}?capacity={disk.f_bavail * disk.f_frsize + TIB // 2}"))


def test_a_file_in_place_of_a_folder_is_a_miss_for_its_blocks(tmp_path: Path, guard: Any, said: Any) -> None:
    tier = guard(open_tier(parse(f"file://{tmp_path}?capacity=64MiB")))
    folder = tmp_path / "0" / KEYS[0].tobytes().hex()[:2]
    folder.rename(tmp_path / "moved")
    folder.write_text("not ours")
    there = [number for number, key in enumerate(KEYS) if key[0] != KEYS[0, 0]]
    assert missed(tier) == [number for number in range(len(KEYS)) if number not in there]
    assert listed(tier) == sorted((KEYS[number].tobytes(), SIZE) for number in there)
    assert not tier.store(KEYS[:1], np.zeros(1, np.uint64), np.zeros(1, np.uint32), [memoryview(bytes(SIZE))]).any()
    assert tier.delete([KEYS[0].tobytes()]) and tier.up
    assert repr(folder.name) in said() and folder.read_text() == "not ours"


# ---------------------------------------------------------------------- redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    import redis

    with redis.Redis(port=server.port) as client:
        yield client


def a_name(key: bytes) -> str:
    return f"raykv:default:{key.hex()}"


def odd_values(client: Any, names: list[str]) -> None:
    """Set a foreign value of each kind."""
    for name in names:
        client.delete(name)
    client.rpush(names[0], "a", "list")
    client.hset(names[1], "a", "hash")
    client.sadd(names[2], "a set")
    client.zadd(names[3], {"sorted": 1})
    client.xadd(names[4], {"a": "stream"})
    client.set(names[5], "short")
    client.setrange(names[6], 300 << 20, b"long")
    client.set(names[7], 12345)


KINDS = 8
OURS_BUT_THE_ODD = sorted((key.tobytes(), SIZE) for key in KEYS[KINDS:])


def test_odd_values_under_names_of_ours_are_one_miss_each(
    server: RedisServer, client: Any, guard: Any, said: Callable[[], str]
) -> None:
    tier = guard(open_tier(parse(server.url())))
    odd_values(client, [a_name(key.tobytes()) for key in KEYS[:KINDS]])
    for _ in range(3):
        assert missed(tier) == list(range(KINDS)) and tier.up
    assert listed(tier) == OURS_BUT_THE_ODD and tier.up
    sums = np.array([xxh3_64_intdigest(row) for row in payload(KEYS, SIZE)], np.uint64)
    bodies = [row.data for row in payload(KEYS, SIZE)]
    assert tier.store(KEYS, sums, np.zeros(len(KEYS), np.uint32), bodies).all(), "stored anew, they are ours"
    assert missed(tier) == [] and listed(tier) == OURS


def test_what_others_keep_in_the_key_space_is_left_there(
    server: RedisServer, client: Any, guard: Any, said: Callable[[], str]
) -> None:
    tier = guard(open_tier(parse(server.url())))
    assert listed(tier) == OURS and not said()
    names = [a_name(key) for key in ABSENT[:KINDS]] + ["raykv:default:list", "raykv:default:" + "AB" * 16]
    odd_values(client, names[:KINDS])
    client.rpush(names[-2], "a", "list")
    client.set(names[-1], bytes(SIZE))
    client.set(a_name(ABSENT[9]), bytes(64 + SIZE))  # as long as a block's record
    client.set("raykv:other:list", "of another pool")
    for _ in range(2):
        assert listed(tier) == OURS and missed(tier) == [] and tier.up
    assert client.exists(*names) == len(names)
    assert tier.faults["strangers"] == 2 and "2 records under names of blocks" in said()
    assert "9 keys in its key space are no blocks of raykv, left alone: 'raykv:default:" in said()


def test_a_list_in_place_of_the_marker_is_replaced(server: RedisServer, client: Any, guard: Any) -> None:
    client.rpush(a_name(MARKER), "a", "list")
    tier = guard(open_tier(parse(server.url())))
    assert listed(tier) == OURS and missed(tier) == []


def test_only_blocks_of_ours_are_deleted_to_make_room_for_a_marker(
    tmp_path: Path, guard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = open_tier(parse(f"file://{tmp_path}?capacity=64MiB"))
    tier = guard(inner)
    stranger = tmp_path / "0" / path_of(ABSENT[0])
    stranger.write_bytes(bytes(PAGE + SIZE))
    put = inner.put_many

    def refuse_while_full(blocks: Any) -> list[bool]:
        return [False] * len(blocks) if len(listed(tier)) == len(KEYS) else put(blocks)

    monkeypatch.setattr(inner, "put_many", refuse_while_full)
    tier.clear(b"cleared.")
    assert tier.up and stranger.exists() and missed(tier) == list(range(len(KEYS)))
