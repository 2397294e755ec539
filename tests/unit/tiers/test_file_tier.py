"""Properties that only a tier in a folder has."""

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.tiers.blocks import block, key_at, listed, memory, there

from raykv.tiers import HEAD_BYTES, Block, parse
from raykv.tiers.file import PAGE, FileTier

MIB = 1 << 20
LENGTHS = (1, 4095, 4096, 4097, 2 * MIB)


def open_file(path: Path, shared: bool = False, capacity: str = "1MiB") -> FileTier:
    return FileTier(parse(f"file://{path}?capacity={capacity}&shared={int(shared)}"))


def file_of(path: Path, key: bytes) -> Path:
    return path / key.hex()[:2] / key.hex()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[tuple[FileTier, Block, Path]]:
    tier, stored = open_file(tmp_path), block(key_at(0), 2 * PAGE)
    assert tier.put_many([stored]) == [True]
    yield tier, stored, file_of(tmp_path / "0", stored.key)
    tier.close()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_is_refused_unless_it_is_shared(tmp_path: Path, mode: int) -> None:
    """Other users could put links there, and blocks would be written over this user's files."""
    for name in ("0", "shared"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    with pytest.raises(
        ValueError, match=rf"external=file://{tmp_path}: {tmp_path}/0 is of user .*mode {mode:o}.*chmod 700"
    ):
        open_file(tmp_path)
    open_file(tmp_path, shared=True).close()


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir(0o700)
    os.chown(tmp_path / "0", 12345, 12345)
    with pytest.raises(ValueError, match="is of user 12345"):
        open_file(tmp_path)


@pytest.mark.parametrize("link", ["0", "shared", "0/lock", "0/ab"])
def test_links_in_a_tiers_folder_are_not_followed(tmp_path: Path, link: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "ab").mkdir(parents=True)
    kept = elsewhere / "ab" / "ab0000000000000000000000000000.0000000000000000-1"
    kept.write_bytes(b"kept")
    (tmp_path / "disk" / "0").mkdir(0o700, parents=True)
    if "/" not in link:
        (tmp_path / "disk" / "0").rmdir()
    (tmp_path / "disk" / link).symlink_to(kept if link == "0/lock" else elsewhere / "ab" if "/" in link else elsewhere)
    with contextlib.suppress(OSError):
        open_file(tmp_path / "disk", shared=link == "shared").close()
    assert kept.read_bytes() == b"kept" and {path.name for path in elsewhere.iterdir()} == {"ab"}
    assert [path.name for path in (elsewhere / "ab").iterdir()] == [kept.name]


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
    """Blocks of any length reuse them. They are not listed, and none stays in the end. A shared folder keeps none."""
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
    """Mount a disk with these options. Yields a function that mounts it again with other options."""

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
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # lazy, as a failed test leaves files open


def test_a_full_disk_takes_no_more_and_goes_on_serving(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        tier, blocks = open_file(tmp_path / "small", capacity="5MiB"), [block(key_at(i), MIB) for i in range(12)]
        stored = tier.put_many(blocks)
        assert any(stored) and not all(stored)
        assert there(tier, blocks) == stored
        files = [name for _, _, names in os.walk(tmp_path / "small") for name in names]
        assert len(files) == sum(stored) + 1  # the blocks and the lock
        tier.delete_many([block.key for block in blocks])
        assert tier.put_many(blocks[-1:]) == [True] == there(tier, blocks[-1:])
        tier.close()


def test_a_disk_without_inodes_is_named_as_such(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "poor", "-t", "tmpfs", "-o", "size=8m,nr_inodes=100", "tmpfs"),
        pytest.raises(OSError, match=r"No space left.*more free inodes \(df -i\)"),
    ):
        open_file(tmp_path / "poor", capacity="1MiB")


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
    assert os.listdir(tmp_path) == ["0"]  # the failed opening kept no lock


def test_blocks_that_are_there_count_as_free(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        tier = open_file(tmp_path / "small", capacity="6MiB")
        assert all(tier.put_many([block(key_at(i), MIB) for i in range(5)]))
        tier.close()
        open_file(tmp_path / "small", capacity="6MiB").close()
        with pytest.raises(ValueError, match="capacity"):
            open_file(tmp_path / "small", capacity="12MiB")
