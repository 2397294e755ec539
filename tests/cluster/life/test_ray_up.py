"""`ray up` of our cluster.yaml on three machines, with a Serve example on the cluster."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.cluster.machines import DESK, Machines, address, why_not
from helpers.cluster.machines import machines as up
from helpers.pools import eventually
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[3]
YAML = (ROOT / "cluster.yaml").read_text()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    reason = why_not()
    if reason and "CI" not in os.environ:
        pytest.skip(reason)
    assert not reason
    with up(tmp_path, shm="3g") as machines:
        yield machines


@pytest.mark.timeout(900)
def test_ray_up_starts_a_pool_that_stop_ends(machines: Machines, tmp_path: Path) -> None:
    """Launch the cluster, have one replica read blocks from the other's node, and take the cluster down."""
    config = tmp_path / "cluster.yaml"
    config.write_text(filled_in(machines))
    machines.run(DESK, header("get-auth-token"))
    machines.run(DESK, f"cd {ROOT} && ray up -y {config} --no-config-cache")

    def nodes() -> dict[str, Any]:
        found: dict[str, Any] = machines.json(1, "raykv status --json").get("nodes", {})
        return found if len(found) == 3 and all(node["slabs"] + node["spare_slabs"] for node in found.values()) else {}

    def seen() -> str:
        return machines.ask(1, "raykv status --json; tail -n 60 /tmp/ray/session_latest/logs/monitor.*").stdout

    stores = eventually(nodes, 180, seen, pause=5)  # each look starts a Python, which slows the nodes' start
    assert all(node["state"] == "alive" for node in stores.values())

    for machine in (1, 2, 3):
        assert machines.run(machine, "stat --format=%a ~/.ray/auth_token").strip() == "600"
    stranger = machines.ask(1, f"RAY_AUTH_MODE=disabled RAY_ADDRESS={address(1)}:6379 raykv status")
    assert stranger.returncode and "asks for a token" in stranger.stderr, stranger

    machines.run(1, "serve start --http-host 0.0.0.0")
    machines.run(1, f"cd {ROOT}/examples && serve run --non-blocking --working-dir . serve_transformers:build")
    first = asked(machines, 1)[0]
    assert first["pool_tokens"] == 0 and len(first["tokens"]) == 4

    def crossed() -> bool:
        answers = asked(machines, 12)
        assert all(answer["tokens"] == first["tokens"] for answer in answers)
        return any(answer["node"] != first["node"] and answer["from"] == [first["node"]] for answer in answers)

    eventually(crossed)
    assert machines.json(1, "raykv status --json")["remote_hits"] >= first["prompt_tokens"] // 16 - 1

    machines.run(DESK, f"cd {ROOT} && ray exec {config} 'raykv stop --yes' && ray down -y {config}")
    for machine in (1, 2, 3):
        assert "raykv" not in machines.run(machine, "ls /dev/shm")
    assert machines.ask(1, "pgrep raylet").returncode == 1


def test_other_providers() -> None:
    """With the sections of AWS and GCP in place of ours, cluster.yaml is a configuration that Ray accepts."""
    ours = {name: value for name, value in yaml.safe_load(YAML).items() if name not in ("provider", "auth")}
    commented = re.findall(r"(?m)^# provider:\n(?:#.*\n)+", YAML)
    sections = [yaml.safe_load(re.sub("(?m)^# ", "", section)) for section in commented]
    assert [section["provider"]["type"] for section in sections] == ["aws", "gcp"]
    for section in sections:
        validate_config(prepare_config({**ours, **section}))


def header(command: str) -> str:
    """The shell line with a command of Ray in the header of cluster.yaml."""
    (line,) = re.findall(rf"(?m)^# {{5}}(.*{command}.*)$", YAML)
    return str(line)


def filled_in(machines: Machines) -> str:
    """cluster.yaml as a user of these machines would edit it, with small sizes: they share one machine's memory."""
    text = YAML
    for ours, theirs in {
        "192.168.1.1": "10.77.0.",
        "ubuntu": "root",
        "~/.ssh/id_ed25519": str(machines.key),
        "--cpu-memory=0.3": "--cpu-memory=256MiB",
    }.items():
        assert ours in text
        text = text.replace(ours, theirs)
    return text


def asked(machines: Machines, times: int) -> Any:
    """The application's answers to a prompt that is asked `times` times at once."""
    return machines.json(DESK, f"python3 {ROOT}/tests/helpers/engines/serve/asker.py {address(1)} {times}")
