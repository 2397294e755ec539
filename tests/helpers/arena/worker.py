"""Arena tests share this: locations, blocks made from keys, and child processes that stop or die at a given step."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from raykv.arena import checksum, header
from raykv.arena.arena import Arena
from raykv.protocol.location import COUNTER_BITS, LOCATION
from raykv.system.file_locks import SlotLocks

EPOCH = 1
GEN = EPOCH << COUNTER_BITS  # generation 0 of epoch 1
SLAB = 4 << 20
PRINT = b"fingerprint 16 B"
STEPS = ["before lock", "locked", "writing", "first tile", "last tile", "copied", "half header", "ready", "unlocked"]

memcpy_type = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)
kept_alive: list[Any] = []
fork = multiprocessing.get_context("fork")


def locations(
    slots: Sequence[int], gens: Sequence[int], *, size: int = 64 << 10, slab: int = 0, slab_gen: int = GEN + 1
) -> NDArray[np.void]:
    """Locations of `slots`. gens: counted from GEN."""
    out = np.zeros(len(slots), LOCATION)
    out["slab"], out["slot"], out["bytes"], out["slab_gen"] = slab, slots, size, slab_gen
    out["gen"] = [GEN + gen for gen in gens]
    return out


def key_of(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (1, 16), np.uint8)


def block_of(key: NDArray[np.uint8], size: int = 64 << 10) -> NDArray[np.uint8]:
    """(1, size) the content of this key's block. No other key's block has it."""
    return np.tile(key, -(-size // 16))[:, :size]


def put(arena: Arena, slot: int, gen: int, **location: int) -> bool:
    where = locations([slot], [gen], **location)
    return bool(arena.write(where, key_of(gen), block_of(key_of(gen), int(where["bytes"][0])))[0])


def get(arena: Arena, slot: int, gen: int, **location: int) -> bool:
    """Whether the block of key_of(gen) is there. AssertionError if a read gave other bytes for it."""
    where = locations([slot], [gen], **location)
    out = np.zeros((1, int(where["bytes"][0])), np.uint8)
    ok = bool(arena.read(where, key_of(gen), out)[0])
    assert not ok or np.array_equal(out, block_of(key_of(gen), out.shape[1])), "a read gave another block's bytes"
    return ok


def stop_here() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die_here() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_step(step: str, act: Callable[[], None]) -> None:
    """In a child: call `act` each time that a write gets to `step`."""

    def wrap(owner: Any, name: str, before: bool, after: bool) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before:
                act()
            result = original(*args, **kwargs)
            if after:
                act()
            return result

        setattr(owner, name, wrapped)

    if step in ("first tile", "last tile"):
        checksum.TILE = 16 << 10
        checksum._in_stripes = lambda table: False  # copies by memcpy, tile by tile: so a copy can be stopped here
        calls = iter(range(1 << 30))
        wanted = 0 if step == "first tile" else 3

        @memcpy_type  # type: ignore[untyped-decorator]
        def memcpy(target: int, source: int, length: int) -> int:
            ctypes.memmove(target, source, length)
            if next(calls) == wanted:
                act()
            return target

        kept_alive.append(memcpy)
        checksum._FUNCTIONS[checksum._MEMCPY] = ctypes.cast(memcpy, ctypes.c_void_p).value or 0
    elif step == "half header":

        def finish(words: Any, at: Any, spots: Any, names: Any, *rest: Any) -> None:
            words[at[0] + header.KEY] = names[0, 0]
            act()

        header.finish = finish  # type: ignore[assignment]
    else:
        owner, name = {
            "before lock": (SlotLocks, "_take"),
            "locked": (SlotLocks, "_take"),
            "formatting": (header, "reformat"),
            "formatted": (header, "reformat"),
            "writing": (header, "begin"),
            "copied": (header, "finish"),
            "ready": (header, "finish"),
            "unlocked": (SlotLocks, "_drop"),
        }[step]
        before = step in ("before lock", "formatting", "copied")
        wrap(owner, name, before=before, after=not before)


class Child:
    """A forked process that attaches the arena, runs `function(arena)`, and sends the result."""

    all: ClassVar[list["Child"]] = []

    def __init__(self, arena: Arena, function: Callable[[Arena], object]) -> None:
        self._answer, answer = fork.Pipe(duplex=False)
        path, nonce = arena.path, arena.nonce

        def run() -> None:
            answer.send(function(Arena.attach(path, nonce)))

        self.process = fork.Process(target=run, daemon=True)
        self.process.start()
        answer.close()
        assert self.process.pid is not None
        self.pid = self.process.pid
        Child.all.append(self)

    def wait_stopped(self) -> None:
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def result(self) -> Any:
        """What the function returned; EOFError if the child died first."""
        try:
            return self._answer.recv() if self._answer.poll(60) else None
        finally:
            self.end()

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self._answer.close()
