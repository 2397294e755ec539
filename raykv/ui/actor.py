"""The actor that watches a pool and serves its page. The pool does not depend on this actor."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ray

from raykv.cluster import named_actors
from raykv.errors import RayKVError
from raykv.line.periodic import Periodic
from raykv.system import events
from raykv.system.extras import to_install
from raykv.ui.history import History
from raykv.ui.overview import look

log = logging.getLogger("raykv")
LOOK_S = 2.0  # seconds between two looks while a page is open
IDLE_LOOK_S = 10.0  # seconds between two looks while no page is open; a look costs the directory 5 ms per million slots
OPEN_S = 10.0  # seconds after the last request of a page, until the page counts as closed
BACKLOG = 64
CONNECTIONS = 256  # maximum number of connections; the server tells further clients to try again


class Place(NamedTuple):
    """Where a page is served. node: the node's address in Ray."""

    host: str
    port: int
    node: str


class PageActor:
    """Looks at a pool every few seconds, keeps its history, and serves the page."""

    def __init__(self, pool: str, host: str, port: int) -> None:
        """port: 0 for any free port.

        Raises RayKVError if Starlette or uvicorn is not installed, or if the port is not available.
        """
        self._pool = pool
        events.begin(named_actors.restarted(), role="ui", pool=pool, pid=os.getpid())
        self._server = _server(self._state, host)
        self._socket = _listen(host, port)
        self._place = Place(host, int(self._socket.getsockname()[1]), str(ray.util.get_node_ip_address()))
        self._history, self._trouble, self._asked = History(), "", 0.0
        self._loop = Periodic("raykv-look", self._look_once, self._on_error)
        self._loop.start()
        run = threading.Thread(target=self._server.run, args=([self._socket],), name="raykv-ui", daemon=True)
        run.start()
        events.tell("serve", host=host, port=self._place.port)

    def __repr__(self) -> str:
        return f"Page(pool={self._pool})"

    def ping(self) -> int:
        return os.getpid()

    def place(self) -> Place:
        """Where the page is served."""
        return self._place

    def _state(self, after: float) -> dict[str, Any]:
        """The page's JSON: History.since, `time`, `run` (the process id), and `trouble` (why the last look failed)."""
        if time.monotonic() > self._asked + OPEN_S:
            self._loop.wake()
        self._asked = time.monotonic()
        return {**self._history.since(after), "time": time.time(), "run": os.getpid(), "trouble": self._trouble}

    def _look_once(self) -> float:
        self._history.add(look(self._pool), time.time())
        self._trouble = ""
        return self._pause()

    def _on_error(self, error: Exception) -> float:
        self._trouble = f"the pool can't be seen: {error}"
        log.warning("%s", self._trouble)
        return self._pause()

    def _pause(self) -> float:
        is_open = time.monotonic() < self._asked + OPEN_S
        return self._loop.rest_of(LOOK_S if is_open else IDLE_LOOK_S)


def _server(state: Callable[[float], dict[str, Any]], host: str) -> Any:
    try:
        import uvicorn

        from raykv.ui.server import application
    except ImportError as error:
        raise RayKVError(
            f"raykv ui needs Starlette and uvicorn where it is served, on Ray's head ({error}): "
            f"{to_install('ui')} there"
        ) from error
    config = uvicorn.Config(
        application(state, host),
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
    )
    return uvicorn.Server(config)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise RayKVError(
            f"the page can't be served at {host}:{port}: {error.strerror}. Give another --port, 0 for any "
            f"that is free, or another --host"
        ) from error


def start_page(pool: str, host: str, port: int, node_id: str) -> Any:
    """Start the actor on a node, or find it. Returns at once."""
    options = named_actors.options(named_actors.page_name(pool), node_id, threads=2)
    return ray.remote(PageActor).options(**options).remote(pool, host, port)
