"""Seconds of calls, and figures of rounds."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@contextmanager
def timed(owner: Any, name: str, spent: list[float]) -> Iterator[None]:
    """Time every call of an object's method in a `with` block. spent: receives the seconds of each call."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - begin)

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)


def gbps(size: int, seconds: Iterable[float]) -> float:
    """GB/s (1e9 bytes) if `size` bytes take the median of these seconds."""
    return size / statistics.median(seconds) / 1e9


def columns(rounds: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Return the values of each figure in all rounds, by the figure's name."""
    return {name: [figures[name] for figures in rounds] for name in rounds[0]}
