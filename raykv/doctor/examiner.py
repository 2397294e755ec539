"""The checks that run on a node. They are tasks: an actor would stay on the Actors page of Ray's dashboard.

Ray sends the whole code of these functions, so they run even on nodes without raykv. The functions import raykv by
name, only when they run.
"""

import contextlib
import importlib
import importlib.metadata
import platform
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

CONNECT_S = 3.0  # deadline for a connection to another node's port
AT_A_TIME = 32  # maximum number of connections at a time


@ray.remote(num_cpus=0, max_retries=0)
def software() -> dict[str, str]:
    """Return the versions of `python`, `numba` and `raykv`. If raykv can't be used, `why_not` is the reason."""
    found = {"python": platform.python_version(), "numba": "none"}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["numba"] = importlib.metadata.version("numba")
    try:
        found["raykv"] = str(importlib.import_module("raykv").__version__)
    except Exception as error:  # a broken installation may raise anything
        found["why_not"] = f"{error}" if isinstance(error, ImportError) else repr(error)
    return found


@ray.remote(num_cpus=0, max_retries=0)
def protocol() -> int:
    """Return the version of raykv's messages. Raises ImportError if raykv can't be used."""
    for what in ("raykv.actors.store.node_store", "raykv.doctor.facts"):
        importlib.import_module(what)
    return int(importlib.import_module("raykv.protocol.calls").VERSION)


@ray.remote(num_cpus=0, max_retries=0)
def facts() -> Any:
    """Return `raykv.doctor.facts.Facts`. Raises ImportError if raykv can't be used."""
    return importlib.import_module("raykv.doctor.facts").look()


@ray.remote(num_cpus=0, max_retries=0)
def clock() -> float:
    """Return the time of the wall clock."""
    return time.time()


@ray.remote(num_cpus=0, max_retries=0, _generator_backpressure_num_objects=1)  # type: ignore[call-overload, untyped-decorator]
def listen() -> Iterator[tuple[str, int]]:
    """Listen at a port, as this node's store would, until the caller drops the generator. Yields (host, port).

    Raises OSError if the node can't listen.
    """
    host = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=1024) as door:  # the kernel accepts connections
        for _ in range(2):  # Ray continues when the caller asks for the second answer, or drops the generator
            yield host, int(door.getsockname()[1])


@ray.remote(num_cpus=0, max_retries=0)
def reach(doors: list[tuple[str, int]]) -> list[str]:
    """Return for each (host, port) the reason why this node can't connect, or "" if it can."""

    def why_not(door: tuple[str, int]) -> str:
        try:
            socket.create_connection(door, CONNECT_S).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    with ThreadPoolExecutor(AT_A_TIME) as threads:
        return list(threads.map(why_not, doors))
