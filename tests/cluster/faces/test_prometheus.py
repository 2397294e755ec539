"""A real Prometheus finds the metrics of a pool of two nodes at Ray's endpoints."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from helpers.faces.command_line import command
from helpers.faces.prometheus import Prometheus
from helpers.pools import (
    BLOCK,
    MIB,
    come_back,
    eventually,
    keep,
    kill,
    locations,
    other_node,
    read,
    store,
    tokens,
    totals,
    worker,
)

import raykv
from raykv.metrics.dashboard import ALERTS, DASHBOARD, PANELS, RULES, expression
from raykv.metrics.metric import METRICS, PREFIX

RARE = {
    "pull_failures_total",
    "external_faults_total",
    "corrupt_blocks_total",
    "altered_blocks_total",
    "without_directory_seconds_total",
}  # these events did not happen
pytestmark = [pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def pool(start_for_module: Callable[..., raykv.KVPool], tmp_path_factory: pytest.TempPathFactory) -> raykv.KVPool:
    folder = tmp_path_factory.mktemp("tier")
    return start_for_module(cpu_memory=32 * MIB, external=f"file://{folder}?capacity=256MiB", secret=b"metrics")


@pytest.fixture(scope="module")
def prometheus(pool: raykv.KVPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if not shutil.which("prometheus") and not os.environ.get("CI"):
        pytest.skip("prometheus is not installed")
    server = Prometheus(tmp_path_factory.mktemp("prometheus"))
    yield server
    server.close()


def of(pool: raykv.KVPool, name: str, **tags: str) -> str:
    """The selector of a metric with these tags."""
    wanted = ",".join(f'{tag}="{value}"' for tag, value in {"pool": pool.name, **tags}.items())
    return f"ray_{PREFIX}{name}{{{wanted}}}"


def a_cache(pool: raykv.KVPool) -> raykv.KVCache:
    return pool.cache(model="a-model", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)


def counted(prometheus: Prometheus, pool: raykv.KVPool, name: str, **tags: str) -> float:
    """The value of a metric of the directory in charge. A killed directory's may be exported a little longer."""
    return prometheus.value(f"max({of(pool, name, **tags)})")


def test_hits_are_counted_by_where_they_came_from(pool: raykv.KVPool, prometheus: Prometheus) -> None:
    cache, there = a_cache(pool), worker(pool, other_node(pool))
    own, others = (cache.keys(tokens(seed, 8)) for seed in (1, 2))
    keep(cache, own)
    assert ray.get(there.cache.remote(model="a-model")) is not None
    assert ray.get(there.store.remote(others, model="a-model")) == 8
    eventually(lambda: totals(pool)["ready"] == 16)
    before = pool.stats()
    for _ in range(3):
        assert read(cache, own).read == 8
    assert read(cache, others).read == 8
    after = pool.stats()
    asked = {name: after[name] - before[name] for name in ("lookups", "hits", "remote_hits")}
    assert asked == {"lookups": 32, "hits": 32, "remote_hits": 8}
    here = after["hits"] - after["remote_hits"] - after["external_hits"]
    # One by one: Ray's agent gets a process's counters in several messages, and may be scraped between two.
    eventually(lambda: counted(prometheus, pool, "lookup_blocks_total") == after["lookups"])
    eventually(lambda: counted(prometheus, pool, "hit_blocks_total", source="node") == after["remote_hits"])
    eventually(lambda: counted(prometheus, pool, "hit_blocks_total", source="memory") == here)
    saved = f"sum({of(pool, 'saved_tokens_total', model='a-model', node=pool.node_id)})"
    eventually(lambda: prometheus.value(saved) >= 16 * 32)
    read_elsewhere = f"sum({of(pool, 'hit_tokens_total', source='node')})"
    eventually(lambda: prometheus.value(read_elsewhere) == 16 * 8)
    pulled = f"sum({of(pool, 'pulled_bytes_total', node=pool.node_id)})"
    eventually(lambda: prometheus.value(pulled) == 8 * BLOCK)


