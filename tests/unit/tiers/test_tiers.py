"""Properties of every tier. test_redis_tier tests servers that fail."""

import dataclasses
import random
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from helpers.tiers.blocks import block, key_at, listed, memory, there
from helpers.tiers.dictionary import DictTier
from helpers.tiers.redis_server import redis_server
from helpers.tiers.refusal import refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raykv.tiers import HEAD_BYTES, MARKER, Block, Tier, open_tier, parse, register_tier
from raykv.tiers.base import ReadsHeads
from raykv.tiers.file import PAGE

MIB = 1 << 20
LENGTHS = (1, 4095, 4096, 4097, 2 * MIB)
Opener = Callable[[], Tier]
pools = (f"pool{i}" for i in count())


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("redis")
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    with pytest.MonkeyPatch.context() as environment:
        server.start()
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "s3cret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            environment.setenv(name, value)
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
        yield "s3://bucket"
        server.stop()


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


KINDS = ("file", "file-shm", "file-shared", "redis", "fsspec-files", "memory", "s3", "registered")


@pytest.fixture(params=KINDS)
def opener(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opener:
    """A function that opens a tier, which is empty at first, and keeps its blocks when it is opened again."""
    name = tmp_path.name
    match request.param:
        case "file":
            url = f"file://{tmp_path}/tier?"
        case "file-shm":
            url = f"file://{request.getfixturevalue('shm')}/tier?"
        case "file-shared":
            url = f"file://{tmp_path}/tier?shared=1&"
        case "redis":
            # the server answers, but maybe late on a busy machine
            monkeypatch.setattr("raykv.tiers.redis.TIMEOUT_S", 60.0)
            parsed = dataclasses.replace(parse(request.getfixturevalue("redis_url")), pool=next(pools))
            return lambda: open_tier(parsed)
        case "fsspec-files":
            pytest.importorskip("fsspec")
            from raykv.tiers.fsspec import FsspecTier

            return lambda: FsspecTier(parse(f"local://{tmp_path}?shared=0&capacity=100MiB"))
        case "memory":
            pytest.importorskip("fsspec")
            url = f"memory://{name}?"
        case "s3":
            url = f"{request.getfixturevalue('s3')}/{name}?"
        case _:
            register_tier("dict", DictTier)
            url = f"dict://{name}?"
    return lambda: open_tier(parse(f"{url}capacity=100MiB"))


@pytest.fixture
def tier(opener: Opener) -> Iterator[Tier]:
    tier = opener()
    yield tier
    tier.close()


def test_stored_blocks_are_read_back(tier: Tier) -> None:
    blocks = [block(key_at(i), length, i % 2) for i, length in enumerate(LENGTHS * 2)]
    assert there(tier, blocks) == [False] * len(blocks)
    assert tier.put_many(blocks) == [True] * len(blocks)
    assert all(there(tier, blocks)) and all(there(tier, blocks, offset=1))
    assert all(there(tier, [block])[0] for block in blocks)


def test_empty_batches(tier: Tier) -> None:
    assert tier.put_many([]) == []
    assert tier.get_many([], []) == []
    tier.delete_many([])
    assert listed(tier) == []


def test_answers_are_in_order_of_what_was_asked(tier: Tier) -> None:
    blocks = [block(key_at(i), 5000) for i in range(40)]
    assert all(tier.put_many(blocks[::2]))
    mixed = random.Random(0).sample(blocks, len(blocks))
    expected = [block in blocks[::2] for block in mixed]
    assert there(tier, mixed) == expected


def test_a_batch_of_several_pieces(tier: Tier) -> None:
    blocks = [block(key_at(i), 3 * MIB) for i in range(25)]
    assert all(tier.put_many(blocks)) and all(there(tier, blocks))


def test_another_length_is_a_miss(tier: Tier) -> None:
    stored = block(key_at(0), 2 * PAGE)
    assert tier.put_many([stored]) == [True]
    for length in (0, 1, PAGE, 2 * PAGE - 1, 2 * PAGE + 1, 3 * PAGE):
        assert tier.get_many([stored.key], [memory(length)]) == [None]
    assert there(tier, [stored]) == [True]


def test_deleted_blocks_are_gone_and_can_be_stored_again(tier: Tier) -> None:
    blocks = [block(key_at(i), PAGE) for i in range(6)]
    assert all(tier.put_many(blocks))
    tier.delete_many([block.key for block in blocks[:3]] + [key_at(100)])
    assert there(tier, blocks) == [False] * 3 + [True] * 3
    tier.delete_many([block.key for block in blocks])
    assert there(tier, blocks) == [False] * 6
    assert all(tier.put_many(blocks)) and all(there(tier, blocks))


def test_the_marker_is_kept_but_not_listed(tier: Tier) -> None:
    assert tier.get_many([MARKER], [memory(0)]) == [None]
    marker, stored = Block(MARKER, bytes(range(HEAD_BYTES)), memory(0)), block(key_at(0), PAGE)
    assert tier.put_many([marker]) == [True] == tier.put_many([stored])
    assert tier.get_many([MARKER], [memory(0)]) == [marker.head]
    assert listed(tier) == [(stored.key, PAGE)]


def test_a_reopened_tier_has_every_block(opener: Opener) -> None:
    blocks = [block(key_at(i), length) for i, length in enumerate(LENGTHS)]
    first = opener()
    assert all(first.put_many(blocks))
    first.close()
    again = opener()
    assert sorted(listed(again)) == sorted((block.key, len(block.body)) for block in blocks)
    assert all(there(again, blocks))
    again.close()


@pytest.mark.parametrize("opener", [kind for kind in KINDS if kind != "registered"], indirect=True)
def test_heads_are_read_without_bodies(tier: Tier) -> None:
    assert isinstance(tier, ReadsHeads)
    blocks = [block(key_at(i), length) for i, length in enumerate(LENGTHS * 2)]
    assert all(tier.put_many(blocks))
    assert tier.get_heads([block.key for block in blocks]) == [block.head for block in blocks]
    assert tier.get_heads([key_at(100), blocks[0].key, key_at(101)]) == [None, blocks[0].head, None]
    assert tier.get_heads([]) == []


@pytest.mark.parametrize("opener", ["file-shared", "redis", "s3"], indirect=True)
def test_a_shared_tier_shows_what_another_node_stores_and_deletes(opener: Opener) -> None:
    here, there_too, stored = opener(), opener(), block(key_at(0), PAGE)
    assert here.shared and not listed(here) and not there(here, [stored])[0]
    there_too.put_many([stored])
    assert there(here, [stored]) == [True]
    assert listed(here) == [(stored.key, PAGE)]
    there_too.delete_many([stored.key])
    assert there(here, [stored]) == [False]
    assert not listed(here)
    for tier in (here, there_too):
        tier.close()


def test_threads_share_a_tier(tier: Tier) -> None:
    common = [block(key_at(i), 3 * PAGE) for i in range(6)]

    def work(number: int) -> bool:
        own = [block(key_at(100 * number + i), PAGE + number) for i in range(6)]
        stored = all(tier.put_many(common + own)) and all(there(tier, own))
        tier.delete_many([block.key for block in own])
        return stored and not any(there(tier, own)) and all(tier.put_many(common))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(1, 9)))
    assert all(there(tier, common))
    assert sorted(listed(tier)) == sorted((block.key, 3 * PAGE) for block in common)


