"""How `make test` and `make full` spread the tests over their lanes."""

import re
import subprocess
import sys

from helpers.pages import ROOT

FILES = ["tests/unit/test_locale.py", "tests/unit/test_xxh3.py"]
LANES = re.compile(r"(?m)^LANES = \.venv/bin/pytest (.*)")
PASSED = re.compile(r"\[(gw\d)\].* PASSED (tests/\S+?)::")


def test_a_file_stays_in_one_lane() -> None:
    """Fixtures of a module would else be made twice, at the same time."""
    (options,) = LANES.findall((ROOT / "Makefile").read_text(encoding="utf-8"))
    lanes = [sys.executable, "-m", "pytest", "-v", *options.split(), *FILES]
    done = subprocess.run(lanes, cwd=ROOT, capture_output=True, text=True)
    passed = PASSED.findall(done.stdout)
    assert len(passed) > 2 * len(FILES), done.stdout
    assert len(set(passed)) == len(FILES), "(lane, file)"