def test_every_metric_is_there_with_its_tags(pool: raykv.KVPool, prometheus: Prometheus) -> None:
    cache = a_cache(pool)
    for seed in range(10, 30):  # more than memory holds
        store(cache, cache.keys(tokens(seed, 16)))
    held = [cache.match(cache.keys(tokens(seed, 16))) for seed in range(22, 30)]
    cache.swap_out(np.zeros((2, BLOCK), np.uint8), [0, 1], "a request").result()
    for seed in range(50, 60):
        store(cache, cache.keys(tokens(seed, 16)))
    assert cache.touch(cache.keys(tokens(59, 16)), until=time.time() + 60)
    assert cache.done(cache.keys(tokens(59, 16)))
    pool.session.directory.fault("a kind", "of a test")
    wanted = {name: metric for name, metric in METRICS.items() if name not in RARE | {"refused_blocks_total"}}
    for name, metric in wanted.items():
        suffix = "_count" if metric.kind == "histogram" else ""
        found = eventually(lambda name=name, suffix=suffix: prometheus.query(of(pool, name + suffix)))  # type: ignore[misc]
        for labels, _ in found:
            assert all(labels.get(tag) for tag in metric.tags if tag != "tenant"), (name, labels)
    for match in held:
        match.release()
    nodes = {labels["node"] for labels, value in prometheus.query(of(pool, "store_up")) if value == 1}
    assert nodes == {pool.node_id, other_node(pool)}
    assert prometheus.value(of(pool, "directory_up")) == 1 and prometheus.value(of(pool, "ray_nodes")) == 2


def test_every_panel_shows_something(pool: raykv.KVPool, prometheus: Prometheus) -> None:
    for panel in PANELS:
        for legend, text in panel.lines:
            asked = expression(text, f'{{pool="{pool.name}"}}').replace("[5m]", "[1m]")
            assert eventually(lambda asked=asked: prometheus.query(asked)), (panel.title, legend)  # type: ignore[misc]
    for alert in ALERTS:
        assert not prometheus.query(expression(alert.expression)) or alert.name == "RayKVTooSmall"


def test_promtool_reads_the_rules(tmp_path: Path) -> None:
    done = command("dashboard", "--out", str(tmp_path))
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2
    checked = subprocess.run(["promtool", "check", "rules", tmp_path / RULES], capture_output=True, text=True)
    assert checked.returncode == 0 and f"{len(ALERTS)} rules found" in checked.stdout, checked.stderr
    panels = json.loads((tmp_path / DASHBOARD).read_text())["panels"]
    assert len(panels) == len(PANELS)


def test_counters_do_not_go_back_when_a_store_and_the_directory_are_killed(
    pool: raykv.KVPool, prometheus: Prometheus
) -> None:
    cache = a_cache(pool)
    keys = cache.keys(tokens(90, 8))
    keep(cache, keys)
    asked = pool.stats()["lookups"]
    eventually(lambda: counted(prometheus, pool, "lookup_blocks_total") == asked)
    epoch, started = (prometheus.value(f"max({of(pool, name)})") for name in ("directory_epoch", "start_time_seconds"))
    kill(pool, "directory", pool.node_id)
    come_back(cache, [keys])
    now = pool.stats()["lookups"]
    assert now >= asked + 8
    eventually(lambda: counted(prometheus, pool, "lookup_blocks_total") >= now)
    eventually(lambda: prometheus.value(f"max({of(pool, 'directory_epoch')})") > epoch)
    eventually(lambda: prometheus.value(f"max({of(pool, 'start_time_seconds', role='store')})") > started)
    assert len(locations(pool, cache, keys)) == 8
    lost = f"sum({of(pool, 'without_directory_seconds_total', node=pool.node_id)})"
    assert eventually(lambda: prometheus.value(lost)) < 60
