"""Seconds of calls, and figures of rounds."""

import time
from collections.abc import Callable, Sequence


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def columns(rounds: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Each figure of all rounds, by its name."""
    return {name: [figures[name] for figures in rounds] for name in rounds[0]}
