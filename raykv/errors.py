"""Errors that users may catch. A fault of the pool is a miss, not an error. DeviceError stays inside raykv."""


class RayKVError(Exception):
    """Base of every error that raykv raises on purpose."""


class PoolNotFound(RayKVError):
    """No pool of that name runs in this Ray cluster, or there is no cluster."""


class CapacityError(RayKVError):
    """A node does not have the memory that it was asked to provide."""


class ProtocolMismatch(RayKVError):
    """Another version of raykv started the pool, and this version does not understand its messages."""


class ArenaMismatch(RayKVError):
    """This process can't see the shared memory that its node's store uses."""


class DeviceError(RayKVError):
    """A GPU failed. Code that copies from or to the GPU treats this error as a miss.

    status: CUDA's error number, or 0.
    """

    status = 0


def reason_of(error: BaseException) -> str:
    """Return an error's own text, without the remote traceback and the exception's name that Ray puts before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else repr(error)
    name, colon, text = last.partition(": ")
    return text if colon and name.rpartition(".")[2].endswith("Error") and "." in name and text else last
