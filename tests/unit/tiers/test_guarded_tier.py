"""An external tier as a node store has it: whatever the tier does, a wrong byte is noticed and nobody waits long."""

import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.pools import eventually, payload
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from raykv.arena.arena import Arena
from raykv.arena.checksum import judge
from raykv.protocol.location import CONTENT_BYTES, LOCATION
from raykv.protocol.transfers import ALTERED, PULLED
from raykv.tiers import MARKER, Block, Tier, guarded, open_tier, parse
from raykv.tiers.base import path_of
from raykv.tiers.guarded import GuardedTier

SIZE = 64 << 10
OURS, OTHERS = b"fingerprint-ours", b"fingerprint-else"
SEED, NEXT = b"the seed", b"cleared."
DEADLINE_S = 0.3  # of every call, where `hasty`
Keys = NDArray[np.uint8]


class Moody:
    """Blocks in a dict, and what a tier of somebody else's might do."""

    def __init__(self) -> None:
        self.shared = True
        self.blocks: dict[bytes, tuple[bytes, bytes]] = {}
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.open = threading.Event()  # calls wait for it
        self.open.set()
        self.answer: Callable[[list[Any]], Any] = lambda answers: answers
        self.refuses: Exception | None = None  # to be written
        self.before_read: Callable[[], object] = lambda: None
        self.after_read: Callable[[], object] = lambda: None
        self.buffers: list[int] = []

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        assert self.open.wait(30)
        if self.error:
            raise self.error

    def _write(self, call: str) -> None:
        self._enter(call)
        if self.refuses:
            raise self.refuses

    def put_many(self, blocks: Sequence[Block]) -> list[bool]:
        self._write("put")
        self.blocks.update({key: (head, bytes(body)) for key, head, body in blocks})
        return self.answer([True] * len(blocks))  # type: ignore[no-any-return]

    def get_many(self, keys: Sequence[bytes], out: Sequence[memoryview]) -> list[bytes | None]:
        self.buffers += [np.frombuffer(body, np.uint8).__array_interface__["data"][0] for body in out if len(body)]
        self._enter("get")
        self.before_read()
        heads: list[bytes | None] = []
        for key, body in zip(keys, out, strict=True):
            head, found = self.blocks.get(key, (None, b""))
            heads.append(head if len(found) == len(body) else None)
            body[:] = found if len(found) == len(body) else bytes(len(body))
        self.after_read()
        return self.answer(heads)  # type: ignore[no-any-return]

    def delete_many(self, keys: Sequence[bytes]) -> None:
        self._write("delete")
        for key in keys:
            self.blocks.pop(key, None)

    def scan(self) -> Iterator[list[tuple[bytes, int]]]:
        for key, (_, body) in list(self.blocks.items()):
            self._enter("scan")
            yield [(key, len(body))] if key != MARKER else []

    def close(self) -> None: ...


class Timid(Moody):
    """Has room for so many blocks, the marker among them."""

    room = 3

    def put_many(self, blocks: Sequence[Block]) -> list[bool]:
        fits = []
        for block in blocks:
            fits.append(block.key in self.blocks or len(self.blocks) < self.room)
            if fits[-1]:
                super().put_many([block])
        return fits


@pytest.fixture
def opened() -> Iterator[Callable[..., GuardedTier]]:
    """Open a file tier in this folder, or this tier."""
    made = []

    def open_it(where: Path | Moody, fingerprint: bytes = OURS, seed: bytes = SEED) -> GuardedTier:
        made.append(GuardedTier((lambda: where) if isinstance(where, Moody) else lambda: folder(where), fingerprint))
        assert made[-1].open(seed)
        return made[-1]

    yield open_it
    for one in made:
        one.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "CALL_S", DEADLINE_S)
    monkeypatch.setattr(guarded, "data_deadline", lambda size: DEADLINE_S)
    monkeypatch.setattr(guarded, "BACK_OFF_S", (0.05,))


