"""Ray's calls, for raykv's threads that may outlive `ray.shutdown()`.

After a shutdown these calls raise RaySystemError. Ray's public `ray.get` and so on would start or join a cluster
instead.
"""

from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.exceptions import RayError

from raykv.errors import RayKVError


class NotConnected(RayKVError, RayError):
    """This process is in no Ray cluster. To raykv's threads this is an error of Ray's, to users an error of raykv's."""


def check_connected(pool: str) -> None:
    """NotConnected in a process that has left its Ray cluster. pool: name of the wanted pool."""
    if not ray.is_initialized():
        raise NotConnected(
            f"this process has left the Ray cluster of pool {pool!r} by ray.shutdown(): join it again with "
            f"raykv.attach({pool!r})"
        )


def _bare(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call inside `ray._private.auto_init_hook.wrap_auto_init`; the call itself in a Ray without such wrappers."""
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
    """The answers that come within `seconds`. Returns early if all come."""
    done: list[Any] = wait(list(answers), num_returns=len(answers), timeout=seconds)[0] if answers else []
    return done
