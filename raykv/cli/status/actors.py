"""What Ray knows of a pool's actors. It costs them nothing."""

import time
from typing import Any, NamedTuple

from ray._private.state import actors

from raykv.cluster import named_actors


class Actor(NamedTuple):
    """An actor as Ray sees it.

    handle: to call it. state: Ray's word. node_id: the Ray node it is on. restarts: by Ray, since it was created.
    uptime_s: since its process was ready; None where it is not.
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
    """The actor of that name (see `named_actors`). None where Ray knows of none, or of none that may come back."""
    try:
        handle = named_actors.find(name)
    except ValueError:
        return None
    found = actors(handle._actor_id.hex())
    if not found or found["State"] == "DEAD":
        return None
    alive = found["State"] == "ALIVE"  # `Timestamp` is when that began, by the clock of Ray's head
    uptime = max(0.0, time.time() - found["Timestamp"] / 1000) if alive else None
    return Actor(handle, found["State"], found["Address"]["NodeID"], found["NumRestarts"], uptime)
