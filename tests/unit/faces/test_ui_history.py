"""From successive looks at a pool `raykv ui` makes sums that never fall, and events."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from raykv.config import MIB
from raykv.ui.history import SAMPLES, History
from raykv.ui.overview import Member, Overview
from raykv.ui.ray_nodes import RayNode, short_ids

ID = "a" * 56
COUNTS = {"epoch": 1, "lookups": 0, "corrupt": 0, "stored": 0, "evicted": 0, "refused": 0}
HITS = {"hits": 0, "remote_hits": 0, "external_hits": 0, "gpu_hits": 0}
MEMORY = {"tier": "cpu", "limit": 1024, "slab_bytes": MIB, "slabs": 1, "spare_slabs": 3, "bytes_used": MIB}
NODE = RayNode(ID, "h", "192.0.2.1", "", False)
MEMBER = Member("h", "192.0.2.1", ("store", "directory"), "alive", "", 9.0, 0, None, {}, "")
WELL = {"directory": "", "successor": "", "supervisor": ""}
ROUTE = {"reader": "a", "from": "b", "transport": "tcp", "gbps": 1.0, "bytes": {}, "failed": {}}
LOOK = Overview("p", short_ids((NODE,)), {**COUNTS, **HITS, "nodes": {ID: MEMORY}}, {}, [], {ID: MEMBER}, WELL)


def counting(**counts: Any) -> Overview:
    return replace(LOOK, counts=LOOK.counts | counts)


def node(**changed: Any) -> Overview:
    return replace(LOOK, members={ID: replace(MEMBER, **changed)})


def pulled(count: int) -> Overview:
    route = {
        "reader": "a",
        "from": "b",
        "transport": "tcp",
        "gbps": 1.0,
        "bytes": {"tcp": count},
        "failed": {"nixl": 1},
    }
    return replace(LOOK, transports=[route])


def history(*looks: Overview) -> History:
    """The history of looks, one each second."""
    found = History()
    for now, look in enumerate(looks, 1):
        found.add(look, float(now))
    return found


def sums(name: str, *looks: Overview) -> list[float | None]:
    values: list[float | None] = history(*looks).since(0)["samples"][name]
    return values


def told(*looks: Overview) -> list[str]:
    """The events after the first, with their kinds."""
    return [f"{event['kind']}: {event['text']}" for event in history(*looks).since(0)["events"][1:]]


def test_a_directory_goes_on_from_a_little_earlier_and_a_store_from_nothing() -> None:
    away = replace(LOOK, counts={})
    looks = (counting(lookups=10), counting(lookups=16), away, counting(lookups=14), counting(lookups=15))
    assert sums("asked", *looks) == [10, 16, 16, 16, 17]
    assert sums("bytes:tcp", pulled(100), pulled(150), LOOK, pulled(30), pulled(31)) == [100, 150, 150, 180, 181]
    assert sums("fault:transport_nixl", LOOK, pulled(1), pulled(2)) == [None, 1, 1]
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
        (LOOK, []),
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
        (counting(nodes={ID: MEMORY | {"limit": 512}}), ["note: aaaaaaaa (h) may offer 512 MiB, which were 1024"]),
        (replace(LOOK, shown={}, members={}), ["bad: node aaaaaaaa (h) left the cluster"]),
        (
            replace(LOOK, shown=short_ids((NODE, NODE._replace(node_id="b"))), members={ID: MEMBER, "b": MEMBER}),
            ["note: node b (h) joined the cluster"],
        ),
        (counting(epoch=2), ["note: another directory took over, on aaaaaaaa (h)"]),
        (replace(LOOK, upkeep=WELL | {"supervisor": "is not there"}), ["bad: the supervisor is not there"]),
        (counting(tiers={"": {"state": "down"}}), ["bad: the external tier of all nodes does not answer"]),
    ],
)
def test_what_is_an_event(after: Overview, events: list[str]) -> None:
    assert told(LOOK, after) == events


def test_what_comes_back_is_an_event_too() -> None:
    silent, leaving = node(state="silent"), node(state="leaving")
    assert told(silent, LOOK) == ["good: the store on aaaaaaaa (h) serves again"]
    assert told(leaving, LOOK) == ["good: the drain of aaaaaaaa (h) ended"]
    restarting = node(state="restarting", restarts=1)
    assert told(restarting, node(restarts=1)) == ["good: the store on aaaaaaaa (h) serves again"]
    starting = node(state="starting", restarts=0, uptime_s=None)
    assert told(starting, LOOK) == ["good: the store on aaaaaaaa (h) serves"]
    down, up = (counting(tiers={"": {"state": state}}) for state in ("down", "up"))
    assert told(down, up) == ["good: the external tier of all nodes answers again"]
    away = replace(LOOK, counts={}, upkeep=WELL | {"directory": "does not answer"})
    assert told(LOOK, away, counting(epoch=2)) == [
        "bad: the directory does not answer",
        "good: the directory answers",
        "note: another directory took over, on aaaaaaaa (h)",
    ]


def test_the_page_names_faults_as_the_status_does() -> None:
    found = history(replace(pulled(1), members=node(faults={"tier_put": 2}).members)).since(0)
    texts = {"fault:corrupt": "blocks dropped that were not what was stored"} | {
        "fault:tier_put": "calls of the external tier failed (put)",
        "fault:transport_nixl": "transfers failed by nixl",
    }
    assert found["faults"] == texts and found["now"]["nodes"][0]["faults"] == [f"2 {texts['fault:tier_put']}"]


def test_the_page_names_nodes_and_memories_as_the_status_does() -> None:
    route = ROUTE | {"reader": f"{ID}/GPU-01234567"}
    prefix = {"key": "00", "blocks": 2, "bytes": 9, "hits": 1, "idle_s": 0.5, "nodes": [ID, "c" * 56]}
    now = history(
        replace(counting(prefixes=[prefix]), transports=[route], upkeep=WELL | {"successor": "is starting"})
    ).since(0)["now"]
    (shown,) = now["nodes"]
    assert now["summary"] == ["1 of 1 nodes alive", "successor is starting"]
    assert (shown["id"], shown["shown"], shown["fills"]) == (ID, "aaaaaaaa", {"memory": (MIB, 4 * MIB)})
    assert now["routes"] == [route | {"reader": "aaaaaaaa (gpu 01234567)"}]
    assert now["prefixes"] == [prefix | {"nodes": ["aaaaaaaa", "cccccccc"]}] and "nodes" not in now["counts"]
