"""Ray's calls, for raykv's threads that may outlive `ray.shutdown()`.

After a shutdown, these calls raise RaySystemError. Ray's public functions, such as `ray.get`, would start or join a
cluster instead.
"""

from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.exceptions import RayError

from raykv.errors import RayKVError


class NotConnected(RayKVError, RayError):
    """This process is in no Ray cluster. raykv's threads catch this error as a RayError, users as a RayKVError."""


def check_connected(pool: str) -> None:
    """Raise NotConnected in a process that has left its Ray cluster. pool: name of the wanted pool."""
    if not ray.is_initialized():
        raise NotConnected(
            f"this process has left the Ray cluster of pool {pool!r} by ray.shutdown(): join it again with "
            f"raykv.attach({pool!r})"
        )


def _bare(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside Ray's `wrap_auto_init` wrapper, or the function itself if Ray has no such wrapper."""
    if call.__code__.co_name != "auto_init_wrapper":
        return call
    bare: Callable[..., Any] = call.__wrapped__  # type: ignore[attr-defined]
    return bare


get = _bare(ray.get)
get_actor = _bare(ray.get_actor)
get_runtime_context = _bare(ray.get_runtime_context)
kill = _bare(ray.kill)
wait = _bare(ray.wait)


def finished(answers: Collection[Any], seconds: float) -> list[Any]:
    """Return the answers that arrive within `seconds`. Returns early if all have arrived."""
    done: list[Any] = wait(list(answers), num_returns=len(answers), timeout=seconds)[0] if answers else []
    return done