def folder(path: Path) -> Tier:
    return open_tier(parse(f"file://{path}?capacity=64MiB"))


def some_keys(count: int, seed: int = 1) -> Keys:
    return np.random.default_rng(seed).integers(1, 256, (count, 16), np.uint8)


def store(tier: GuardedTier, keys: Keys, bodies: NDArray[np.uint8] | None = None, size: int = SIZE) -> list[bool]:
    rows = payload(keys, size) if bodies is None else bodies
    sums = np.array([xxh3_64_intdigest(row) for row in payload(keys, size)], np.uint64)
    stored: list[bool] = tier.store(keys, sums, keys[:, 0].astype(np.uint32), [row.data for row in rows]).tolist()
    return stored


def load(tier: GuardedTier, keys: Keys, size: int = SIZE) -> list[bool]:
    """Which of the blocks are there; what is said to be there is right."""
    found: list[bool] = []
    for piece, rows, sums, positions, there in tier.load(keys, size):
        assert piece.start == len(found)
        right = payload(keys[piece], size)
        for i in np.flatnonzero(there).tolist():
            assert (rows[i] == right[i]).all() and positions[i] == keys[piece.start + i, 0]
            assert sums[i] == xxh3_64_intdigest(right[i])
        found += there.tolist()
    return found


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def file_of(folder: Path, key: bytes) -> Path:
    (path,) = folder.rglob(path_of(key))
    return path


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


@pytest.mark.parametrize("other", ["secret", "version"])
def test_content_of_others_is_refused_and_left_as_it_is(
    tmp_path: Path, opened: Callable[..., GuardedTier], other: str
) -> None:
    tier, keys = opened(tmp_path), some_keys(3)
    assert all(store(tier, keys))
    tier.close()
    marker = file_of(tmp_path, MARKER)
    if other == "version":
        marker.write_bytes(marker.read_bytes().replace(guarded.MAGIC, b"raykv\0t0"))
    before = contents(tmp_path)
    stranger = GuardedTier(lambda: folder(tmp_path), OTHERS if other == "secret" else OURS)
    with pytest.raises(ValueError, match=r"another secret or by another version.*another path"):
        stranger.check()
    assert not stranger.open(SEED) and not stranger.up  # nor is it changed by one that did not look before
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


