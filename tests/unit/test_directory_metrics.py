"""What a directory leaves to the one after it, with a registry that stands in for Ray's."""

import json
import threading

import pytest
from helpers.directory_pool import KEYS, Pool

from raykv.actors.directory_metrics import DirectoryMetrics
from raykv.registry import InCharge


def test_a_directory_that_was_replaced_leaves_the_totals_of_the_other_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, bytes] = {}
    in_charge = [InCharge("p/directory-1", None)]
    monkeypatch.setattr("raykv.registry.get", lambda pool, key: kept.get(key))
    monkeypatch.setattr("raykv.registry.put", lambda pool, key, value: kept.update({key: value}))
    monkeypatch.setattr("raykv.registry.in_charge", lambda pool: in_charge[-1])

    def step(name: str, pool: Pool, metrics: DirectoryMetrics) -> None:
        pool.read("a", KEYS[:4])
        metrics._directory, metrics._lock = pool.directory, threading.Lock()
        metrics._pool_figures()

    def begin(name: str) -> tuple[str, Pool, DirectoryMetrics]:
        pool, metrics = Pool(), DirectoryMetrics("p", name)
        pool.directory.resume(metrics.saved())
        return name, pool, metrics

    first = begin("p/directory-1")
    step(*first)
    second = begin("p/directory-2")
    in_charge.append(InCharge("p/directory-2", None))
    step(*second)
    step(*second)
    step(*first)  # it was stopped, comes back, and does not know yet
    assert json.loads(kept["totals"])["lookups"] == 12
