"""`raykv doctor` on nodes that lack nothing, and on nodes that really have the faults it looks for."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers.cluster.poor_machine import poor_machine, why_not
from helpers.faces.command_line import command
from helpers.line import certificates
from helpers.project.without_raykv import WITHOUT_RAYKV
from ray._private.state import actors
from rich.text import Text

import raykv
from raykv.arena import files
from raykv.arena.arena import open_own
from raykv.cluster import internal_kv, living
from raykv.doctor import exchange, facts, judgement
from raykv.doctor.finding import ADVICE, OK, WRONG

DIE_WITH_AN_ARENA = """
import os, signal, sys
from raykv.arena import files
from raykv.arena.arena import open_own
open_own(sys.argv[1], bytes(16), 4 << 20, 2, lambda size: None)
os.kill(os.getpid(), signal.SIGKILL)
"""
ALWAYS = {"python", "numba", "raykv", "memory", "left over", "kernels", "huge pages", "gpu", "nixl", "niceness", "tls"}
ALWAYS |= {"clock", "ports"}
# Checks that may give advice on a sound machine. Other tests on it may have left files.
UP_TO_THE_MACHINE = {"memory", "huge pages", "niceness", "nixl", "gpu", "left over"}
LEFT = f"doctor{os.getpid()}"


@contextmanager
def arena_of_a_dead_store(pool: str) -> Iterator[None]:
    assert subprocess.run([sys.executable, "-c", DIE_WITH_AN_ARENA, pool]).returncode == -signal.SIGKILL
    try:
        yield
    finally:
        files.remove_left_behind(pool)


def checks(report: dict[str, Any], node: str, state: str = "") -> dict[str, dict[str, Any]]:
    """A node's checks by name, the last of each name; with `state` only those whose state begins with it."""
    found = [check for check in report["checks"] if check["node"] == node and check["state"].startswith(state)]
    return {check["check"]: check for check in found}


def jobs_of_actors() -> set[str]:
    """Jobs of all actors, dead ones too. A command is a job of its own, so its actors would show here."""
    return {actor["JobID"] for actor in actors().values()}


