"""`raykv status` shows each living Ray node and why it does not serve, at any width. Other commands take its ids."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
from helpers.faces.command_line import command, last_json
from helpers.faces.terminal import in_terminal
from helpers.pools import MIB, eventually, keep, node_store, other_node, part, pid, stopped, tokens
from helpers.project.pages import ROOT
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.dashboard.modules.job.utils import get_driver_jobs

import raykv
from raykv.cli.status.status import node_rows
from raykv.cluster import internal_kv
from raykv.cluster.internal_kv import Kept
from raykv.ui.overview import UPKEEP, Member, Overview, look


@pytest.fixture(scope="module")
def pool(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    pool = start_for_module()
    cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=4096)
    keep(cache, cache.keys(tokens(0, 10)))
    return pool


def member(pool: raykv.KVPool, node_id: str) -> Member:
    return look(pool.name).members[node_id]


def all_alive(pool: raykv.KVPool) -> bool:
    return all(member.state == "alive" for member in look(pool.name).members.values())


def test_the_ids_that_are_shown_are_those_that_are_taken(pool: raykv.KVPool, cluster: Any) -> None:
    there, size = other_node(pool), str(48 * MIB)
    overview = look(pool.name)
    shown, host = node_rows(overview)[there]["node"], overview.members[there].host
    assert len(shown) < len(there)

    def resize(node: str) -> Any:
        return command("resize", node, "--cpu-memory", size, "--name", pool.name, "--json", address=cluster.address)

    with ThreadPoolExecutor(3) as threads:  # both raylets are on one machine, and so have the same host name
        done, both = threads.submit(resize, shown), threads.submit(resize, host)
        none = threads.submit(command, "drain", "no-such-node", "--name", pool.name, address=cluster.address)
    assert last_json(done.result()) == {"bytes": 48 * MIB}
    for refused, why in ((both.result(), "may be any of 2 nodes"), (none.result(), "no living node")):
        assert refused.returncode == 1 and why in refused.stderr and "Traceback" not in refused.stderr
        assert all(row["node"] in refused.stderr for row in node_rows(overview).values())


def test_a_killed_store_is_not_alive_until_another_is(pool: raykv.KVPool) -> None:
    there = other_node(pool)
    eventually(lambda: all_alive(pool))
    before = member(pool, there)
    os.kill(pid(node_store(pool, there)), signal.SIGKILL)
    killed = member(pool, there)
    assert (killed.state != "alive" and killed.why) or killed.restarts == (before.restarts or 0) + 1
    back = eventually(lambda: (found := member(pool, there)).state == "alive" and found)
    assert back and back.restarts == (before.restarts or 0) + 1
    assert back.uptime_s is not None and before.uptime_s is not None and back.uptime_s < before.uptime_s


def test_a_stopped_store_is_silent(pool: raykv.KVPool, cluster: Any) -> None:
    there = other_node(pool)
    eventually(lambda: all_alive(pool))
    with stopped(pid(node_store(pool, there))):
        table = command("status", "--name", pool.name, address=cluster.address).stdout
    line = next(line for line in table.splitlines() if line.startswith(there[:8]))
    assert "silent" in line and "alive" not in line
    assert f"{there[:8]}: its process does not answer" in table
    eventually(lambda: member(pool, there).state == "alive")


def test_a_node_without_a_store_and_why(
    start: Callable[..., raykv.KVPool], third_node: Callable[[], Any], cluster: Any
) -> None:
    """First because no supervisor starts a store, then because the store can't start."""
    pool = start()
    settings = internal_kv.settings(pool.name) or {}
    with stopped(pid(part(pool, "supervisor"))):
        internal_kv.put(pool.name, Kept.SETTINGS, json.dumps({**settings, "cpu_memory": 1 << 45}).encode())
        node = third_node()
        found = member(pool, node.node_id)
        assert (found.state, found.roles, found.restarts) == ("no store", (), None)
        assert found.why == "the supervisor, which starts stores, does not answer"
    eventually(lambda: "Lower cpu_memory" in member(pool, node.node_id).why)
    table = command("status", "--name", pool.name, address=cluster.address).stdout
    line = next(line for line in table.splitlines() if line.startswith(node.node_id[:8]))
    assert "no store" in line
    assert f"{node.node_id[:8]}: asked for" in table and "it is tried again every 30 s" in table


def test_a_command_is_no_client_and_no_job_of_the_dashboard(pool: raykv.KVPool, cluster: Any) -> None:
    pool.session.directory.heartbeat()
    eventually(lambda: all_alive(pool))
    before = pool.stats()["connections"]
    found = last_json(command("status", "--name", pool.name, "--json", address=cluster.address))
    around = max(before, pool.stats()["connections"])  # a store may connect or disconnect meanwhile
    assert found["connections"] <= around and found["clients"] == 1, "this process"
    jobs, _ = asyncio.run(get_driver_jobs(GcsClient(address=ray.get_runtime_context().gcs_address)))
    assert jobs, "this process's"
    assert not [job.entrypoint for job in jobs.values() if "raykv.cli" in (job.entrypoint or "")]


def test_the_page_of_the_json_has_its_keys_and_no_others(pool: raykv.KVPool) -> None:
    page = (ROOT / "docs/cli-json.md").read_text()
    overview = look(pool.name).as_json()
    assert pool.stats().keys() <= overview.keys(), "what programs read"
    tables = {"": overview, **{name: next(iter(overview[name].values())) for name in ("nodes", "ray_nodes")}}
    for name, written in tables.items():
        section = page.split(f"## `{name}`" if name else "## At the top")[1].split("\n## ")[0]
        documented = {line.split("`")[1] for line in section.splitlines() if line.startswith("| `")}
        assert documented == set(written), name or "at the top"


Cells = list[list[str]]


def cells_of(overview: Overview) -> Cells:
    return [[row[name] for name in ("node", "host", "memory", "roles")] for row in node_rows(overview).values()]


def printed_while_nothing_changes(pool: raykv.KVPool, cluster: Any) -> tuple[Cells, list[str]] | None:
    """(cells, outputs on 80 columns, on 200 and into a pipe); None if a role moved meanwhile."""
    before = cells_of(look(pool.name))
    if {role for row in before for role in row[-1].split(", ")} != {"head", *UPKEEP, "store"}:
        return None
    args = ("status", "--name", pool.name)
    with ThreadPoolExecutor(3) as threads:
        piped = threads.submit(command, *args, address=cluster.address)
        narrow, wide = (threads.submit(in_terminal, n, *args, address=cluster.address) for n in (80, 200))
    outputs = [narrow.result(), wide.result(), piped.result().stdout]
    return (before, outputs) if cells_of(look(pool.name)) == before else None


def test_nothing_is_cut_off_at_any_width(pool: raykv.KVPool, cluster: Any) -> None:
    eventually(lambda: all_alive(pool) and not any(look(pool.name).upkeep.values()))
    found = eventually(lambda: printed_while_nothing_changes(pool, cluster))
    assert found
    cells, outputs = found
    for output in outputs:
        whole = " ".join(output.split())
        assert not [cell for row in cells for cell in row if cell not in whole] and "…" not in whole, output
        assert whole.count(" alive") == 2 and "hit rate" in whole and "10 blocks" in whole, output
        assert not [word for word in ("limbo", "cooled", "quarantined", "suspect") if word in whole]
    assert max(map(len, outputs[0].splitlines())) <= 80 and max(map(len, outputs[1].splitlines())) <= 200
