"""Takes this process out of the Ray cluster that its tests share."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray


@contextmanager
def outside() -> Iterator[None]:
    """Leave the shared cluster, so that the `with` block may join another, and join the shared one again afterwards."""
    shared = ray.get_runtime_context().gcs_address if ray.is_initialized() else ""
    ray.shutdown()
    try:
        yield
    finally:
        ray.shutdown()
        if shared:
            ray.init(address=shared, log_to_driver=False)
