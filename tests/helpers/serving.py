"""What Ray Serve says of an application."""

from ray import serve


def serves(name: str) -> bool:
    """Whether an application runs, and its proxies answer. One that failed raises AssertionError."""
    status = serve.status()
    if name not in status.applications:
        return False
    found = status.applications[name]
    assert found.status in ("NOT_STARTED", "DEPLOYING", "RUNNING"), found
    return found.status == "RUNNING" and all(one == "HEALTHY" for one in status.proxies.values())