def test_nodes_that_lack_nothing(cluster: Any, start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    before = jobs_of_actors()
    done = command("doctor", "--name", pool.name, "--json", address=cluster.address)
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"] and report["version"] == raykv.__version__
    assert set(report["nodes"]) == living()
    assert jobs_of_actors() == before, "nothing of it is on the Actors page of Ray's dashboard"
    (token,) = (check for check in report["checks"] if check["check"] == "token")
    assert token["state"] == OK and token["text"].startswith("none")
    here, there = report["nodes"]
    for node, peer in ((here, there), (there, here)):
        found = checks(report, node)
        assert set(found) - {"token"} == ALWAYS | {"store", "blocks"}
        assert not checks(report, node, WRONG) and set(checks(report, node, ADVICE)) <= UP_TO_THE_MACHINE
        assert found["blocks"]["peer"] == peer and found["blocks"]["gbps"] > 0
    (one, other) = exchange.findings(pool, {pool.node_id: "here", "f" * 56: "where no store could start"})
    assert one.state == OK and other.state == WRONG and other.text.startswith("no store: see `raykv status --name")


def test_chunks_that_held_other_tokens_are_said_until_the_pool_is_cleared(
    cluster: Any, start: Callable[..., raykv.KVPool]
) -> None:
    pool = start()
    for client, chunks in ((1, 2), (2, 3), (1, 4)):  # a client tells its total, in place of the earlier one
        internal_kv.put_other_tokens(pool.name, pool.node_id, client, chunks)
    internal_kv.put_other_tokens(pool.name, "f" * 56, 3, 1)  # a client of a node that is gone
    done = command("doctor", "--name", pool.name, address=cluster.address)
    (said,) = (line for line in done.stdout.splitlines() if " tokens: " in line)
    assert done.returncode == 1 and pool.node_id[:16] in said and "7 chunks held other tokens" in said
    pool.clear()
    assert command("doctor", "--name", pool.name, address=cluster.address).returncode == 0


def test_nothing_is_cut_off_in_a_pipe_or_on_a_narrow_terminal(cluster: Any) -> None:
    with ThreadPoolExecutor(1) as beside:
        piping = beside.submit(command, "doctor", address=cluster.address)
        narrow = command("doctor", address=cluster.address, FORCE_COLOR="1", COLUMNS="80", TERM="xterm")
        piped = piping.result()
    assert piped.returncode == narrow.returncode == 0, piped.stdout + narrow.stdout
    shown = console_text(narrow.stdout)
    assert max(map(len, shown.splitlines())) <= 80
    for node in (node for node in ray.nodes() if node["Alive"]):
        said = f"{node['NodeManagerHostname']} {node['NodeID'][:16]}"
        assert all(f"\n{said} {check}: " in f"\n{piped.stdout}" for check in ALWAYS) and said in shown
    end = "object stores may take"
    assert end in piped.stdout and end.replace(" ", "") in "".join(shown.replace("│", "").split())


def console_text(colourful: str) -> str:
    return Text.from_ansi(colourful).plain


def test_a_pool_that_does_not_run(cluster: Any) -> None:
    refused = command("doctor", "--name", "nobodys", address=cluster.address)
    assert refused.returncode == 1 and "raykv start --name nobodys" in refused.stderr


@pytest.mark.parametrize("version", ["3.10.13", "3.14.0", "3.14.0rc1", "3.15.0a1"])
def test_a_python_that_is_not_supported(version: str) -> None:
    said = {"python": version, "numba": "1", "raykv": raykv.__version__}
    python, numba = judgement.of_software("node", said, said)
    assert (python.check, python.state, numba.state) == ("python", WRONG, OK)
    assert f"{version}, and raykv needs Python <3.14,>=3.11: " in python.text


@pytest.mark.parametrize("version", ["3.11.0", "3.12.1", "3.13.99", "3.13.0+"])
def test_a_python_that_is_supported(version: str) -> None:
    said = {"python": version, "numba": "1", "raykv": raykv.__version__}
    assert not [finding for finding in judgement.of_software("node", said, said) if finding.state != OK]


def test_memory_of_a_store_that_died_where_its_pool_has_another() -> None:
    name = f"{LEFT}other"
    arena = open_own(name, bytes(16), 4 << 20, 2, lambda size: None)
    try:
        with arena_of_a_dead_store(name):
            found = list(judgement.of_facts("node", facts.look(), 1, set()))
    finally:
        arena.close(unlink=True)
    (left,) = [finding for finding in found if name in finding.text]
    assert left.state == ADVICE and "stop --name" not in left.text


def test_a_certificate_that_other_nodes_would_refuse(tmp_path: Path) -> None:
    with certificates.used(tmp_path, "192.0.2.99"):
        (found,) = (each for each in judgement.of_facts("node", facts.look(), 1, set()) if each.check == "tls")
    assert found.state == WRONG and "subjectAltName = IP:" in found.text


@pytest.fixture(scope="module")
def sick(
    cluster: Any, third_node_for_module: Callable[[], Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """(node ids by the role of the node, the doctor's report on all nodes)."""
    reason = why_not()
    if reason and "CI" not in os.environ:
        pytest.skip(reason)
    assert not reason
    without, other = tmp_path_factory.mktemp("without"), tmp_path_factory.mktemp("other")
    (without / "sitecustomize.py").write_text(WITHOUT_RAYKV)
    (other / "raykv").mkdir()
    (other / "raykv/__init__.py").write_text("__version__ = '0.0.1'")
    whole = ray.get_runtime_context().get_node_id()
    nodes = {"whole": whole, "beside": next(iter(living() - {whole}))}
    poor = poor_machine(tmp_path_factory.mktemp("poor"), cluster.address)
    with arena_of_a_dead_store(LEFT), poor as joined:
        for name, folder in (("without raykv", without), ("another raykv", other)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}")
                nodes[name] = third_node_for_module().node_id
        nodes["poor"] = joined()
        done = command("doctor", "--json", address=cluster.address, folder=other.parent)
    assert done.returncode == 1, done.stderr
    yield nodes, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("node", "check", "says"),
    [
        ("without raykv", "raykv", "No module named 'raykv': install this raykv, "),
        ("another raykv", "raykv", f"0.0.1, here it is {raykv.__version__}: install this raykv, "),
        ("poor", "memory", "/dev/shm 0.00 GiB free"),
        ("poor", "memory", "enlarge /dev/shm"),
        ("poor", "kernels", "every process compiles for a minute: set NUMBA_CACHE_DIR"),
        ("whole", "ports", "can't connect to poor ({poor}) at 10.79.0.2 port"),
    ],
)
def test_what_is_wrong_is_said(sick: tuple[dict[str, str], dict[str, Any]], node: str, check: str, says: str) -> None:
    nodes, report = sick
    found = checks(report, nodes[node], WRONG)[check]
    assert not report["ok"]
    assert says.format(poor=nodes["poor"][:16]) in found["text"]


def test_what_is_left_over_is_said_where_it_lies(sick: tuple[dict[str, str], dict[str, Any]]) -> None:
    nodes, report = sick
    says = f"pool {LEFT}, which does not run: `raykv stop --name {LEFT}` frees it"
    said = {(check["node"], check["state"]) for check in report["checks"] if says in check["text"]}
    assert said == {(nodes["whole"], ADVICE), (nodes["beside"], ADVICE)}, "no other node sees it, and has this raykv"


def test_nothing_else_is_wrong(sick: tuple[dict[str, str], dict[str, Any]]) -> None:
    """The sound nodes connect to each other, and the poor node to them."""
    nodes, report = sick
    wrong = {(check["node"], check["check"]) for check in report["checks"] if check["state"] == WRONG}
    poor = {(nodes["poor"], "memory"), (nodes["poor"], "kernels")}
    software = {(nodes["without raykv"], "raykv"), (nodes["another raykv"], "raykv")}
    others = [node for node in report["nodes"] if node != nodes["poor"]]
    assert wrong == poor | software | {(node, "ports") for node in others}
    assert {check["peer"] for check in report["checks"] if check["check"] == "ports"} == {None, nodes["poor"]}
