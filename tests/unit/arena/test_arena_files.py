"""An arena's file has a mode, a layout and an owner. Other files are left alone."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.arena.worker import GEN, PRINT, SLAB, get, put

from raykv.arena import files, header
from raykv.arena.arena import Arena, open_own
from raykv.errors import ArenaMismatch, CapacityError


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
    """Any user can put such a thing into /dev/shm."""
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
