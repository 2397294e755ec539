"""How `make test` and `make full` spread the tests over lanes."""

import re
import subprocess
import sys

import pytest
from helpers.project import durations
from helpers.project.pages import ROOT

FILES = ["tests/unit/project/test_locale.py", "tests/unit/arena/test_xxh3.py"]
LANES = re.compile(r"(?m)^LANES = \.venv/bin/pytest (.*)")
PASSED = re.compile(r"\[(gw\d)\].* PASSED (tests/\S+?)::")


@pytest.mark.full
def test_a_file_stays_in_one_lane() -> None:
    """Otherwise a module's fixtures would be made twice at the same time."""
    (options,) = LANES.findall((ROOT / "Makefile").read_text(encoding="utf-8"))
    lanes = [sys.executable, "-m", "pytest", "-v", *options.split(), *FILES]
    done = subprocess.run(lanes, cwd=ROOT, capture_output=True, text=True)
    passed = PASSED.findall(done.stdout)
    assert len(passed) > 2 * len(FILES), done.stdout
    assert len(set(passed)) == len(FILES), "(lane, file)"


def test_every_file_is_in_one_of_the_parts() -> None:
    files = [*durations.read(), "tests/unit/test_a_new_file.py"]
    parts = [durations.part(files, which, 4) for which in range(1, 5)]
    assert sorted(file for part in parts for file in part) == sorted(files)
    seconds = [sum(durations.read().get(file, 0.0) for file in part) for part in parts]
    assert max(seconds) < 1.1 * min(seconds), "they take about as long"
