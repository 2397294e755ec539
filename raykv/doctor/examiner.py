"""What looks at a node from one of its Ray workers."""

import contextlib
import importlib
import importlib.metadata
import platform
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

CONNECT_S = 3.0
AT_A_TIME = 32  # connections


@ray.remote(num_cpus=0)
class Examiner:
    """Ray sends this class whole, so that it runs even where there is no raykv. So it uses nothing of raykv's."""

    def software(self) -> dict[str, str]:
        """Versions of `python`, `numba` and `raykv`; why raykv can't be used here as `why_not`, if it can't."""
        found = {"python": platform.python_version(), "numba": "none"}
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["numba"] = importlib.metadata.version("numba")
        try:
            found["raykv"] = str(importlib.import_module("raykv").__version__)
        except Exception as error:  # whatever a broken installation raises
            found["why_not"] = f"{error}" if isinstance(error, ImportError) else repr(error)
        return found

    def protocol(self) -> int:
        """The version of raykv's messages. ImportError where raykv can't be used."""
        for what in ("raykv.actors.node_store", "raykv.doctor.facts"):
            importlib.import_module(what)
        return int(importlib.import_module("raykv.protocol").VERSION)

    def facts(self) -> Any:
        """`raykv.doctor.facts.Facts`. ImportError where raykv can't be used."""
        return importlib.import_module("raykv.doctor.facts").look()

    def clock(self) -> float:
        """The wall clock."""
        return time.time()

    def listen(self) -> tuple[str, int]:
        """(host, port) where this node listens from now on, as the lanes between stores do. OSError if it can't."""
        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._door = socket.create_server((host, 0), family=family, backlog=1024)  # the system accepts for it
        return host, int(self._door.getsockname()[1])

    def reach(self, doors: list[tuple[str, int]]) -> list[str]:
        """Why this node can't connect there, for each (host, port); "" where it can."""

        def why_not(door: tuple[str, int]) -> str:
            try:
                socket.create_connection(door, CONNECT_S).close()
            except OSError as error:
                return error.strerror or str(error)
            return ""

        with ThreadPoolExecutor(AT_A_TIME) as threads:
            return list(threads.map(why_not, doors))
