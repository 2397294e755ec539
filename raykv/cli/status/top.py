"""`raykv top`: `raykv status`, live."""

import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from raykv.cli.status.last_minute import LOOKS, LastMinute, Rates, sparkline
from raykv.cli.status.status import hit_curve, hit_rate, node_rows, table, with_reasons, wrapped
from raykv.client.session import settings_of
from raykv.errors import PoolNotFound, RayKVError
from raykv.ui.overview import Overview, look

LOOK_S = 1.0  # seconds between two looks
STALE_S = 3.0  # seconds without news, until the terminal shows a warning
GIVE_UP_S = 20.0  # seconds without news, until the command ends; Ray would take 60 s and not restore the terminal
STOP_S = 2.0  # seconds for a look in progress to end
SORTS = ("node", "state", "memory", "pulled")
DROPPED = ("roles", "restarts", "up", "host")  # columns to leave out, in this order, in a narrow terminal
LABEL = 21  # characters before a sparkline


class Watch:
    """A thread that looks at a pool once a second, so that a key press never waits for an actor that hangs."""

    def __init__(self, pool: str) -> None:
        self.minute = LastMinute()
        self._pool = pool
        self._overview = look(pool)
        self._seen = time.monotonic()
        self._error: Exception | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="raykv-top", daemon=True)

    def __enter__(self) -> "Watch":
        self.minute.add(self._overview, self._seen)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(STOP_S)

    def latest(self) -> tuple[Overview, str]:
        """Return (latest look, warning if the look is older than STALE_S, else "").

        Raises RayKVError if the pool has ended, or if the latest look is older than GIVE_UP_S.
        """
        if isinstance(self._error, RayKVError):
            raise self._error
        age = time.monotonic() - self._seen
        why = f": {self._error}" if self._error else ", something does not answer"
        if age > GIVE_UP_S:
            raise RayKVError(
                f"nothing of pool {self._pool!r} was seen for {age:.0f} s{why}. See `ray status`: a cluster that ended "
                f"is started by `ray start`, the pool then by `raykv start --name {self._pool}`; else try again"
            )
        return self._overview, f"this was {age:.0f} s ago{why}" if age > STALE_S else ""

    def _look_on(self) -> None:
        while not self._ends.wait(LOOK_S) and not isinstance(self._error, RayKVError):
            try:
                self._look_once()
                self._error = None
            except Exception as error:  # an error of Ray while a cluster changes; it is shown until a look succeeds
                self._error = error

    def _look_once(self) -> None:
        try:
            settings_of(self._pool)
        except PoolNotFound as error:
            raise PoolNotFound(
                f"pool {self._pool!r} was stopped while it was watched: "
                f"start it with `raykv start --name {self._pool}`, or watch another with --name"
            ) from error
        overview, now = look(self._pool), time.monotonic()
        self.minute.add(overview, now)
        self._overview, self._seen = overview, now


def run(pool: str) -> None:
    """Show a pool until the user presses q or Ctrl-C.

    Raises ClickException without a terminal, PoolNotFound when the pool has ended, and RayKVError after GIVE_UP_S
    without news.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.ClickException("raykv top needs a terminal; `raykv status` writes into pipes and files")
    console = Console()
    sort = 0
    try:
        with Watch(pool) as watch, _keys_at_once(), Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                overview, trouble = watch.latest()
                found = screen(overview, watch.minute, SORTS[sort], trouble, *console.size)
                live.update(Text.from_ansi("\n".join(found), no_wrap=True, overflow="crop"), refresh=True)
                key = _key(LOOK_S / 2)
                if key == "q":
                    return
                sort = (sort + (key == "s")) % len(SORTS)
    except KeyboardInterrupt:
        return


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Make the terminal deliver each key press at once, without echo."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSAFLUSH, before)


def _key(seconds: float) -> str:
    """Return the key that a user presses within `seconds`; "" for no key, "q" if the terminal is gone."""
    if not select.select([sys.stdin], [], [], seconds)[0]:
        return ""
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q"


# ---------------------------------------------------------------------- what is shown


def screen(overview: Overview, minute: LastMinute, sort: str, trouble: str, width: int, height: int) -> list[str]:
    """Return at most `height` lines of `width` characters. trouble: the warning of `Watch.latest`."""
    head = [*wrapped(_title(overview), width), *wrapped(trouble, width), *_rates(minute, width)]
    if counts := overview.counts:
        head += [line for text in (hit_rate(counts), *hit_curve(counts)) for line in wrapped(text, width)]
    foot = wrapped(f"q quits, s sorts by {SORTS[(SORTS.index(sort) + 1) % len(SORTS)]} (now by {sort})", width)
    room = height - len(head) - len(foot) - 2
    return [*[*head, "", *_nodes(overview, minute, sort, width, room), ""][: height - len(foot)], *foot]


def _title(overview: Overview) -> str:
    counts, (alive, *wrong) = overview.counts, overview.summary
    what = f"{counts['keys']} blocks, {counts['clients']} clients" if counts else "no counts"
    return ", ".join([f"pool {overview.pool}: {alive}", what, *wrong])


def _rates(minute: LastMinute, width: int) -> Iterator[str]:
    bars = max(1, min(LOOKS, width - LABEL))
    for what, rates, top in (
        ("found", minute.hit_rate, 1.0),
        ("pulled", minute.pulled, 0.0),
        ("evicted", minute.evicted, 0.0),
    ):
        yield f"{what:<8}{_latest(what, rates):>11}  {sparkline(rates, bars, top)}".rstrip()


def _latest(what: str, rates: Rates) -> str:
    if not rates or rates[-1] is None:
        return "-"
    return f"{rates[-1]:.1%}" if what == "found" else f"{rates[-1]:.0f}/s"


def _nodes(overview: Overview, minute: LastMinute, sort: str, width: int, room: int) -> list[str]:
    """Return the table of nodes, then the reasons why nodes are not alive, cut to `room` lines."""
    order = sorted(overview.members, key=lambda node_id: _rank(overview, minute, sort, node_id))  # stable sort
    cells = node_rows(overview)
    rows = {node_id: {**cells[node_id], "pulled/s": _per_second(minute, node_id)} for node_id in order}
    shown = with_reasons(overview, rows, _fitting(list(rows.values()), width), width)
    if len(shown) <= room:
        return shown
    return [*shown[: max(1, room - 1)], "... more in a taller terminal"]


def _fitting(rows: list[dict[str, str]], width: int) -> list[str]:
    """Like `table`, but without the columns of DROPPED that do not fit."""
    for count in range(len(DROPPED) + 1):
        kept = [{name: row[name] for name in row if name not in DROPPED[:count]} for row in rows]
        lines = table(kept)
        if max(map(len, lines)) <= width:
            break
    return lines


def _rank(overview: Overview, minute: LastMinute, sort: str, node_id: str) -> Any:
    """Return the node's sort key. Nodes with smaller keys come first."""
    if sort == "state":
        return overview.members[node_id].state == "alive"
    if sort == "memory":
        limit = overview.limit(node_id)
        return 1.0 if limit is None else -overview.counts["nodes"][node_id]["bytes_used"] / max(1, limit)
    return -minute.pulled_by.get(node_id, -1.0) if sort == "pulled" else 0


def _per_second(minute: LastMinute, node_id: str) -> str:
    return f"{minute.pulled_by[node_id]:.0f}" if node_id in minute.pulled_by else "-"
