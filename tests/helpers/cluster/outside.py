"""Outside of the Ray cluster that the tests of this process share."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray


@contextmanager
def outside() -> Iterator[None]:
    """This process may join another cluster meanwhile, and is in the shared one again afterwards, if it was."""
    shared = ray.get_runtime_context().gcs_address if ray.is_initialized() else ""
    ray.shutdown()
    try:
        yield
    finally:
        ray.shutdown()
        if shared:
            ray.init(address=shared, log_to_driver=False)
