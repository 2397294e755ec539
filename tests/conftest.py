"""Fixtures of all tests: a Ray cluster of two nodes for the whole session, and pools with fresh names."""

import contextlib
import ctypes
import gc
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.project import durations
from hypothesis import HealthCheck, settings

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # or ray.init writes a token file into the home folder
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("SCAN_EVENT_DIR_INTERVAL_SECONDS", "3600")  # by default Ray reads a file of each worker every 2 s
os.environ.setdefault("REPORTER_UPDATE_INTERVAL_MS", "60000")  # by default Ray looks at each process every 5 s
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # or numpy starts threads in every process, which spin
TESTS = os.path.dirname(__file__)
ROOTS = (TESTS, os.path.dirname(TESTS))  # parents of helpers and of examples
# folders of modules with classes of actors, which workers import
ACTORS = {str(file.parent) for folder in ("cluster", "engines") for file in Path(TESTS, folder).rglob("test_*.py")}
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*ROOTS, *sorted(ACTORS), os.environ.get("PYTHONPATH"))))

if TYPE_CHECKING:
    import raykv
    from raykv.arena.gpu.device import Device

# plugins, and helpers whose failed assertions pytest is to explain
pytest.register_assert_rewrite("helpers.transports.nccl_nodes", "helpers.line.callers", "helpers.tiers.guarded_tier")
# a machine may be busy
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
MIB = 1 << 20
FULL = ("cluster", "engines", "documented")  # folders whose tests `make full` runs
NODE = {"num_cpus": 2, "object_store_memory": 256 * MIB}
_names = (f"t{os.getpid()}-{i}" for i in itertools.count())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-to", metavar="FILE", help="write what each file of tests took there, in seconds")
    parser.addoption("--part", metavar="K/N", default="1/1", help="one of N parts of what `make full` runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that only `make full` runs, and put the longest files first."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if "cluster" in getattr(item, "fixturenames", ()) and folder != "pool":
            item.add_marker("cluster")
        if folder in FULL and not item.get_closest_marker("promise"):
            item.add_marker("full")
    full = [item for item in items if item.get_closest_marker("full")]
    which, parts = map(int, config.getoption("--part").split("/"))
    chosen = durations.part((durations.file_of(item.nodeid) for item in full), which, parts)
    others = {item for item in full if durations.file_of(item.nodeid) not in chosen}
    if others:
        config.hook.pytest_deselected(items=list(others))
        items[:] = (item for item in items if item not in others)
    seconds = durations.read()
    items.sort(key=lambda item: -seconds.get(durations.file_of(item.nodeid), 0.0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from helpers.project.lanes import Lanes

    return Lanes(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Freeze the million imported objects: a garbage collection of them would take 0.7 s."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    if (file := config.getoption("--durations-to")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Durations(Path(file)))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two raylets on this machine. This process is a driver on the head's node."""
    import ray
    from ray.cluster_utils import Cluster

    unread = {"include_dashboard": False, "include_log_monitor": False}  # no test uses either
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, **unread})
    try:
        cluster.add_node(wait=True, **NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def start_for_module(cluster: Any) -> Iterator[Callable[..., "raykv.KVPool"]]:
    yield from _start()


@pytest.fixture
def start(cluster: Any) -> Iterator[Callable[..., "raykv.KVPool"]]:
    """A function that starts a pool with a long deadline and waits for all of its memory. Pools stop after the test."""
    yield from _start()


def _start() -> Iterator[Callable[..., "raykv.KVPool"]]:
    import ray
    from helpers.pools import PATIENCE_S, eventually, served, shm_files

    import raykv

    pools = []

    def start(**settings: Any) -> raykv.KVPool:
        defaults = {"name": next(_names), "cpu_memory": 64 * MIB, "deadline": PATIENCE_S}
        pool = raykv.start(raykv.PoolConfig(**{**defaults, **settings}))
        pools.append(pool)
        nodes = sum(node["Alive"] for node in ray.nodes())
        eventually(lambda: served(pool, nodes))
        return pool

    yield start
    for pool in pools:
        pool.stop()
        assert not shm_files(pool.name)


@pytest.fixture
def third_node(cluster: Any) -> Iterator[Callable[..., Any]]:
    """A function that adds a raylet. Raylets that are left are removed after the test."""
    yield from _add_node(cluster)


@pytest.fixture(scope="module")
def third_node_for_module(cluster: Any) -> Iterator[Callable[..., Any]]:
    yield from _add_node(cluster)


def _add_node(cluster: Any) -> Iterator[Callable[..., Any]]:
    import ray
    from helpers.pools import eventually

    added = []

    def add(**more: Any) -> Any:
        added.append(cluster.add_node(wait=True, **NODE, **more))
        return added[-1]

    yield add
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)  # gracefully, as Ray notices a killed raylet only after 15 s
    gone = {node.node_id for node in added}
    eventually(lambda: not gone & {node["NodeID"] for node in ray.nodes() if node["Alive"]})


@pytest.fixture(params=["plain", "tls"])
def plain_and_tls(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a test twice: with plain sockets, and with TLS as Ray uses it. Handshakes may take long on a busy machine."""
    from helpers.line import certificates
    from helpers.line.echo_server import PATIENCE_S

    from raykv.line import wire

    monkeypatch.setattr(wire, "HANDSHAKE_S", PATIENCE_S)
    with certificates.used(tmp_path) if request.param == "tls" else contextlib.nullcontext():
        yield


@pytest.fixture
def switching() -> Iterator[None]:
    """Have threads switch as often as Python allows, so that missing locks show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in for CuPy, imported anew, with two GPUs of 64 MiB."""
    from helpers.arena.gpus import ON_HOST, forget

    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "cupy"}
    monkeypatch.syspath_prepend(ON_HOST)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(ctypes, "CDLL", ctypes.CDLL)  # restores the CDLL that the stand-in replaces
    forget()
    yield importlib.import_module("cupy")
    gc.collect()  # finalizers of GPU memory need the stand-in, and an import in the midst of another test may fail it
    forget()
    sys.modules.update(before)


@pytest.fixture(params=["on_host", pytest.param("gpu", marks=pytest.mark.gpu)])
def cupy(request: pytest.FixtureRequest) -> Any:
    """CuPy: the stand-in, or the real one."""
    from raykv.arena.gpu import cuda, device

    if request.param == "on_host":
        return request.getfixturevalue("on_host")
    if not device.visible():
        pytest.skip("no GPU here")
    return cuda.cupy()


@pytest.fixture
def gpu(cupy: Any) -> "Device":
    from raykv.arena.gpu import device

    return device.device(device.visible()[0])
