"""Ray's calls, for threads of ours that may outlive `ray.shutdown()`: RaySystemError after it.

Ray's own names start or join a cluster in a process without one.
"""

from collections.abc import Callable
from typing import Any

import ray


def _bare(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call inside `ray._private.auto_init_hook.wrap_auto_init`."""
    bare: Callable[..., Any] = getattr(call, "__wrapped__", call)
    return bare


get = _bare(ray.get)
get_actor = _bare(ray.get_actor)
get_runtime_context = _bare(ray.get_runtime_context)
kill = _bare(ray.kill)
wait = _bare(ray.wait)
