"""Estimates how long ago a tick of the directory was."""

from bisect import bisect_right

SAMPLES_MAX = 4096


class TickClock:
    """Samples of (tick, time). The directory has no clock: it numbers uses of blocks by ticks."""

    def __init__(self) -> None:
        self._ticks: list[int] = []
        self._times: list[float] = []

    def sample(self, tick: int, now: float) -> None:
        """Add a sample. tick: the current tick, never below the last one. now: seconds.

        Beyond SAMPLES_MAX samples, every second sample of the older half is dropped.
        """
        self._ticks.append(tick)
        self._times.append(now)
        if len(self._ticks) > SAMPLES_MAX:
            half = SAMPLES_MAX // 2
            self._ticks[:half], self._times[:half] = self._ticks[:half:2], self._times[:half:2]

    def age(self, tick: int) -> float:
        """Return seconds from that tick to the last sample. A tick before all samples counts as the first sample."""
        if not self._ticks:
            return 0.0
        after = bisect_right(self._ticks, tick)
        return self._times[-1] - self._times[min(after, len(self._times) - 1)]
