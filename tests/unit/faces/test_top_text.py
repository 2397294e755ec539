"""The figures that `raykv top` computes from two looks at a pool."""

from dataclasses import replace
from typing import Any

import pytest

from raykv.cli.status.last_minute import LOOKS, LastMinute, sparkline
from raykv.cli.status.top import SORTS, screen
from raykv.ui.overview import Member, Overview
from raykv.ui.ray_nodes import RayNode, short_ids

IDS = [f"{number:08}" + 48 * "0" for number in range(30)]
COUNTS: dict[str, Any] = {"epoch": 1, "lookups": 0, "hits": 0, "evicted": 0, "keys": 0, "clients": 0}
SOURCES = {"remote_hits": 0, "external_hits": 0, "gpu_hits": 0}
HOST = "a-host-with-a-long-name.example.com"


def member(pulled: int | None = 0, state: str = "alive", why: str = "") -> Member:
    return Member(HOST, "192.0.2.1", ("store",), state, why, 1.0, 0, pulled, {}, "")


def overview(members: dict[str, Member], **counts: int) -> Overview:
    nodes = tuple(RayNode(node_id, HOST, "192.0.2.1", "", False) for node_id in members)
    return Overview("p", short_ids(nodes), {**COUNTS, **SOURCES, "nodes": {}, **counts}, {}, [], members, {})


def test_rates_of_a_second() -> None:
    minute = LastMinute()
    minute.add(overview({"a": member(10), "b": member(5)}, lookups=100, hits=50, evicted=7), 1.0)
    assert not minute.hit_rate
    minute.add(overview({"a": member(16), "b": member(5)}, lookups=110, hits=59, evicted=11), 3.0)
    assert (minute.hit_rate[-1], minute.pulled[-1], minute.evicted[-1]) == (0.9, 3.0, 2.0)
    assert minute.pulled_by == {"a": 3.0, "b": 0.0}


def test_what_is_not_known_is_not_made_up() -> None:
    """Nobody asked, or a store or directory restarted or does not answer."""
    minute = LastMinute()
    first = overview({"a": member(10), "b": member(5)}, lookups=100, hits=50)
    minute.add(first, 1.0)
    minute.add(replace(first, members={"a": member(4), "b": member(None)}), 2.0)
    assert (minute.hit_rate[-1], minute.pulled_by) == (None, {"a": 4.0})
    minute.add(overview({"a": member(None)}, epoch=2, lookups=3, hits=3), 3.0)
    assert (minute.hit_rate[-1], minute.evicted[-1], minute.pulled[-1]) == (None, None, None)
    minute.add(replace(first, counts={}), 4.0)
    assert (minute.hit_rate[-1], minute.evicted[-1]) == (None, None)


def test_sparklines() -> None:
    assert sparkline([0.0, 0.5, 1.0], 3, top=1.0) == "▁▅█"
    assert sparkline([0.0, 0.0], 4) == "  ▁▁" and sparkline([None, 2.0, 4.0], 3) == " ▅█"
    assert sparkline([9.0, 1.0, 1.0], 2) == "██", "the scale is that of what is shown"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 30), (50, 10), (80, 8)])
@pytest.mark.parametrize("sort", SORTS)
def test_a_screen_is_never_larger_than_the_terminal(width: int, height: int, sort: str) -> None:
    members = {node_id: member(state="silent", why="it does not answer " * 9) for node_id in IDS}
    minute = LastMinute()
    for second in range(LOOKS + 5):
        minute.add(overview(members, lookups=second, hits=second), second)
    shown = screen(overview(members), minute, sort, "this was 4 s ago", width, height)
    plain = [line.replace("\x1b[31m", "").replace("\x1b[0m", "") for line in shown]
    assert len(shown) <= height and max(map(len, plain)) <= width
    assert plain[-1].endswith(f"(now by {sort})")
    assert height < 24 or any(line == "... more in a taller terminal" for line in plain)


def test_what_is_wrong_comes_first_by_state() -> None:
    members = {IDS[0]: member(), IDS[1]: member(state="no store", why="too little memory")}
    shown = screen(overview(members), LastMinute(), "state", "", 200, 24)
    rows = [line for line in shown if line.startswith("0000000")]
    assert rows[0].startswith("00000001") and f"{IDS[1][:8]}: too little memory" in shown
