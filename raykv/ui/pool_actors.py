"""What Ray knows about a pool's actors. Queries to Ray cost the actors nothing."""

import time
from typing import Any, NamedTuple

from ray._private.state import actors

from raykv.cluster import named_actors


class Actor(NamedTuple):
    """An actor as Ray sees it.

    handle: handle for calls. state: state, as Ray names it. node_id: Ray node. restarts: number of restarts by Ray.
    uptime_s: seconds since its process was ready; None while the process is not ready.
    """

    handle: Any
    state: str
    node_id: str
    restarts: int
    uptime_s: float | None

    @property
    def is_alive(self) -> bool:
        return self.state == "ALIVE"


def look_up(name: str) -> Actor | None:
    """Return the actor of this name (see `named_actors`). None if Ray does not know it, or if it is dead for good."""
    try:
        handle = named_actors.find(name)
    except ValueError:
        return None
    found = actors(handle._actor_id.hex())
    if not found or found["State"] == "DEAD":
        return None
    alive = found["State"] == "ALIVE"  # if so, `Timestamp` is when the state began, by the clock of Ray's head
    uptime = max(0.0, time.time() - found["Timestamp"] / 1000) if alive else None
    return Actor(handle, found["State"], found["Address"]["NodeID"], found["NumRestarts"], uptime)
