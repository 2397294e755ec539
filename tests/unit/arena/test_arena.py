"""An arena in one process: what is written is read, and what is not to be had is a miss."""

import errno
import itertools
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.arena import worker as w
from helpers.arena.worker import GEN, PRINT, SLAB, block_of, get, key_of, locations, put
from xxhash import xxh3_64_intdigest

from raykv.arena import block_copy, checksum, files, header
from raykv.arena.arena import Arena, open_own
from raykv.arena.buffers import rows_of
from raykv.errors import ArenaMismatch, CapacityError
from raykv.protocol.location import ALIGN, LOCATION


@pytest.fixture
def arena(path: str) -> Iterator[Arena]:
    """The owner: two of three slabs offered, epoch 1."""
    arena = Arena.create(path, PRINT, SLAB, 3)
    assert arena.offer_next() and arena.offer_next()
    arena.raise_epoch(w.EPOCH)
    yield arena
    arena.close(unlink=True)


def words_of(arena: Arena, slot: int) -> header.Words:
    """The header of a slot of slab 0, as words that a test may alter."""
    first = arena._shape[1] + slot * header.HEADER_WORDS
    return arena._memory[0][first : first + header.HEADER_WORDS]


@pytest.mark.parametrize("size", [1, 4095, 4096, 10_000, 300_001, 1 << 20])
def test_round_trip(arena: Arena, client: Arena, size: int) -> None:
    where = locations([1, 0, 3], [2, 3, 4], size=size, slab=1)
    keys = np.concatenate([key_of(seed) for seed in range(3)])
    rows = np.random.default_rng(0).integers(0, 256, (3, size), np.uint8)
    assert client.write(where, keys, rows, np.arange(7, 10)).all()
    for verify in (False, True):
        out = np.zeros_like(rows)
        assert arena.read(where, keys, out, verify=verify).all()
        assert np.array_equal(out, rows)
    sums, positions, ok = arena.read_headers(where, keys)
    assert ok.all() and positions.tolist() == [7, 8, 9]
    assert sums.tolist() == [xxh3_64_intdigest(row.tobytes()) for row in rows]
    assert arena.views(where[:1])[0].tobytes() == rows[0].tobytes()
    found = client.inventory()
    order = np.argsort(where["slot"])
    assert np.array_equal(found.ready, where[order]) and np.array_equal(found.keys, keys[order])
    assert found.positions.tolist() == [8, 7, 9] and len(found.writing) == 0


def test_blocks_in_several_parts(arena: Arena) -> None:
    """A block is gathered from, and scattered to, several places in memory; a piece may be empty or span tiles."""
    size = 1_400_000
    source = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    cuts = [0, 5, 5, 300_000, 1_399_999, size]
    pieces = [source[a:b].copy() for a, b in itertools.pairwise(cuts)]
    where = locations([0], [2], size=size)
    assert arena.write(where, key_of(1), rows_of([piece[None] for piece in pieces])).all()
    for verify in (False, True):
        out = [np.zeros(n, np.uint8) for n in (1, 1_000_000, 399_999)]
        assert arena.read(where, key_of(1), rows_of([piece[None] for piece in out]), verify=verify).all()
        assert np.array_equal(np.concatenate(out), source)


def test_big_batches_are_shared_between_threads(arena: Arena) -> None:
    where = locations([0, 1, 2, 3] * 2, range(2, 10), size=1 << 20)
    where["slab"][4:] = 1
    rows = np.random.default_rng(2).integers(0, 256, (8, 1 << 20), np.uint8)
    keys = np.concatenate([key_of(seed) for seed in range(8)])
    assert rows.nbytes >= block_copy.SPLIT and arena.write(where, keys, rows).all()
    for verify in (False, True):
        out = np.zeros_like(rows)
        assert arena.read(where, keys, out, verify=verify).all() and np.array_equal(out, rows)


def test_a_thread_that_fails_fails_the_copy_after_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = np.random.default_rng(3).integers(0, 256, (16, 1 << 20), np.uint8)
    slots = np.zeros_like(blocks)
    table = block_copy.copies(rows_of([blocks]), slots.ctypes.data + np.arange(16) * slots.shape[1], out=False)
    original = checksum.copy

    def fail(part: block_copy.Copies) -> None:
        if part is failing:
            raise MemoryError
        original(part)

    shares = list(table)
    failing = shares[9]
    monkeypatch.setattr(checksum, "copy", fail)
    with pytest.raises(MemoryError):
        block_copy._run(checksum.copy, shares, table)
    after = slots.copy()
    monkeypatch.undo()
    assert np.array_equal(after, slots), "a thread still copied"
    assert not slots[9].any()
    block_copy.copy(table)
    assert np.array_equal(slots, blocks)


