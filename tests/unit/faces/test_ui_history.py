"""From successive looks at a pool `raykv ui` makes sums that never fall, and events."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from raykv.ui.history import SAMPLES, History
from raykv.ui.sight import Node, Route, Sight

COUNTS = {"lookups": 0, "corrupt": 0, "stored": 0, "evicted": 0, "refused": 0}
NODE = Node("a" * 56, "aaaaaaaa", "h", "192.0.2.1", ("store", "directory"), "alive", "", 9.0, 0, 1 << 30, {}, {})
WELL = {"directory": "", "successor": "", "supervisor": ""}
SIGHT = Sight("p", 1, (NODE,), COUNTS, {"this node": 0}, {}, (), {}, WELL, ())


def counting(**counts: int) -> Sight:
    return replace(SIGHT, counts=COUNTS | counts)


def node(**changed: Any) -> Sight:
    return replace(SIGHT, nodes=(replace(NODE, **changed),))


def pulled(count: int) -> Sight:
    return replace(SIGHT, routes=(Route("a", "b", "tcp", 1.0, {"tcp": count}, {"nixl": 1}),))


def history(*sights: Sight) -> History:
    """The history of looks, one each second."""
    found = History()
    for now, sight in enumerate(sights, 1):
        found.add(sight, float(now))
    return found


def sums(name: str, *sights: Sight) -> list[float | None]:
    values: list[float | None] = history(*sights).since(0)["samples"][name]
    return values


def told(*sights: Sight) -> list[str]:
    """The events after the first, with their kinds."""
    return [f"{event['kind']}: {event['text']}" for event in history(*sights).since(0)["events"][1:]]


def test_a_directory_goes_on_from_a_little_earlier_and_a_store_from_nothing() -> None:
    away = replace(SIGHT, counts={}, epoch=None)
    looks = (counting(lookups=10), counting(lookups=16), away, counting(lookups=14), counting(lookups=15))
    assert sums("asked", *looks) == [10, 16, 16, 16, 17]
    assert sums("bytes:tcp", pulled(100), pulled(150), SIGHT, pulled(30), pulled(31)) == [100, 150, 150, 180, 181]
    assert sums("fault:transport_nixl", SIGHT, pulled(1), pulled(2)) == [None, 1, 1]
    assert sums("fault:tier_down", node(faults={"tier_down": 2}), node(), node(faults={"tier_down": 3})) == [2, 2, 3]


def test_older_samples_thin_out_and_what_is_new_is_told_alone() -> None:
    found = history(*(counting(lookups=now) for now in range(3 * SAMPLES)))
    times, asked = (found.since(0)["samples"][name] for name in ("t", "asked"))
    assert len(times) <= SAMPLES and times == sorted(times) and times[0] == 1 and times[-1] == 3 * SAMPLES
    assert [at - 1 for at in times] == asked, "a sum belongs to its time"
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[0] > gaps[-1] == 1
    new = found.since(times[-3])
    assert new["samples"]["t"] == times[-2:] and not new["events"] and new["seen"] == times[-1]
    assert History().since(0)["now"] is None


@pytest.mark.parametrize(
    ("after", "events"),
    [
        (SIGHT, []),
        (node(state="restarting", restarts=1), ["bad: the store on aaaaaaaa (h) died"]),
        (
            node(restarts=1),
            ["bad: the store on aaaaaaaa (h) died", "good: the store on aaaaaaaa (h) serves again"],
        ),
        (
            node(uptime_s=1.0),
            ["bad: the store on aaaaaaaa (h) died", "good: the store on aaaaaaaa (h) serves again"],
        ),
        (node(state="silent"), ["bad: the store on aaaaaaaa (h) does not answer"]),
        (node(state="leaving"), ["note: aaaaaaaa (h) is being drained"]),
        (node(state="no store", why="no memory"), ["bad: aaaaaaaa (h) has no store: no memory"]),
        (node(limit=1 << 29), ["note: aaaaaaaa (h) may offer 512 MiB, which were 1024"]),
        (replace(SIGHT, nodes=()), ["bad: node aaaaaaaa (h) left the cluster"]),
        (replace(SIGHT, nodes=(NODE, replace(NODE, id="b", shown="b"))), ["note: node b (h) joined the cluster"]),
        (replace(SIGHT, epoch=2), ["note: another directory took over, on aaaaaaaa (h)"]),
        (replace(SIGHT, upkeep=WELL | {"supervisor": "is not there"}), ["bad: the supervisor is not there"]),
        (replace(SIGHT, tiers={"all nodes": "down"}), ["bad: the external tier of all nodes does not answer"]),
    ],
)
def test_what_is_an_event(after: Sight, events: list[str]) -> None:
    assert told(SIGHT, after) == events


def test_what_comes_back_is_an_event_too() -> None:
    silent, leaving = node(state="silent"), node(state="leaving")
    assert told(silent, SIGHT) == ["good: the store on aaaaaaaa (h) serves again"]
    assert told(leaving, SIGHT) == ["good: the drain of aaaaaaaa (h) ended"]
    restarting = node(state="restarting", restarts=1)
    assert told(restarting, node(restarts=1)) == ["good: the store on aaaaaaaa (h) serves again"]
    starting = node(state="starting", restarts=0, uptime_s=None)
    assert told(starting, SIGHT) == ["good: the store on aaaaaaaa (h) serves"]
    down, up = (replace(SIGHT, tiers={"all nodes": state}) for state in ("down", "up"))
    assert told(down, up) == ["good: the external tier of all nodes answers again"]
    away = replace(SIGHT, epoch=None, counts={}, upkeep=WELL | {"directory": "does not answer"})
    assert told(SIGHT, away, replace(SIGHT, epoch=2)) == [
        "bad: the directory does not answer",
        "good: the directory answers",
        "note: another directory took over, on aaaaaaaa (h)",
    ]
