"""The files of deploy/. No Kubernetes runs here, so the files are checked against the schemas of their formats."""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from helpers.project.pages import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from raykv.actors.supervisor.drain import ATTACH_S, CALL_S
from raykv.cli.main import main
from raykv.config import capacity_bytes

DEPLOY, LOCK = ROOT / "deploy", "deploy/gpu.lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
ENDING_S = 30.0  # for `ray stop`, and for a command to attach to the pool
COMMAND = re.compile(r"raykv ((?:start|stop|drain|status|resize|clear)\b[^;&|'\n`#]*)")
# Names of the fields that files may use below `spec`, taken by hand from the schemas (Apache-2.0) of
# ray-project/kuberay at feeaf72 and prometheus-operator. `...` allows any fields below.
CONTAINER: dict[str, Any] = {
    **dict.fromkeys(("name", "image"), str),
    "env": {"name": str, "value": str},
    "ports": {"name": str, "containerPort": int},
    "resources": {"requests": ..., "limits": ...},
    "volumeMounts": {"name": str, "mountPath": str},
    "lifecycle": {hook: {"exec": {"command": str}} for hook in ("postStart", "preStop")},
}
TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": ...},
    "spec": {
        "containers": CONTAINER,
        "terminationGracePeriodSeconds": int,
        "volumes": {"name": str, "emptyDir": {"medium": str, "sizeLimit": str}},
    },
}
CLUSTER: dict[str, Any] = {
    "rayVersion": str,
    "authOptions": {"mode": str},
    "headGroupSpec": {"rayStartParams": ..., "template": TEMPLATE},
    "workerGroupSpecs": {
        "groupName": str,
        **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), int),
        "rayStartParams": ...,
        "template": TEMPLATE,
    },
}
SPECS: dict[str, Any] = {
    "ray.io/v1/RayCluster": CLUSTER,
    "ray.io/v1/RayService": {"serveConfigV2": str, "rayClusterConfig": CLUSTER},
    "networking.k8s.io/v1/NetworkPolicy": {
        "podSelector": {"matchLabels": ...},
        "policyTypes": str,
        "ingress": {
            "from": {"podSelector": {"matchLabels": ...}, "namespaceSelector": {}},
            "ports": {"port": int},
        },
    },
    "policy/v1/PodDisruptionBudget": {"minAvailable": int, "selector": {"matchLabels": ...}},
    "monitoring.coreos.com/v1/PodMonitor": {
        "selector": {"matchLabels": ...},
        "podMetricsEndpoints": {"port": str, "relabelings": {"sourceLabels": str, "targetLabel": str}},
    },
}


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / "kubernetes" / f"{name}.yaml").read_text())


def unknown(fields: Any, allowed: Any, where: str = "spec") -> Iterator[str]:
    """Fields that are not allowed, or have a wrong type."""
    if isinstance(fields, list):
        for field in fields:
            yield from unknown(field, allowed, f"{where}[]")
    elif isinstance(allowed, dict) and isinstance(fields, dict):
        for name, value in fields.items():
            yield from unknown(value, allowed.get(name), f"{where}.{name}")
    elif allowed is not ... and not (isinstance(allowed, type) and isinstance(fields, allowed)):
        yield where


def bytes_of(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]]


def groups(cluster: Any) -> list[Any]:
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def clusters() -> list[Any]:
    return [load("raycluster")["spec"], load("rayservice")["spec"]["rayClusterConfig"]]


def deadline_of(command: str) -> float:
    (found,) = COMMAND.findall(command)
    return float(parsed(found).params["deadline"])


def parsed(command: str) -> click.Context:
    """The `raykv` command's context of these arguments. ClickException if they are wrong."""
    name, *arguments = shlex.split(command)
    return main.commands[name].make_context(name, arguments)


