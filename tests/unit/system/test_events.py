"""The form of a line in an actor's log, and which processes' logging raykv changes."""

import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers.project.pages import ROOT

from raykv.system import events

LOG = logging.getLogger("raykv.test_events")


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """The log output of this process, in the form of an actor's log."""
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(events.Logfmt(role="store", pool="p"))
    events.log.addHandler(handler)
    before = events.log.level
    events.log.setLevel(logging.INFO)
    yield output
    events.log.removeHandler(handler)
    events.log.setLevel(before)


def test_an_event_is_one_line_of_pairs(written: io.StringIO) -> None:
    events.tell("resize", bytes=5, why='no "room":\nnone', url="file:///a=b", empty="")
    (line,) = written.getvalue().splitlines()
    stamp, line = line.split(" ", 1)
    assert stamp.startswith("time=2") and stamp.endswith("Z")
    assert line == (
        'level=info role=store pool=p event=resize bytes=5 why="no \\"room\\":\\nnone" url="file:///a=b" empty=""'
    )


def test_other_records_are_lines_with_a_message_and_their_traceback(written: io.StringIO) -> None:
    try:
        raise OSError("gone")
    except OSError as error:
        LOG.error("a call failed: %r", error, exc_info=error)
    first, *traceback = written.getvalue().splitlines()
    assert first.endswith("level=error role=store pool=p msg=\"a call failed: OSError('gone')\"")
    assert traceback[-1] == "OSError: gone"


def test_the_page_names_every_event() -> None:
    sources = [path.read_text() for folder in ("raykv", "actors") for path in (ROOT / folder).rglob("*.py")]
    told = {name for text in sources for name in re.findall(r'\bevents\.tell\(\s*"(\w+)"', text)} | {"start", "restart"}
    page = (ROOT / "docs/deploy.md").read_text()
    table = page[page.index("| `role` |") :]
    named = set(re.findall(r"`(\w+)`", table[: table.index("\n\n")]))
    assert named - {"role", "event", "directory", "store", "supervisor", "ui"} == told


def test_nobody_elses_logging_is_changed() -> None:
    code = (
        "import logging, raykv, raykv.actors.store.node_store, raykv.actors.supervisor.supervisor\n"
        "root, own = logging.getLogger(), logging.getLogger('raykv')\n"
        "print(root.handlers, own.handlers, own.level, own.propagate)\n"
        "from raykv.system import events\n"
        "events.begin(restarted=True, role='store')\n"
        "print(root.handlers, root.level)\n"
        "logging.getLogger('another').info('unheard')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines() == ["[] [] 0 True", "[] 30"]
    assert "role=store event=restart" in ran.stderr and len(ran.stderr.splitlines()) == 1
