"""`tests/durations`: the seconds of each file of tests in a full run, a line each, the slowest first."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[2] / "durations"


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def read() -> dict[str, float]:
    lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    return {file: float(seconds) for seconds, file in map(str.split, lines)}


def part(files: Iterable[str], which: int, parts: int) -> set[str]:
    """The files of part `which`, from 1 to `parts`. All parts take about the same time."""
    seconds = read()
    loads = [0.0] * parts
    found = set()
    for file in sorted(set(files), key=lambda file: (-seconds.get(file, 0.0), file)):
        lightest = loads.index(min(loads))
        loads[lightest] += seconds.get(file, 0.0) + 1.0  # so that unknown files spread too
        if lightest == which - 1:
            found.add(file)
    return found


class Durations:
    """A plugin that writes the times of a run. Files that the run left out keep their lines."""

    def __init__(self, path: Path) -> None:
        self._path, self._seconds = path, defaultdict[str, float](float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        seconds = {**read(), **self._seconds}
        slowest = sorted(seconds, key=lambda file: -seconds[file])
        self._path.write_text("".join(f"{seconds[file]:7.1f} {file}\n" for file in slowest), encoding="utf-8")
