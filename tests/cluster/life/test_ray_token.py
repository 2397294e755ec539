"""`raykv doctor` if only this process has a Ray token, only the cluster, or both have different ones."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.faces.command_line import command

from raykv.doctor.finding import OK, WRONG

TOKEN, OTHER = "a" * 64, "b" * 64
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=node)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


class Running(NamedTuple):
    """A Ray cluster. tmp: the RAY_TMPDIR with which a process finds the cluster without an address."""

    address: str
    tmp: str


@contextmanager
def running(**environment: str) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="ray") as tmp:  # short, for sockets
        env = {**os.environ, "RAY_TMPDIR": tmp, **environment}
        with subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=-1, stdout=-1, env=env, text=True) as process:
            assert process.stdin and process.stdout
            yield Running(process.stdout.readline().strip(), tmp)
            process.stdin.close()


@pytest.fixture(scope="module")
def cluster_with() -> Iterator[Callable[[str], Running]]:
    """A function that gives the cluster with a token; "": the cluster without a token."""
    made: dict[str, Running] = {}
    with ExitStack() as stack:

        def cluster(token: str) -> Running:
            if token not in made:
                mode = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}
                made[token] = stack.enter_context(running(**mode))
            return made[token]

        yield cluster


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, "asks for a token, and this process sends none (RAY_AUTH_MODE): "),
        ({"RAY_AUTH_MODE": "token"}, "this process's token (of ~/.ray/auth_token): "),
        (
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": OTHER},
            "does not take this process's token (of RAY_AUTH_TOKEN): ",
        ),
        (
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/nowhere"},
            "this process's token (of RAY_AUTH_TOKEN_PATH): ",
        ),
    ],
    ids=["none", "none where it says so", "another one", "a file that is not there"],
)
def test_a_token_that_the_cluster_does_not_take(
    environment: dict[str, str], says: str, cluster_with: Callable[[str], Running], tmp_path: Path
) -> None:
    address = cluster_with(TOKEN).address
    done = command("doctor", address=address, folder=None, **{"HOME": str(tmp_path), **environment})
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"Error: the Ray cluster at {address} ") and says in last
    assert last.endswith(
        "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to what `ray get-auth-token` prints on the cluster's head"
    )


@pytest.mark.parametrize("found", ["by itself", "by its address"])
def test_a_token_that_a_local_ray_left_where_the_cluster_has_none(
    found: str, cluster_with: Callable[[str], Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text(TOKEN)
    cluster = cluster_with("")
    if found == "by itself":  # without RAY_AUTH_MODE Ray uses a token that it finds
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
        done = command("doctor", "--json", HOME=str(tmp_path), RAY_TMPDIR=cluster.tmp)
    else:
        done = command("doctor", "--json", address=cluster.address, HOME=str(tmp_path), RAY_AUTH_MODE="token")
    (check,) = json.loads(done.stdout.splitlines()[-1])["checks"]
    assert done.returncode == 1 and (check["check"], check["state"]) == ("token", WRONG)
    assert "this process has one (of ~/.ray/auth_token), and the Ray cluster has none" in check["text"]
    assert check["text"].endswith(
        "set RAY_AUTH_MODE=disabled here, or remove ~/.ray/auth_token, which a local ray.init() leaves"
    )


def test_the_same_token(cluster_with: Callable[[str], Running], tmp_path: Path) -> None:
    address = cluster_with(TOKEN).address
    done = command("doctor", "--json", address=address, HOME=str(tmp_path), RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN)
    checks = {check["check"]: check["state"] for check in json.loads(done.stdout.splitlines()[-1])["checks"]}
    assert checks["token"] == OK and {"python", "ports"} <= set(checks), done.stdout
