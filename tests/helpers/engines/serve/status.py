"""The state of a Ray Serve application, by Ray's dashboard: this process need not have started Serve."""

import json
from urllib.request import urlopen


def serves(dashboard: str, name: str) -> bool:
    """Whether an application runs and its proxies answer. AssertionError if the application has failed."""
    with urlopen(f"http://{dashboard}/api/serve/applications/", timeout=60) as answer:
        said = json.load(answer)
    if name not in said["applications"]:
        return False
    found = said["applications"][name]
    assert found["status"] in ("NOT_STARTED", "DEPLOYING", "RUNNING"), found
    return found["status"] == "RUNNING" and all(proxy["status"] == "HEALTHY" for proxy in said["proxies"].values())