@pytest.mark.parametrize("change", ["key", "gen", "bytes", "slot", "slab not offered", "slab absent", "slot absent"])
def test_a_wrong_location_is_a_miss(arena: Arena, client: Arena, change: str) -> None:
    assert put(arena, 0, 2)
    where, key, size = locations([0], [2]), key_of(2), 64 << 10
    if change == "key":
        key = key_of(3)
    elif change == "gen":
        where["gen"] += 1
    elif change == "bytes":
        where["bytes"] = size = size - 1
    elif change == "slot":
        where["slot"] = 1
    else:
        where["slot"] = {"slot absent": 1 << 31}.get(change, 0)
        where["slab"] = {"slab not offered": 2, "slab absent": (1 << 32) - 1}.get(change, 0)
    blocks = np.zeros((1, size), np.uint8)
    assert not client.read(where, key, blocks).any()
    assert not client.read_headers(where, key)[2].any()
    if change.endswith(("offered", "absent")):
        where["gen"] += 1
        assert not client.write(where, key, blocks).any()
        assert client.sweep(where).tolist() == [1]
        with pytest.raises(ValueError, match="no slot"):
            client.views(where[:1])
    assert get(arena, 0, 2)


@pytest.mark.parametrize("word", range(7))
@pytest.mark.parametrize("value", [0, -1, 1 << 62, 12345])
def test_a_block_with_an_altered_header_is_a_miss(arena: Arena, word: int, value: int) -> None:
    """Nothing raises; a block that is still offered is the right one."""
    assert put(arena, 0, 2)
    words_of(arena, 0)[word] = value
    out = np.zeros((1, 64 << 10), np.uint8)
    ok = arena.read(locations([0], [2]), key_of(2), out, verify=True)
    assert ok[0] == (word in (header.POSITION, header.STAMP))
    found = arena.inventory()
    assert len(found.ready) + len(found.writing) <= 1
    assert arena.sweep(locations([0], [2])).tolist() in ([1], [2])


def test_a_block_with_altered_bytes_is_a_miss(arena: Arena) -> None:
    assert put(arena, 0, 2) and put(arena, 1, 3)
    arena.views(locations([0], [2]))[0][40_000] ^= 1
    keys, out = np.concatenate([key_of(2), key_of(3)]), np.zeros((2, 64 << 10), np.uint8)
    assert arena.read(locations([0, 1], [2, 3]), keys, out, verify=True).tolist() == [False, True]
    assert arena.corrupt == 1


@pytest.mark.usefixtures("switching")
def test_threads_that_find_altered_blocks_count_each(arena: Arena) -> None:
    readers, times = 4, 250
    assert put(arena, 0, 2)
    arena.views(locations([0], [2]))[0][5] ^= 1

    def find(thread: int) -> None:
        out, key, wrong = np.zeros((1, 64 << 10), np.uint8), key_of(3), np.zeros(1, np.uint64)
        for gen in range(2, 2 + times):
            assert not arena.read(locations([0], [2]), key_of(2), out, verify=True).any()
            assert not arena.write(locations([1 + thread], [gen]), key, block_of(key), expected=wrong).any()

    with ThreadPoolExecutor(readers) as threads:
        list(threads.map(find, range(readers)))
    assert arena.corrupt == 2 * readers * times


