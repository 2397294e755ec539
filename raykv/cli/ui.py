"""`raykv ui`: starts an actor on Ray's head that serves a pool's page, and prints the address."""

import ray
from ray.exceptions import RayActorError

from raykv import cluster
from raykv.cluster import named_actors
from raykv.errors import PoolNotFound, RayKVError, reason_of
from raykv.ui.actor import Place, start_page
from raykv.ui.pool_actors import look_up
from raykv.ui.ray_nodes import living_nodes

HOST, PORT = "127.0.0.1", 8270
ANSWER_S = 60.0  # seconds for the page's actor to answer: a new worker first imports Ray and raykv
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(pool: str, host: str | None, port: int | None) -> tuple[str, str]:
    """Start the page's actor, or find it. host, port: default to those of a running page, else HOST and PORT.

    Returns the page's URL, and a line on how to reach it from another machine; "" if `url` works there directly.

    Raises RayKVError if the page can't be served, and ValueError if it is already served at another host or port.
    """
    head = living_nodes()[0]
    name = named_actors.page_name(pool)
    found = look_up(name)
    if found is not None and found.node_id not in cluster.living():  # the actor is pinned to a head that is gone
        stop(pool)
    actor = start_page(pool, host or HOST, PORT if port is None else port, head.node_id)
    try:
        place: Place = ray.get(actor.place.remote(), timeout=ANSWER_S)
    except RayActorError as error:
        raise RayKVError(reason_of(error)) from None
    if (host or place.host) != place.host or (port or place.port) != place.port:
        raise ValueError(
            f"the page of pool {pool!r} is served at {_url(place)} already: "
            f"`raykv ui --stop --name {pool}` ends that, or leave --host and --port out"
        )
    tunnel = f"ssh -L {place.port}:127.0.0.1:{place.port} {head.host}"
    said = f"\nfrom another machine: {tunnel}, then the same address there" if place.host in LOOPBACK else ""
    return _url(place), said


def stop(pool: str) -> None:
    """Stop serving the page. Raises PoolNotFound if the page is not served."""
    try:
        ray.kill(named_actors.find(named_actors.page_name(pool)))
    except ValueError:
        raise PoolNotFound(f"no page of pool {pool!r} is served: `raykv ui --name {pool}` does so") from None


def _url(place: Place) -> str:
    host = place.node if place.host in ("0.0.0.0", "::") else place.host
    return f"http://[{host}]:{place.port}/" if ":" in host else f"http://{host}:{place.port}/"