def test_a_tier_that_is_down_at_first_is_opened_later(
    tmp_path: Path, opened: Callable[..., GuardedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "BACK_OFF_S", (0.05,))
    path, keys = tmp_path / "tier", some_keys(2)
    assert all(store(opened(path), keys))
    moved = path.rename(tmp_path / "moved")
    path.write_bytes(b"not a folder")
    tier = GuardedTier(lambda: folder(path), OURS)
    assert not tier.open(SEED) and tier.shared is None
    assert load(tier, keys) == [] and not any(store(tier, keys)) and list(tier.scan()) == []
    eventually(lambda: tier.probe() is None and tier.faults["probe"] > 1)
    path.unlink()
    moved.rename(path)
    (path / "0" / "lock").unlink()  # else it would take another subfolder than the one above
    assert eventually(lambda: tier.probe() is not None)
    assert tier.shared is False and load(tier, keys) == [True, True]
    tier.close()


def test_cleared_blocks_are_never_read_again(tmp_path: Path, opened: Callable[..., GuardedTier]) -> None:
    folder = tmp_path / "tier"
    tier, keys = opened(folder), some_keys(3)
    assert all(store(tier, keys))
    old = {key.tobytes(): file_of(folder, key.tobytes()).read_bytes() for key in keys}
    tier.clear(NEXT)
    assert load(tier, keys) == [False] * 3
    assert all(store(tier, keys[:2]))
    assert load(tier, keys) == [True, True, False]
    file_of(folder, keys[1].tobytes()).write_bytes(old[keys[1].tobytes()])  # as from a late write
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
        """Takes a block's new bytes before it lets go of the old ones, as files do."""

        def put_many(self, blocks: Sequence[Block]) -> list[bool]:
            fits = [len(self.blocks) < self.room for _ in blocks]
            Moody.put_many(self, [block for block, ok in zip(blocks, fits, strict=True) if ok])
            return fits

    tier, keys = opened(Copying()), some_keys(2)
    assert [store(tier, keys[i : i + 1]) for i in range(2)] == [[True], [True]]
    tier.clear(NEXT)
    assert tier.up and load(tier, keys) == [False, False]
    assert tier.probe() is None


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
    cleared, deleted = call == "clear", (call, failure) == ("delete", "waits")  # late, but it was asked to
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


def test_probes_back_off(opened: Callable[..., GuardedTier], hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "BACK_OFF_S", (0.02, 0.2, 30.0))
    moody = Moody()
    tier = opened(moody)
    moody.error = OSError("no route")
    assert not any(store(tier, some_keys(1)))
    eventually(lambda: tier.probe() is None and tier.faults["probe"] == 2)
    calls = len(moody.calls)
    for _ in range(20):
        assert tier.probe() is None
    assert len(moody.calls) == calls


def test_the_buffer_of_a_late_call_is_not_used_again(opened: Callable[..., GuardedTier], hasty: None) -> None:
    moody, keys = Moody(), some_keys(4)
    tier = opened(moody)
    assert all(store(tier, keys))
    assert load(tier, keys[:2]) == [True, True]
    release, read = threading.Event(), threading.Event()
    moody.before_read = lambda: release.wait(30)
    moody.after_read = lambda: read.set() if release.is_set() else None
    moody.buffers.clear()
    assert load(tier, keys[:2]) == []  # it reads later, into what it was given
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
        eventually(lambda: moody.calls.count("get") == guarded.READERS + 1)  # and the marker
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
    assert moody.calls.count("get") <= guarded.READERS + 3  # those, the one of `open`, and probes


def test_a_full_tier_refuses_blocks_and_stays_up(opened: Callable[..., GuardedTier]) -> None:
    timid, keys = Timid(), some_keys(4)
    tier = opened(timid)
    assert store(tier, keys) == [True, True, False, False]
    assert tier.up and tier.faults["refused"] == 2
    assert load(tier, keys) == [True, True, False, False]
    tier.delete([keys[0].tobytes()])
    assert store(tier, keys[3:]) == [True]


@pytest.mark.parametrize("noticed", [True, False])
def test_a_probe_notices_lost_content(
    opened: Callable[..., GuardedTier], hasty: None, monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    """Whether calls failed meanwhile, or nobody asked while it was away."""
    monkeypatch.setattr(guarded, "CHECK_S", 0.05)
    moody, keys = Moody(), some_keys(2)
    tier = opened(moody)
    assert all(store(tier, keys))
    if noticed:
        moody.error = OSError("killed")
        assert load(tier, keys) == []
    moody.blocks.clear()
    moody.error = None
    assert eventually(lambda: tier.probe() is False)
    assert tier.up and load(tier, keys) == [False, False]
    assert tier.probe() is None
    assert all(store(tier, keys)) and load(tier, keys) == [True, True]


def test_a_probe_notices_a_tier_that_hangs(
    opened: Callable[..., GuardedTier], hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "CHECK_S", 0.05)
    moody = Moody()
    tier = opened(moody)
    moody.open.clear()
    eventually(lambda: tier.probe() is None and not tier.up)
    moody.open.set()
    assert eventually(tier.probe) is True


@pytest.mark.parametrize("when", ["opened", "lost"])
def test_stores_that_share_a_tier_agree_on_its_content(
    opened: Callable[..., GuardedTier], hasty: None, when: str
) -> None:
    """All of them see that nothing is there before any of them says what it is called."""
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
            for wait in waits:  # the second read of `open`
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
