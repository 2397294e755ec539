"""How `raykv status` describes a node, and how a user names a node."""

from typing import Any

import pytest

from raykv.cli.status.status import _growing, duration, hit_curve, resized, table, wrapped
from raykv.ui.overview import state_of
from raykv.ui.pool_actors import Actor
from raykv.ui.ray_nodes import RayNode, find_node, short_ids

ONE = RayNode("06d9a10f" + 48 * "0", "gpu-1.example.com", "192.0.2.1", "192.0.2.1", True)
TWO = RayNode("06d9a10f77" + 46 * "1", "gpu-2.example.com", "192.0.2.2", "left", False)
THREE = RayNode("ab" + 54 * "2", "gpu-2.example.com", "192.0.2.2", "right", False)
NODES = (ONE, TWO, THREE)
ALIVE = Actor(None, "ALIVE", ONE.node_id, 0, 1.0)


@pytest.mark.parametrize(
    ("asked", "got", "said"),
    [
        ("48MiB", 48 << 20, "the node has 48 MiB now"),
        ("48MiB", 32 << 20, "the node has 32 MiB now, not 48 MiB: it gives memory in whole slabs"),
        ("2GiB", 3 << 30, "the node has 3.00 GiB now, not 2.00 GiB: blocks in the rest are held"),
        ("0.5", 5 << 30, "the node has 5.00 GiB now"),
    ],
)
def test_a_resized_node_says_what_it_got_and_why(asked: str, got: int, said: str) -> None:
    text = resized(asked, got)
    assert text.startswith(said) and (":" in text) == (":" in said)


def test_memory_that_nodes_still_prepare_is_said() -> None:
    node = {"slabs": 1, "spare_slabs": 2, "limit": 4, "slab_bytes": 1 << 30}
    whole = node | {"slabs": 2}
    assert [*_growing({"nodes": {"a": node, "b": whole}})] == [
        "7.00 GiB of 8.00 GiB of memory are there: the nodes are preparing the rest"
    ]
    assert not [*_growing({"nodes": {"a": whole}})]


def test_the_hit_rates_of_other_sizes_of_memory_are_said() -> None:
    curve = {"0.5": 0.694, "1": 0.92714, "2": 0.963, "4": 0.963, "ceiling": 1.0}
    assert [*hit_curve({"hit_curve": curve})] == [
        "hit rate by memory: half 69.4%, as now 92.7%, twice 96.3%, four times 96.3%, any 100.0%"
    ]
    assert not [*hit_curve({"hit_curve": {}})] and not [*hit_curve({})]


def test_ids_are_shown_as_long_as_tells_them_apart() -> None:
    shown = short_ids(NODES)
    assert shown == {ONE.node_id: "06d9a10f0", TWO.node_id: "06d9a10f7", THREE.node_id: "ab222222"}
    assert all(find_node(short, NODES).node_id == node_id for node_id, short in shown.items())


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        (ONE.node_id, ONE),
        ("06d9a10f0", ONE),
        ("06D9A10F0", ONE),
        ("ab", THREE),
        ("gpu-1.example.com", ONE),
        ("192.0.2.1", ONE),
        ("right", THREE),
    ],
)
def test_a_node_by_a_prefix_of_its_id_its_host_address_or_name(asked: str, meant: RayNode) -> None:
    assert find_node(asked, NODES) == meant


@pytest.mark.parametrize("asked", ["06d9a10f", "0", "gpu-2.example.com", "192.0.2.2"])
def test_an_ambiguous_name_is_refused_with_those_it_may_be(asked: str) -> None:
    with pytest.raises(ValueError, match="may be any of 2 nodes: give more of its id") as refused:
        find_node(asked, NODES)
    assert "06d9a10f7  gpu-2.example.com  192.0.2.2" in str(refused.value)


@pytest.mark.parametrize("asked", ["", "cd", "gpu", "gpu-3.example.com"])
def test_an_unknown_name_is_refused_with_all_that_there_are(asked: str) -> None:
    with pytest.raises(ValueError, match="no living node") as refused:
        find_node(asked, NODES)
    assert all(node.host in str(refused.value) for node in NODES)


@pytest.mark.parametrize(
    ("store", "failed", "supervisor", "state", "why"),
    [
        ((ALIVE, True, {"state": "alive"}), None, "", "alive", ""),
        ((ALIVE, True, {}), None, "", "alive", ""),
        ((ALIVE, True, None), None, "", "joining", "does not know it"),
        ((ALIVE, True, {"state": "joining"}), None, "", "joining", "lies in its memory"),
        ((ALIVE, True, {"state": "leaving"}), None, "", "leaving", "being drained"),
        ((ALIVE, True, {"state": "suspect", "idle_s": 7.2}), None, "", "silent", "for 7 s"),
        ((ALIVE, False, {"state": "alive"}), None, "", "silent", "does not answer"),
        ((ALIVE._replace(state="RESTARTING"), False, {"state": "alive"}), None, "", "restarting", "died"),
        ((ALIVE._replace(state="PENDING_CREATION"), False, None), None, "", "starting", "is starting"),
        ((None, False, None), None, "", "no store", "about to start"),
        ((None, False, None), None, "does not answer", "no store", "supervisor, which"),
        ((None, False, None), "too little memory", "", "no store", "too little memory (it is tried again"),
    ],
)
def test_what_is_said_of_a_store(
    store: tuple[Actor | None, bool, dict[str, Any] | None], failed: str | None, supervisor: str, state: str, why: str
) -> None:
    actor, answers, counts = store
    found = state_of(actor, answers, counts and {"idle_s": 0.0, **counts}, failed, supervisor)
    assert found[0] == state and why in found[1] and bool(found[1]) == bool(why)


def test_long_words_keep_their_line_and_no_character_is_lost() -> None:
    host = "a-very-long-name-of-a-host." * 4
    lines = wrapped(f"06d9a10f  {host}  alive for 3h12m", 80)
    assert host in [line.strip() for line in lines] and "".join("".join(lines).split()).endswith("alivefor3h12m")
    rows: list[dict[str, Any]] = [{"node": "a", "host": host}, {"node": "bcd", "host": "h"}]
    assert table(rows) == ["NODE  HOST", f"a     {host}", "bcd   h"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (12.9, "12s"), (184, "3m04s"), (18420, "5h07m"), (12.5 * 86400, "12d12h")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