def test_block_overwritten_during_the_copy(arena: Arena, client: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    assert put(arena, 0, 2) and put(arena, 1, 3)
    original = block_copy.copy

    def copy(table: block_copy.Copies) -> None:
        original(table[:1])
        assert put(arena, 1, 4)
        original(table[1:])

    monkeypatch.setattr(block_copy, "copy", copy)
    keys, out = np.concatenate([key_of(2), key_of(3)]), np.zeros((2, 64 << 10), np.uint8)
    assert client.read(locations([0, 1], [2, 3]), keys, out).tolist() == [True, False]


def test_a_block_is_unreadable_while_it_is_written(
    arena: Arena, client: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a slot is filled, neither its old block nor its new one is read."""
    assert put(arena, 0, 2)
    original, seen = block_copy.copy_summed, []

    def write(table: block_copy.Copies) -> list[int]:
        sums = original(table)
        seen.append((get(client, 0, 2), get(client, 0, 3)))
        return sums

    monkeypatch.setattr(block_copy, "copy_summed", write)
    assert put(arena, 0, 3)
    assert seen == [(False, False)] and get(client, 0, 3)


def test_grants_of_the_past_are_refused(arena: Arena, client: Arena) -> None:
    assert put(client, 0, 5)
    assert not put(client, 0, 4) and not put(client, 0, 5), "given away meanwhile"
    assert arena.raise_epoch(w.EPOCH + 1) and not arena.raise_epoch(w.EPOCH) and arena.raise_epoch(w.EPOCH + 1)
    assert client.epoch == w.EPOCH + 1
    assert not put(client, 0, 6) and not put(client, 1, 6), "of a past epoch"
    assert not put(client, 0, 7, slab=1), "nor does it format"
    assert get(client, 0, 5), "blocks outlive the epoch they were written in"


def test_failed_copy_is_never_ready(arena: Arena, client: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    assert put(client, 0, 2)

    def fail(table: block_copy.Copies) -> list[int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(block_copy, "copy_summed", fail)
        put(client, 0, 3)
    assert not get(arena, 0, 2) and not get(arena, 0, 3)
    assert len(arena.inventory().writing) == len(arena.inventory().ready) == 0
    assert not put(client, 0, 2), "a grant from before"
    assert put(client, 0, 3) and get(arena, 0, 3), "another try"


def test_two_threads_of_one_process_on_one_slot(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's locks do not part them: they share the file."""
    original, inside, go_on = block_copy.copy_summed, threading.Event(), threading.Event()
    first: list[bool] = []

    def write(table: block_copy.Copies) -> list[int]:
        inside.set()
        assert go_on.wait(30)
        return original(table)

    monkeypatch.setattr(block_copy, "copy_summed", write)
    thread = threading.Thread(target=lambda: first.append(put(arena, 3, 2)))
    thread.start()
    assert inside.wait(30)
    monkeypatch.setattr(block_copy, "copy_summed", original)
    assert not put(arena, 3, 3)
    assert arena.sweep(locations([3], [3])).tolist() == [0]
    assert arena.inventory().writing["slot"].tolist() == [3]
    assert not put(arena, 40, 12, size=8 << 10, slab_gen=GEN + 10), "nor is the slab formatted under it"
    assert put(arena, 4, 4) and put(arena, 2, 5), "neighbours are free"
    assert arena.sweep(locations([3], [3])).tolist() == [0], "and leave the lock alone"
    go_on.set()
    thread.join()
    assert first == [True] and get(arena, 3, 2)


def test_close_waits_for_a_copy_under_way(arena: Arena, client: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    original = block_copy.copy_summed

    def write(table: block_copy.Copies) -> list[int]:
        client.close()
        assert arena.sweep(locations([0], [2])).tolist() == [0], "still locked"
        return original(table)

    with monkeypatch.context() as patch:
        patch.setattr(block_copy, "copy_summed", write)
        assert put(client, 0, 2)
    assert get(arena, 0, 2) and arena.sweep(locations([0], [2])).tolist() == [2]
    assert not get(client, 0, 2) and not put(client, 1, 3) and client.offered == 0


def test_one_slot_twice_in_a_batch(arena: Arena) -> None:
    keys = np.concatenate([key_of(2), key_of(3)])
    rows = np.concatenate([block_of(key_of(2)), block_of(key_of(3))])
    assert arena.write(locations([0, 0], [2, 3]), keys, rows).tolist() == [True, False]
    assert get(arena, 0, 2)


def test_a_sweep_tells_written_from_freed_slots(arena: Arena) -> None:
    assert put(arena, 0, 2) and put(arena, 1, 3)
    where = locations([0, 1, 2], [2, 9, 4])  # finished; evicted and granted again but not begun; never begun
    assert arena.sweep(where).tolist() == [2, 1, 1]
    assert get(arena, 0, 2) and not get(arena, 1, 3)
    assert not put(arena, 1, 9) and not put(arena, 2, 4), "late writers"
    assert put(arena, 1, 10) and put(arena, 2, 11)
    assert arena.sweep(locations([1], [9])).tolist() == [2] and get(arena, 1, 10), "swept twice: what came since stays"


def test_blocks_cleared_during_their_write_are_swept(arena: Arena, client: Arena) -> None:
    assert put(client, 0, 2) and put(client, 1, 4)
    arena.raise_floor(GEN + 3)
    assert arena.sweep(locations([0, 1], [2, 4])).tolist() == [1, 2]
    assert not get(client, 0, 2) and get(client, 1, 4)


def test_a_reformat_forgets_the_blocks_of_the_slab(arena: Arena, client: Arena) -> None:
    small, big = {"size": 8 << 10, "slab_gen": GEN + 10}, {"size": 1 << 20, "slab_gen": GEN + 400}
    assert all(put(client, slot, 2 + slot) for slot in range(SLAB // (64 << 10)))
    assert all(put(client, slot, 100 + slot, **small) for slot in (0, 1, 9, 511))
    assert not any(get(arena, slot, 2 + slot) for slot in range(SLAB // (64 << 10)))
    assert not put(client, 2, 300), "of the format before"
    assert put(client, 3, 401, **big)
    assert not any(get(arena, slot, 100 + slot, **small) for slot in (0, 1, 9, 511))
    assert put(client, 511, 900, size=8 << 10, slab_gen=GEN + 899), "and back: no header of the first time is left"
    assert arena.inventory().ready["slot"].tolist() == [511]
    assert not put(client, 1, 901, size=8 << 10, slab_gen=GEN + 10), "of an older format of the same stride"
    assert not put(client, 1, 901, slab_gen=GEN + 899), "a place of another stride than its slab's"


def test_sweep_of_a_slab_that_is_not_formatted_yet(arena: Arena) -> None:
    assert put(arena, 0, 2)
    assert arena.sweep(locations([0], [20], size=8 << 10, slab_gen=GEN + 10)).tolist() == [1]
    assert get(arena, 0, 2), "headers of the old format are not touched"


def test_reads_stamp_headers(arena: Arena, client: Arena) -> None:
    assert put(arena, 0, 2)
    client._clock_base -= 100  # as if read 100 s later
    assert get(client, 0, 2) and not get(client, 0, 3)
    assert 100 <= arena.inventory().stamps[0] < 200
    client._clock_base -= 100
    client.read_headers(locations([0], [2]), key_of(2))  # asked for before another node reads it
    assert 200 <= arena.inventory().stamps[0] < 300


def test_wrong_arrays_are_refused(arena: Arena) -> None:
    where, key, block = locations([0], [2]), key_of(2), block_of(key_of(2))
    frozen = block.copy()
    frozen.flags.writeable = False
    wrong: list[Any] = [
        block[:0],
        block[:, :-1],
        rows_of([block, block]),
        block.view(np.int8),
        np.zeros((1, 128 << 10), np.uint8)[:, ::2],
    ]
    for given in wrong:
        with pytest.raises(ValueError, match="row"):
            arena.write(where, key, given)
        with pytest.raises(ValueError, match="row"):
            arena.read(where, key, given)
    with pytest.raises(ValueError, match="read-only"):
        arena.read(where, key, frozen)
    with pytest.raises(ValueError, match="keys"):
        arena.write(where, key[:, :8], block)
    with pytest.raises(ValueError, match="locations"):
        arena.write(np.zeros(1, np.int64), key, block)
    assert arena.write(where, key, frozen).all()
    assert len(arena.read(np.zeros(0, LOCATION), np.zeros((0, 16), np.uint8), block[:0])) == 0


def test_the_files_mode_and_layout(arena: Arena, path: str) -> None:
    info = os.stat(path)
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_blocks * 512 < 2.1 * SLAB + (1 << 20), "what is not offered takes no memory"
    with pytest.raises(FileExistsError):
        Arena.create(path, PRINT, SLAB, 3)
    assert arena.offer_next() and not arena.offer_next()
    assert os.stat(path).st_blocks * 512 >= 3 * SLAB
    with pytest.raises(ValueError, match="slabs of"):
        Arena.create(path + "-odd", PRINT, 5000, 3)


def test_attach_to_something_else(arena: Arena, path: str) -> None:
    for where, nonce in ((path, b"n" * 16), (path + "-absent", arena.nonce)):
        with pytest.raises(ArenaMismatch, match=r"mount the Ray pod's /dev/shm"):
            Arena.attach(where, nonce)


@pytest.mark.parametrize("flaw", ["fingerprint", "slabs", "slab_bytes", "truncated", "empty", "magic", "version"])
def test_a_file_that_does_not_match_is_unlinked_and_never_changed(path: str, flaw: str) -> None:
    arena = Arena.create(path, PRINT, SLAB, 1)
    arena.offer_next()
    assert put(arena, 0, 2, slab_gen=GEN + 1)
    client = Arena.attach(path, arena.nonce)
    arena.close()
    size = os.stat(path).st_size
    if flaw in ("truncated", "empty"):
        client.close()
        os.truncate(path, 0 if flaw == "empty" else size - 4096)
    elif flaw in ("magic", "version"):
        client._memory[0][{"magic": header.MAGIC, "version": header.VERSION}[flaw]] += 1
    file = os.open(path, os.O_RDONLY)
    before = os.fstat(file).st_size, os.pread(file, 1 << 20, 0)
    asked = (
        b"another print 16" if flaw == "fingerprint" else PRINT,
        SLAB * 2 if flaw == "slab_bytes" else SLAB,
        2 if flaw == "slabs" else 1,
    )
    assert Arena.adopt(path, *asked) is None
    assert not os.path.exists(path)
    assert (os.fstat(file).st_size, os.pread(file, 1 << 20, 0)) == before
    os.close(file)
    if flaw in ("fingerprint", "slabs", "slab_bytes"):
        assert get(client, 0, 2, slab_gen=GEN + 1), "who has it mapped reads on"
    client.close()


def test_adopt_leaves_files_of_others_alone(path: str, tmp_path: Path) -> None:
    assert Arena.adopt(path, PRINT, SLAB, 1) is None
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    os.symlink(target, path)
    try:
        assert Arena.adopt(path, PRINT, SLAB, 1) is None
        assert target.read_bytes() == b"precious" and os.path.islink(path)
    finally:
        os.unlink(path)


@pytest.fixture
def pool() -> Iterator[str]:
    pool = f"test{os.getpid()}"
    yield pool
    for path in Path("/dev/shm").glob(f"raykv-{pool}-*"):
        path.unlink()


def test_what_is_called_like_an_arena_and_is_no_file_is_left_alone(pool: str) -> None:
    """Anybody may write to /dev/shm."""
    pipe, folder = (f"{files.SHM}/raykv-{pool}-{os.getuid()}-{index}" for index in (0, 1))
    os.mkfifo(pipe)
    os.mkdir(folder)
    try:
        assert set(files.arenas_of(pool)) == {pipe, folder}
        arena = open_own(pool, PRINT, SLAB, 2, lambda _: None)
        assert arena.path.endswith("-2")
        arena.close()
        files.remove_left_behind(pool)
        assert os.path.isdir(folder) and not os.path.exists(arena.path)
    finally:
        os.rmdir(folder)


def test_memory_is_lost_whose_owner_is_dead_and_whose_file_was_removed(arena: Arena, client: Arena) -> None:
    assert arena.has_name and arena.door == arena.path
    os.unlink(arena.path)
    assert not arena.has_name and not client.lost
    late = Arena.attach(arena.door, arena.nonce)
    assert put(client, 1, 2) and get(late, 1, 2)
    arena.close(unlink=True)
    assert client.lost and late.lost and get(late, 1, 2)
    late.close()
    assert not late.lost and not get(late, 1, 2)


def test_a_descriptor_that_is_no_arena_is_refused(arena: Arena) -> None:
    read, write = os.pipe()
    for fd in (read, write):
        with pytest.raises(ArenaMismatch, match="RemoveIPC=no"):
            Arena.attach(f"/proc/{os.getpid()}/fd/{fd}", arena.nonce)
        os.close(fd)


def test_open_own(pool: str) -> None:
    asked: list[int] = []
    first = open_own(pool, PRINT, SLAB, 2, asked.append)
    second = open_own(pool, PRINT, SLAB, 2, asked.append)
    assert [os.path.basename(arena.path) for arena in (first, second)] == [
        f"raykv-{pool}-{os.getuid()}-{index}" for index in (0, 1)
    ]
    assert len(asked) == 2 and min(asked) > 2 * SLAB
    first.close()
    again = open_own(pool, PRINT, SLAB, 2, asked.append)
    assert (again.path, again.nonce, again.incarnation) == (first.path, first.nonce, 2)
    assert len(asked) == 2, "what is already there needs no room"
    again.close()
    other = open_own(pool, PRINT, SLAB, 1, asked.append)
    assert other.path == first.path and other.nonce != first.nonce

    def refuse(size: int) -> None:
        raise CapacityError("no room")

    with pytest.raises(CapacityError):
        open_own(pool, PRINT, SLAB, 2, refuse)
    for arena in (second, other):
        arena.close(unlink=True)
    assert not list(Path("/dev/shm").glob(f"raykv-{pool}-*"))


FULL = """
import os, sys
from raykv.arena.arena import Arena
from raykv.errors import CapacityError
arena = Arena.create(sys.argv[1] + "/arena", b"f" * 16, 4 << 20, 4)
assert arena.offer_next() and arena.offer_next()
try:
    arena.offer_next()
except CapacityError as error:
    assert "slab 3 of 4" in str(error), error
else:
    raise SystemExit("offered what is not there")
free = os.statvfs(sys.argv[1])
assert arena.offered == 2 and free.f_bavail * free.f_frsize > 1 << 20, "what it got of the third went back"

import numpy as np
from raykv.protocol.location import COUNTER_BITS, LOCATION
try:
    with open(sys.argv[1] + "/others", "wb", buffering=0) as others:
        while others.write(bytes(4096)):
            pass
except OSError:
    pass
place = np.zeros(2, LOCATION)
place["slab"], place["bytes"], place["slab_gen"], place["gen"] = [0, 1], 4096, 1 << COUNTER_BITS, 2 << COUNTER_BITS
keys, blocks = np.ones((2, 16), np.uint8), np.ones((2, 4096), np.uint8)
assert arena.write(place, keys, blocks).all(), "no page that a client touches is yet to be found"
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts a small tmpfs")
def test_full_file_system(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=11m none {tmp_path} && exec {sys.executable} -c '{FULL}' {tmp_path}"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(["unshare", "-m", "sh", "-c", mount], env=env, capture_output=True, text=True, timeout=60)
    if "ermission" in done.stderr or os.strerror(errno.EPERM) in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr


def test_sweep_of_a_slab_of_another_format(arena: Arena) -> None:
    old = locations([5], [20])
    assert put(arena, 5, 21, size=8 << 10, slab_gen=GEN + 10)
    assert arena.sweep(old).tolist() == [1], "the block there is none of this grant's"
    assert get(arena, 5, 21, size=8 << 10, slab_gen=GEN + 10)


def test_neighbouring_slots_are_one_view(arena: Arena) -> None:
    slots = [3, 4, 5, 9, 1, 2]
    assert all(put(arena, slot, 2 + slot) for slot in slots)
    views = arena.views(locations(slots, [2 + slot for slot in slots]))
    assert [len(view) // (64 << 10) for view in views] == [3, 1, 2]
    blocks = b"".join(block_of(key_of(2 + slot)).tobytes() for slot in slots)
    assert b"".join(view.tobytes() for view in views) == blocks
    odd = locations([0, 1], [40, 41], size=10_000, slab=1, slab_gen=GEN + 30)
    assert len(arena.views(odd)) == 2, "slots are padded: their bytes do not touch"
    assert arena.views(locations([], [])) == []


def test_a_reader_that_is_wrong_about_the_length_is_told_from_an_altered_block(arena: Arena) -> None:
    size = 2 * ALIGN
    where, keys = locations([0, 1], [2, 3], size=size), np.concatenate([key_of(1), key_of(2)])
    assert arena.write(where, keys, np.ones((2, size), np.uint8)).all()
    for believed in (size - 1, size + 1, ALIGN, arena.slab_bytes):
        wrong = where.copy()
        wrong["bytes"] = believed
        assert not arena.read(wrong[:1], keys[:1], np.zeros((1, believed), np.uint8)).any()
        assert arena.holds_other_length(wrong, keys).all()
    assert not arena.holds_other_length(where, keys).any()
    newer, nowhere = where.copy(), where.copy()
    newer["gen"] += 1
    nowhere["slab"] = arena.slabs
    for location, key in ((newer, keys), (nowhere, keys), (wrong, keys[::-1].copy())):
        assert not arena.holds_other_length(location, key).any()
