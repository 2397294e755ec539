"""What every tier promises, and what is a folder's own. Servers that fail are in test_redis_tier."""

import contextlib
import dataclasses
import errno
import itertools
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count
from pathlib import Path

import pytest
from helpers.redis_server import redis_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raykv.tiers import HEAD_BYTES, MARKER, Block, Tier, TierUrl, open_tier, parse, register_tier, tier_for
from raykv.tiers.base import ReadsHeads
from raykv.tiers.file import PAGE, FileTier

MIB = 1 << 20
LENGTHS = (1, 4095, 4096, 4097, 2 * MIB)
Opener = Callable[[], Tier]
dict_stores: dict[str, dict[bytes, tuple[bytes, bytes]]] = {}
pools = (f"pool{i}" for i in count())


# ---------------------------------------------------------------------- what every tier promises


class DictTier:
    """What a user may write."""

    shared = False

    def __init__(self, url: TierUrl) -> None:
        self._blocks = dict_stores.setdefault(url.text, {})

    def put_many(self, blocks: Sequence[Block]) -> list[bool]:
        self._blocks.update({key: (head, bytes(body)) for key, head, body in blocks})
        return [True] * len(blocks)

    def get_many(self, keys: Sequence[bytes], out: Sequence[memoryview]) -> list[bytes | None]:
        return [self._get(key, view) for key, view in zip(keys, out, strict=True)]

    def _get(self, key: bytes, out: memoryview) -> bytes | None:
        head, body = self._blocks.get(key, (b"", b""))
        if not head or len(body) != len(out):
            return None
        out[:] = body
        return head

    def delete_many(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._blocks.pop(key, None)

    def scan(self) -> Iterator[list[tuple[bytes, int]]]:
        yield [(key, len(body)) for key, (_, body) in list(self._blocks.items()) if key != MARKER]

    def close(self) -> None:
        """Nothing to do."""


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("redis")
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Address of a bucket in an S3 server of our own."""
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


KINDS = ("file", "file-shm", "file-shared", "redis", "local", "memory", "s3", "registered")


@pytest.fixture(params=KINDS)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Opens a tier, empty at first, that keeps what it has when it is closed and opened again."""
    name = tmp_path.name
    match request.param:
        case "file":
            url = f"file://{tmp_path}/tier?"
        case "file-shm":
            url = f"file://{request.getfixturevalue('shm')}/tier?"
        case "file-shared":
            url = f"file://{tmp_path}/tier?shared=1&"
        case "redis":
            parsed = dataclasses.replace(parse(request.getfixturevalue("redis_url")), pool=next(pools))
            return lambda: open_tier(parsed)
        case "local":
            pytest.importorskip("fsspec")
            url = f"local://{tmp_path}?"
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


def key_at(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def memory(length: int, offset: int = 0) -> memoryview:
    """So many bytes, so far from the start of a page."""
    return memoryview(mmap.mmap(-1, max(1, offset + length)))[offset : offset + length]


def block(key: bytes, length: int, offset: int = 0) -> Block:
    body = memory(length, offset)
    body[:] = random.Random(key).randbytes(length)
    return Block(key, key * 4, body)


def there(tier: Tier, blocks: Sequence[Block], offset: int = 0) -> list[bool]:
    """Which of the blocks come back as they were."""
    out = [memory(len(block.body), offset) for block in blocks]
    heads = tier.get_many([block.key for block in blocks], out)
    assert all(head is None or type(head) is bytes for head in heads)
    return [head == block.head and view == block.body for head, view, block in zip(heads, out, blocks, strict=True)]


def listed(tier: Tier) -> list[tuple[bytes, int]]:
    return list(chain(*tier.scan()))


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
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


# ---------------------------------------------------------------------- a folder


def open_file(path: Path, shared: bool = False, capacity: str = "1MiB") -> FileTier:
    return FileTier(parse(f"file://{path}?capacity={capacity}&shared={int(shared)}"))


def file_of(path: Path, key: bytes) -> Path:
    return path / key.hex()[:2] / key.hex()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[tuple[FileTier, Block, Path]]:
    """A tier with one block, and the block's file."""
    tier, stored = open_file(tmp_path), block(key_at(0), 2 * PAGE)
    assert tier.put_many([stored]) == [True]
    yield tier, stored, file_of(tmp_path / "0", stored.key)
    tier.close()


def test_a_file_is_a_page_and_a_body_with_mode_0600(one: tuple[FileTier, Block, Path]) -> None:
    _, stored, path = one
    assert path.read_bytes() == stored.head.ljust(PAGE, b"\0") + stored.body.tobytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert {folder.stat().st_mode & 0o777 for folder in (path.parent, path.parent.parent)} == {0o700}


@pytest.mark.parametrize("length", [0, HEAD_BYTES, PAGE, 2 * PAGE, 3 * PAGE - 1, 3 * PAGE + 1, 4 * PAGE])
def test_a_file_of_another_length_is_a_miss(one: tuple[FileTier, Block, Path], length: int) -> None:
    tier, stored, path = one
    os.truncate(path, length)
    assert there(tier, [stored]) == [False] == there(tier, [stored], offset=1)
    assert path.stat().st_size == length
    assert tier.put_many([stored]) == [True] == there(tier, [stored])


def test_flipped_bytes_are_returned_as_they_are(one: tuple[FileTier, Block, Path]) -> None:
    tier, stored, path = one
    with open(path, "r+b") as file:
        file.seek(PAGE + 5)
        file.write(bytes([stored.body[5] ^ 1]))
    out = memory(2 * PAGE)
    assert tier.get_many([stored.key], [out]) == [stored.head]
    assert [i for i in range(len(out)) if out[i] != stored.body[i]] == [5]


def test_reads_change_nothing(one: tuple[FileTier, Block, Path]) -> None:
    tier, stored, path = one
    before = path.stat()
    assert there(tier, [stored]) == [True] and listed(tier)
    after = path.stat()
    assert (after.st_mtime_ns, after.st_ctime_ns, after.st_ino) == (
        before.st_mtime_ns,
        before.st_ctime_ns,
        before.st_ino,
    )
    assert os.listdir(path.parent) == [path.name]


def test_a_block_is_readable_while_it_is_stored_again(one: tuple[FileTier, Block, Path]) -> None:
    tier, stored, _ = one
    with ThreadPoolExecutor(1) as threads:
        again = threads.submit(lambda: [tier.put_many([stored]) for _ in range(200)])
        while not again.done():
            assert there(tier, [stored]) == [True]
        assert again.result() == [[True]] * 200


def test_a_scan_lists_the_oldest_first(tmp_path: Path) -> None:
    tier, blocks = open_file(tmp_path), [block(key_at(i), PAGE) for i in range(20)]
    assert all(tier.put_many(blocks))
    for age, stored in enumerate(blocks):
        os.utime(file_of(tmp_path / "0", stored.key), ns=(0, 10**9 * age))
    assert [key for key, _ in listed(tier)] == [stored.key for stored in blocks]
    tier.close()


def test_stores_on_one_path_have_folders_of_their_own(tmp_path: Path) -> None:
    blocks = [block(key_at(i), PAGE) for i in range(2)]
    for _ in range(2):
        tiers = [open_file(tmp_path), open_file(tmp_path)]
        for tier, own in zip(tiers, blocks, strict=True):
            tier.put_many([own])
            assert there(tier, blocks) == [stored is own for stored in blocks]
        for tier in tiers:
            tier.close()
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_a_shared_folder_is_one_content(tmp_path: Path) -> None:
    tiers = [open_file(tmp_path, shared=True), open_file(tmp_path, shared=True)]
    stored = block(key_at(0), PAGE)
    assert tiers[0].put_many([stored]) == [True] == there(tiers[1], [stored])
    assert [tier.shared for tier in tiers] == [True, True] and os.listdir(tmp_path) == ["shared"]
    assert listed(tiers[1]) == listed(tiers[0]) == [(stored.key, PAGE)]
    for tier in tiers:
        tier.close()


KILLED = """
import sys
from raykv.tiers import Block, open_tier, parse
tier = open_tier(parse(sys.argv[1]))
assert tier.put_many([Block(b"k" * 16, b"h" * 64, memoryview(b"body"))]) == [True]
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_store_is_adopted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, f"file://{tmp_path}?capacity=1MiB"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        beside = open_file(tmp_path)
        assert beside.get_many([b"k" * 16], [memory(4)]) == [None]
        process.send_signal(signal.SIGKILL)
        process.wait()
    again = open_file(tmp_path)
    assert listed(again) == [(b"k" * 16, 4)]
    for tier in (beside, again):
        tier.close()


@pytest.mark.parametrize("shared", [False, True])
def test_half_written_files_are_removed_unless_the_folder_is_shared(tmp_path: Path, shared: bool) -> None:
    first, stored = open_file(tmp_path, shared), block(key_at(0), PAGE)
    assert first.put_many([stored]) == [True]
    first.close()
    path = file_of(tmp_path / ("shared" if shared else "0"), stored.key)
    half, foreign = path.with_name(f"{path.name}.{'0f' * 8}-123"), path.with_name("README")
    for other in (half, foreign):
        other.write_bytes(b"x" * 10000)
    again = open_file(tmp_path, shared)
    assert half.exists() == shared and foreign.exists()
    assert listed(again) == [(stored.key, PAGE)]
    again.close()


def test_deleted_files_are_written_over(tmp_path: Path) -> None:
    """By blocks of any length. Nothing of it is listed or left behind; a shared folder keeps nothing."""
    for shared in (False, True):
        tier, folder = open_file(tmp_path, shared), tmp_path / ("shared" if shared else "0")
        blocks = [block(key_at(i), length) for i, length in enumerate((2 * PAGE, 2 * PAGE, PAGE, 3 * PAGE + 1))]
        for before, after in itertools.pairwise(blocks):
            assert tier.put_many([before]) == [True]
            number = file_of(folder, before.key).stat().st_ino
            tier.delete_many([before.key])
            assert not listed(tier) and there(tier, [before]) == [False]
            assert tier.put_many([after]) == [True] == there(tier, [after])
            assert (file_of(folder, after.key).stat().st_ino == number) or shared
            assert listed(tier) == [(after.key, len(after.body))]
        tier.delete_many([blocks[-1].key])
        tier.close()
        assert [name for _, _, names in os.walk(folder) for name in names] == ([] if shared else ["lock"])


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Callable[..., None]]:
    """Mount with these options; yields `mount`, for remounts."""

    def mount(*options: str) -> None:
        subprocess.run(["mount", *options, str(folder)], check=True, capture_output=True)

    folder.mkdir()
    try:
        mount(*options)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting takes root: {error}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a test that failed left files open


def test_a_full_disk_takes_no_more_and_goes_on_serving(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        tier, blocks = open_file(tmp_path / "small", capacity="5MiB"), [block(key_at(i), MIB) for i in range(12)]
        stored = tier.put_many(blocks)
        assert any(stored) and not all(stored)
        assert there(tier, blocks) == stored
        files = [name for _, _, names in os.walk(tmp_path / "small") for name in names]
        assert len(files) == sum(stored) + 1  # and the lock
        tier.delete_many([block.key for block in blocks])
        assert tier.put_many(blocks[-1:]) == [True] == there(tier, blocks[-1:])
        tier.close()


def test_a_file_system_without_direct_io(tmp_path: Path) -> None:
    with mounted(tmp_path / "memory", "-t", "ramfs", "ramfs"):
        with pytest.raises(OSError):
            os.open(tmp_path / "memory" / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        tier, blocks = open_file(tmp_path / "memory"), [block(key_at(i), length) for i, length in enumerate(LENGTHS)]
        assert all(tier.put_many(blocks)) and all(there(tier, blocks))
        tier.close()


def test_a_folder_that_turns_read_only_raises_and_goes_on_serving(tmp_path: Path) -> None:
    stored = block(key_at(0), PAGE)
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m", "tmpfs") as mount:
        tier = open_file(tmp_path / "disk", shared=True)
        assert tier.put_many([stored]) == [True]
        mount("-o", "remount,ro")
        for blocks in ([stored], [stored] * 3):
            with pytest.raises(OSError) as raised:
                tier.put_many(blocks)
            assert raised.value.errno == errno.EROFS
        assert there(tier, [stored]) == [True]
        for shared in (False, True):
            with pytest.raises(OSError, match="external="):
                open_file(tmp_path / "disk", shared)
        tier.close()


def test_a_folder_that_is_gone_raises(one: tuple[FileTier, Block, Path]) -> None:
    tier, stored, path = one
    subprocess.run(["rm", "-r", str(path.parent.parent)], check=True)
    assert there(tier, [stored]) == [False]
    for call in (lambda: tier.put_many([stored]), lambda: list(tier.scan())):
        with pytest.raises(FileNotFoundError):
            call()


def test_a_closed_tier_raises(tmp_path: Path) -> None:
    tier, stored = open_file(tmp_path), block(key_at(0), PAGE)
    tier.close()
    with pytest.raises(OSError):
        tier.put_many([stored])


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_path_that_is_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"external=file:.*name a folder"):
        open_file(tmp_path / name)


def test_more_capacity_than_the_disk_has(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"external=.*capacity"):
        open_file(tmp_path, capacity="900TiB")
    open_file(tmp_path).close()
    assert os.listdir(tmp_path) == ["0"]  # it kept no lock


def test_blocks_that_are_there_count_as_free(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        tier = open_file(tmp_path / "small", capacity="6MiB")
        assert all(tier.put_many([block(key_at(i), MIB) for i in range(5)]))
        tier.close()
        open_file(tmp_path / "small", capacity="6MiB").close()
        with pytest.raises(ValueError, match="capacity"):
            open_file(tmp_path / "small", capacity="12MiB")


# ---------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    ("text", "capacity"),
    [
        ("123", 123),
        ("1KiB", 1 << 10),
        ("1.5MiB", 3 << 19),
        ("200GiB", 200 << 30),
        ("2TiB", 2 << 40),
        ("1KB", 10**3),
        ("7MB", 7 * 10**6),
        ("1GB", 10**9),
        ("1TB", 10**12),
    ],
)
def test_capacities(text: str, capacity: int) -> None:
    assert parse(f"file:///data?capacity={text}").capacity == capacity


def test_the_parts_of_a_url() -> None:
    url = parse("redis://kv:pass%40word@host:7000/2?capacity=1GiB&shared=0")
    assert (url.scheme, url.text, url.shared, url.pool) == ("redis", "redis://host:7000/2", False, "default")
    assert (url.parts.hostname, url.parts.port, url.parts.path) == ("host", 7000, "/2")
    assert parse("file:///data/kv?capacity=1KiB").shared is None


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/mnt/nvme?capacity=1GiB",
        "redis:kv:s3cret@host?capacity=1GiB",
        "kv:s3cret@host?capacity=1GiB",
        "redis://kv:s3cret@host:port?capacity=1GiB",
        "redis://kv:s3cret/s3cret@host?capacity=1GiB",
        "redis://kv:1/s3cret@host?capacity=1GiB",
        "redis://kv:s3cret?s3cret@host?capacity=1GiB",
        "redis://kv:1?s3cret@host?capacity=1GiB",
        "redis://kv:1?s3cret=@host&capacity=1GiB",
        "redis://kv:1#s3cret@host?capacity=1GiB",
        "redis://kv:[s3cret@host?capacity=1GiB",
        "redis:///kv:s3cret@host?capacity=1GiB",
        "redis:kv:s3cret@host://?capacity=1GiB",
        "redis://kv:s3cret@host",
        "redis://kv:s3cret@host?capacity=",
        "redis://kv:s3cret@host?capacity=0",
        "redis://kv:s3cret@host?capacity=-1GiB",
        "redis://kv:s3cret@host?capacity=many",
        "redis://kv:s3cret@host?capacity=1",
        "redis://kv:s3cret@host?capacity=0.3",
        "redis://kv:s3cret@host?capacity=1GiX",
        "redis://kv:s3cret@host?capacity=1GiB&capacity=2GiB",
        "redis://kv:s3cret@host?capacity=1GiB&shared=yes",
        "redis://kv:s3cret@host?capacity=1GiB&timeout=3",
        "s3://bucket/prefix?capacity=1GiB&key=s3cret",
    ],
)
def test_refused_urls_say_why_and_no_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"^external=") as raised:
        parse(url)
    assert "s3cret" not in "".join(traceback.format_exception(raised.value))


def test_a_repr_has_no_password() -> None:
    assert "s3cret" not in f"{parse('redis://kv:s3cret@host?capacity=1GiB')!r}"


def refusal(url: str) -> str:
    """What tier_for or the tier itself says, with all that led to it."""
    with pytest.raises((ValueError, OSError, ImportError)) as raised:
        open_tier(parse(url))
    assert str(raised.value).startswith("external=") or "] external=" in str(raised.value)
    return "".join(traceback.format_exception(raised.value))


def test_unknown_schemes_are_refused() -> None:
    message = refusal("gopher://host/path?capacity=1GiB")
    assert all(word in message for word in ("'gopher'", "register_tier", "file", "redis", "valkeys", "s3"))


@pytest.mark.parametrize("url", ["file://host/path?capacity=1GiB", "file://?capacity=1GiB", "file:///?capacity=1GiB"])
def test_file_urls_have_three_slashes(url: str) -> None:
    assert "file:///mnt" in refusal(url)


def test_fsspec_takes_no_password() -> None:
    pytest.importorskip("fsspec")
    assert "s3cret" not in refusal("ftp://kv:s3cret@host/path?capacity=1GiB")


def test_objects_that_can_not_be_written(s3: str, tmp_path: Path) -> None:
    for url in ("s3://nobucket/prefix", f"local://{tmp_path}/nothing", "data://x", "memory://x/[ab]"):
        message = refusal(f"{url}?capacity=1GiB")
        assert "exists and may be written" in message and "s3cret" not in message


def test_which_tiers_are_shared() -> None:
    pytest.importorskip("fsspec")
    assert not open_tier(parse("memory://x?capacity=1GiB")).shared
    assert open_tier(parse("memory://x?capacity=1GiB&shared=1")).shared


@pytest.mark.parametrize(("module", "url"), [("redis", "redis://host"), ("fsspec", "s3://bucket")])
def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, module: str, url: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"raykv.tiers.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"external=.*pip install 'raykv\[{module}\]'"):
        tier_for(parse(f"{url}?capacity=1GiB"))


def test_importing_tiers_imports_no_library_of_theirs() -> None:
    code = "import sys, raykv.tiers; print(*{'redis', 'fsspec', 's3fs'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.strip() == b""


def test_a_registered_tier_gets_parameters_of_its_own() -> None:
    opened: list[TierUrl] = []

    def make(url: TierUrl) -> Tier:
        opened.append(url)
        return DictTier(url)

    register_tier("mine", make)
    open_tier(parse("mine://host/path?capacity=1GiB&color=blue"))
    assert opened[0].params == (("color", "blue"),)


def test_an_entry_point_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[raykv.tiers]\ntheirs = theirs:make\n")
    (tmp_path / "theirs.py").write_text("def make(url): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    make = tier_for(parse("theirs://host?capacity=1GiB&color=blue"))
    assert (make.__module__, make.__name__) == ("theirs", "make")
