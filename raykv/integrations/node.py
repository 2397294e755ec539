"""Attaches an engine's own processes, which Ray did not start, to a pool."""

import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from raykv.client import pool as pools
from raykv.config import NAMESPACE


def attach(pool: str, gpu: str | None = None) -> pools.KVPool:
    """Attach this process, which runs under a Ray actor, to the pool on the actor's node.

    Ray treats the process as a separate driver. On its own it might connect to another raylet of the machine, which has
    another arena. gpu: see `device` in `raykv.attach`.
    """
    with _own_random():
        raylet = _raylet()
        if raylet is None:
            return pools.attach(pool, device=gpu)
        node_id, address = raylet
        if not ray.is_initialized():
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        return pools.attach(pool, node_id=node_id, device=gpu)


@contextmanager
def _own_random() -> Iterator[None]:
    """Make random numbers differ between processes inside this context. Engines seed all ranks alike.

    Ray names its subscriptions by random numbers. Two drivers with the same name would take over each other's long
    polls, a thousand times a second.
    """
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


def _raylet() -> tuple[str, str] | None:
    """Return (node id, GCS address) of the raylet that started the actor above this process, or None if unknown."""
    try:
        line = Path(f"/proc/{os.environ['RAY_RAYLET_PID']}/cmdline").read_text(encoding="utf-8")
    except (KeyError, OSError):
        return None
    found = {name: re.search(rf"--{name}[=\0]([^\0 ]+)", line) for name in ("node_id", "gcs-address")}
    if not all(found.values()):
        return None
    return found["node_id"][1], found["gcs-address"][1]  # type: ignore[index]