@pytest.mark.parametrize("path", sorted((DEPLOY / "kubernetes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_field_of_a_manifest_has_a_known_name(path: Path) -> None:
    manifest = load(path.stem)
    assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert not list(unknown(manifest["spec"], SPECS[f"{manifest['apiVersion']}/{manifest['kind']}"]))


def test_a_misspelt_field_is_found() -> None:
    cluster = load("raycluster")["spec"]
    cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["lifecycle"]["prestop"] = {}
    assert list(unknown(cluster, CLUSTER)) == ["spec.workerGroupSpecs[].template.spec.containers[].lifecycle.prestop"]


@pytest.mark.parametrize("cluster", clusters(), ids=["raycluster", "rayservice"])
def test_memory_adds_up(cluster: Any) -> None:
    """The pool and Ray's object store fit into /dev/shm, and the pod has memory for /dev/shm and its processes."""
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    start = parsed(COMMAND.findall(" ".join(head["lifecycle"]["postStart"]["exec"]["command"]))[0])
    for group in groups(cluster):
        (container,) = group["template"]["spec"]["containers"]
        resources, (volume,) = container["resources"], group["template"]["spec"]["volumes"]
        assert resources["requests"] == resources["limits"], "what a pod may use it must have"
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
        assert volume["emptyDir"]["medium"] == "Memory"
        limit, shm = bytes_of(resources["limits"]["memory"]), bytes_of(volume["emptyDir"]["sizeLimit"])
        pool = capacity_bytes(float(start.params["cpu_memory"]), limit)
        assert pool + int(group["rayStartParams"]["object-store-memory"]) <= shm
        assert limit - shm >= max(8 << 30, limit // 20), "engines need memory, and Ray kills workers at 95%"
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]


@pytest.mark.parametrize("cluster", clusters(), ids=["raycluster", "rayservice"])
def test_a_pod_has_the_time_to_drain(cluster: Any) -> None:
    for group in cluster["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        command = " ".join(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"])
        assert "--self" in command and command.endswith("; ray stop")
        assert spec["terminationGracePeriodSeconds"] >= deadline_of(command) + 2 * CALL_S + ATTACH_S + ENDING_S


def test_the_service_is_the_same_cluster_with_gpus_and_the_application() -> None:
    cluster, service = load("raycluster")["spec"], load("rayservice")["spec"]
    with_gpus = service["rayClusterConfig"]
    for group in with_gpus["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        assert {resource.pop("nvidia.com/gpu") for resource in container["resources"].values()} == {"1"}
    assert with_gpus == cluster
    application = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    assert yaml.safe_load(service["serveConfigV2"]) == application
    (config,) = application["applications"][0]["args"]["llm_configs"]
    replicas = sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    assert config["deployment_config"]["num_replicas"] == replicas, "one engine a GPU"


def test_the_budget_and_the_monitor_find_the_pods() -> None:
    cluster, budget, monitor = (load(name)["spec"] for name in ("raycluster", "pod-disruption-budget", "pod-monitor"))
    given = {"ray.io/node-type": "worker"}  # labels that KubeRay adds
    for group in groups(cluster):
        labels = group["template"]["metadata"]["labels"] | given
        assert budget["selector"]["matchLabels"].items() <= labels.items()
        assert monitor["selector"]["matchLabels"].items() <= labels.items()
        (container,) = group["template"]["spec"]["containers"]
        assert {"name": monitor["podMetricsEndpoints"][0]["port"], "containerPort": 8080} in container["ports"]
    assert budget["minAvailable"] == sum(group["replicas"] for group in cluster["workerGroupSpecs"]) - 1


def test_who_does_not_know_rays_token_reaches_nothing() -> None:
    """A process that Ray lets in can read the pool's secret. Without the token only Serve's port is open."""
    assert all(cluster["authOptions"] == {"mode": "token"} for cluster in clusters())
    policy = load("network-policy")["spec"]
    for group in [group for cluster in clusters() for group in groups(cluster)]:
        assert policy["podSelector"]["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    anybody = [port["port"] for rule in policy["ingress"] if "from" not in rule for port in rule["ports"]]
    assert anybody == [8000]
    mine, *others = [rule for rule in policy["ingress"] if "from" in rule]
    assert mine == {"from": [{"podSelector": policy["podSelector"]}]}
    assert {port["port"] for rule in others for port in rule["ports"]} == {8265, 8080}
    up = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    starts = [
        command for at in ("head", "worker") for command in up[f"{at}_start_ray_commands"] if " start " in command
    ]
    assert len(starts) == 3 and all("RAY_AUTH_MODE=token " in command for command in starts)
    for path in (DEPLOY / "serve.yaml", DEPLOY / "kubernetes" / "rayservice.yaml"):
        assert "\n    # enable_prompt_tokens_details: true\n" in re.sub(r"\n {4,}", "\n    ", path.read_text())


@pytest.mark.parametrize("path", [*FILES, ROOT / "docs/deploy.md"], ids=lambda path: path.name)
def test_every_command_is_one(path: Path) -> None:
    for command in COMMAND.findall(path.read_text()):
        assert parsed(command)


def test_units_end_when_the_node_is_drained() -> None:
    for name, needed in (("ray", True), ("raykv", False)):
        unit = ConfigParser(strict=False, delimiters=("=",), interpolation=None)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read(DEPLOY / "systemd" / f"{name}.service")
        service = unit["Service"]
        assert service["User"] == "raykv" and unit["Install"]["WantedBy"] == "multi-user.target"
        if needed:
            least = deadline_of(service["ExecStop"]) + 2 * CALL_S + ATTACH_S + ENDING_S
            assert float(service["TimeoutStopSec"]) >= least
            assert service["Environment"] == "RAY_worker_niceness=0 RAY_AUTH_MODE=token"
        assert "RAY_AUTH_MODE=token" in service["Environment"] and service["EnvironmentFile"] == "/etc/raykv.env"


def locked() -> dict[str, str]:
    """By name, the version of each package that the image installs. Each must have a hash."""
    pinned = re.findall(r"(?m)^([\w.-]+)(?:\[.*\])?==(\S+) \\\n    --hash=sha256:", (ROOT / LOCK).read_text())
    assert len(pinned) == len(re.findall(r"(?m)^\w", (ROOT / LOCK).read_text()))
    return dict(pinned)


def test_the_image_installs_what_raykv_admits() -> None:
    recipe = re.search(r"(?ms)^lock:.*?^$", (ROOT / "Makefile").read_text())
    assert recipe
    asked = [
        *PROJECT["dependencies"],
        *(each for name in re.findall(r"--extra (\S+)", recipe[0]) for each in EXTRAS[name]),
    ]
    for requirement in map(Requirement, asked):
        version = locked()[canonicalize_name(requirement.name)]
        assert version in requirement.specifier, f"{requirement}: make lock"


def test_the_image_has_what_pip_needs_and_its_kernels() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = re.findall(r"(?m)^COPY --chown=ray (.*) \S+$", text)
    mounted = yaml.safe_load((ROOT / "cluster.yaml").read_text())["file_mounts"].values()
    mounts = [path for path in mounted if not path.startswith("~")]  # paths in the checkout
    assert {word for line in copied for word in line.split()} == {*mounts, LOCK}
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == {*mounts, LOCK}
    extras = re.findall(r"raykv-source\[([\w,-]+)\]", text)
    assert extras and not [extra for extra in extras[0].split(",") if extra not in EXTRAS]
    versions = re.findall(r"rayproject/ray:([\d.]+)-", text)
    assert {cluster["rayVersion"] for cluster in clusters()} == set(versions) == {locked()["ray"]}
    (code,) = re.findall(r'(?m)^RUN python -c "(.*)"$', text)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)