BLOCKS = [block(key_at(i), length) for i, length in enumerate((1, 100, PAGE, 2 * PAGE, 2 * PAGE + 1, 20000))]


steps = st.tuples(st.sampled_from(("put", "delete")), st.lists(st.sampled_from(range(len(BLOCKS))), max_size=8))


@pytest.mark.parametrize("opener", [kind for kind in KINDS if kind != "s3"], indirect=True)  # too slow
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps, max_size=6))
def test_a_tier_behaves_as_a_dictionary(tier: Tier, run: list[tuple[str, list[int]]]) -> None:
    tier.delete_many([block.key for block in BLOCKS])
    model: set[int] = set()
    for step, which in run:
        if step == "put":
            assert tier.put_many([BLOCKS[i] for i in which]) == [True] * len(which)
            model.update(which)
        else:
            tier.delete_many([BLOCKS[i].key for i in which])
            model.difference_update(which)
        assert there(tier, BLOCKS) == [i in model for i in range(len(BLOCKS))]
    assert sorted(listed(tier)) == sorted((BLOCKS[i].key, len(BLOCKS[i].body)) for i in model)


def test_files_are_written_by_the_tier_that_keeps_them_to_this_user(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    assert f"write file://{tmp_path}" in refusal(f"local://{tmp_path}?capacity=1GiB")


def test_files_that_can_not_be_written(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("raykv.tiers.fsspec", exc_type=ImportError)
    with pytest.raises(OSError, match="exists and may be written"):
        fsspec.FsspecTier(parse(f"local://{tmp_path}/nothing?capacity=1GiB"))


def test_objects_that_can_not_be_written(s3: str) -> None:
    for url in ("s3://nobucket/prefix", "data://x", "memory://x/[ab]"):
        message = refusal(f"{url}?capacity=1GiB")
        assert "exists and may be written" in message and "s3cret" not in message
