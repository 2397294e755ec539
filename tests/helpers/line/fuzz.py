"""Makes valid messages wrong, again and again, from a seed. A failure names the seed that finds it again."""

import mmap
import os
import random
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from helpers.apart import apart
from raykv.system.jit import compile_all

SECONDS = float(os.environ.get("RAYKV_FUZZ_SECONDS", 5))  # for all doors together
SEED = os.environ.get("RAYKV_FUZZ_SEED", "1")
BOUNDARIES = sorted(
    {base + by for bit in (0, 7, 8, 12, 16, 31, 32, 40, 61, 63, 64) for base in (1 << bit,) for by in (-1, 0, 1)}
)
T = TypeVar("T")
M = TypeVar("M", bound=tuple[Any, ...])


class Mutator(random.Random):
    """Makes one message wrong, at random."""

    def number(self) -> int:
        """A number at an edge of some integer type's range, or a small number."""
        return self.choice([0, -1, self.choice(BOUNDARIES), -self.choice(BOUNDARIES), self.randrange(64)])

    def maybe(self, wrong: Callable[[T], T], right: T, share: float = 0.5) -> T:
        return wrong(right) if self.random() < share else right

    def bytes_of(self, data: bytes) -> bytes:
        """The data cut, longer, repeated, with bits flipped, or with an integer at an edge somewhere."""
        changed = bytearray(data)
        kind = self.randrange(7)
        if kind == 0:
            return data[: self.randint(0, len(data))]
        if kind == 1:
            return data + self.randbytes(self.choice([1, 4, 8, 16, 32, 100]))
        if kind == 2:
            return data * self.choice([0, 2, 3])
        if kind == 3:
            return data[self.randint(0, min(32, len(data))) :]
        for _ in range(self.randint(1, 4) if data else 0):
            at = self.randrange(len(data))
            if kind == 4:
                changed[at] ^= 1 << self.randrange(8)
            else:
                width = self.choice([4, 8])
                at -= at % width
                changed[at : at + width] = struct.pack("<Q", self.number() & (1 << 64) - 1)[:width]
        return bytes(changed[: len(data)])

    def records(self, given: NDArray[np.void]) -> NDArray[np.void]:
        """The records with some fields at an edge, swapped, flipped, or copied from another record."""
        changed, names = given.copy(), given.dtype.names or ()
        for _ in range(self.randint(1, 4)):
            i, name, kind = self.randrange(len(given)), self.choice(names), self.randrange(5)
            bits = 8 * given.dtype[name].itemsize
            if kind == 4:  # several large numbers: some sums overflow only with all of them
                for each in self.sample(names, self.randint(2, len(names))):
                    changed[each][i] = (1 << 8 * given.dtype[each].itemsize - self.randrange(2)) - 1
            elif kind == 0:
                changed[name][i] = self.number() & (1 << bits) - 1
            elif kind == 1:
                changed[name][i] ^= given.dtype[name].type(1 << self.randrange(bits))
            elif kind == 2:
                changed[name][i] = int(changed[self.choice(names)][i]) & (1 << bits) - 1
            else:
                changed[i] = given[self.randrange(len(given))]
        return changed

    def message(self, given: M, *texts: str) -> M:
        """A NamedTuple with some fields wrong. texts: wrong values for a str."""
        fields = list(given)
        for i in range(len(fields)):
            if self.random() < 0.3:
                fields[i] = self._field(fields[i], texts)
        return type(given)(*fields)

    def _field(self, value: Any, texts: tuple[str, ...]) -> Any:
        if isinstance(value, bytes):
            return self.bytes_of(value)
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return self.number()
        return self.choice(texts) if isinstance(value, str) and texts else value


Door = Callable[[], AbstractContextManager[Callable[[Mutator], None]]]


def fuzz(door: Door, seconds: float) -> int:
    """Take steps through a door, in a process of its own, for so many seconds. Returns how many steps.

    door: a context manager that yields the function of a step. AssertionError, with the seed and the step's number, if
    a step raises, kills the process or takes a minute.
    """
    for package in ("raykv.arena", "raykv.directory"):
        compile_all(package)  # before the fork: the child has the kernels too
    progress = mmap.mmap(-1, 8)
    try:
        return int(apart(_steps, door, seconds, progress, deadline=seconds + 60.0))
    except AssertionError as error:
        (step,) = struct.unpack("<q", progress[:8])
        error.add_note(f"seed {SEED}, step {step}: RAYKV_FUZZ_SEED={SEED} finds it again")
        raise


def _steps(door: Door, seconds: float, progress: mmap.mmap) -> int:
    step = 0
    with door() as take:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            progress[:8] = struct.pack("<q", step)
            take(Mutator(f"{SEED}/{step}"))
            step += 1
    return step
