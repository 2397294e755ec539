"""After a process has left its Ray cluster, raykv's threads neither join nor start a cluster."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.exceptions import RaySystemError

from raykv.cluster import internal_kv, named_actors, ray_calls
from raykv.cluster.internal_kv import Kept
from raykv.line.directory_line import DirectoryLine
from raykv.protocol.calls import CLIENT

ROOT = Path(__file__).resolve().parents[3] / "raykv"
CALLS = {name for name in vars(ray_calls) if name in ray.__all__}
FOLDERS = ("client", "cluster", "line", "transports")


def test_an_actor_is_not_looked_for_without_a_cluster() -> None:
    assert not ray.is_initialized()
    with pytest.raises(RaySystemError, match="not been started"):
        named_actors.find("raykv/default/directory-1")
    assert not ray.is_initialized()


def test_a_line_finds_no_directory_without_a_cluster() -> None:
    """The directory's actor belongs to the cluster that the process has left."""
    line = DirectoryLine("default", CLIENT)
    line.actor = object()
    assert not line.find()
    with pytest.raises(ConnectionError):
        line.send("match")
    with pytest.raises(ray_calls.NotConnected, match=r"has left .* raykv\.attach\('default'\)"):
        internal_kv.names("default", Kept.RANK)
    assert not ray.is_initialized()


def test_threads_use_the_calls_that_join_no_cluster() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.name != "ray_calls.py"]
    used = {(str(path.relative_to(ROOT)), name) for path in paths for name in _names_of_ray(path)}
    assert not {(path, name) for path, name in used if name in CALLS | {"put", "cancel"}}
    assert ("cluster/__init__.py", "nodes") in used


def _names_of_ray(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ray":
            yield node.attr


def test_the_calls_are_known() -> None:
    assert {"get", "get_actor", "get_runtime_context", "kill", "wait"} == CALLS
