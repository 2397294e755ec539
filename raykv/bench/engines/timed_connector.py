"""The vLLM connector, which also measures the time that vLLM spends in the connector."""

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from raykv.integrations.vllm import connector
from raykv.integrations.vllm.connector import RayKVConnector


def kv_transfer_config(pool: str, folder: str, role: str = "kv_both") -> dict[str, Any]:
    """Like the integration's function. folder: where each process writes its seconds in the connector to a file."""
    transfer = connector.kv_transfer_config(pool, role)
    transfer["kv_connector_extra_config"]["seconds"] = folder
    return {**transfer, "kv_connector": TimedConnector.__name__, "kv_connector_module_path": __name__}


class TimedConnector(RayKVConnector):
    """A connector that sums the time that vLLM spends in the connector's public methods."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        folder = vllm_config.kv_transfer_config.kv_connector_extra_config["seconds"]
        self.seconds = np.memmap(f"{folder}/{role.name}", np.float64, "w+", shape=1)
        self.inside = False
        super().__init__(vllm_config, role, kv_cache_config)


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(self: TimedConnector, *args: Any, **kwargs: Any) -> Any:
        if self.inside:  # called by another timed method
            return method(self, *args, **kwargs)
        self.inside = True
        begin = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.seconds[0] += time.perf_counter() - begin
            self.inside = False

    return timed


for _name, _method in inspect.getmembers(RayKVConnector, inspect.isfunction):
    if not _name.startswith("_"):
        setattr(TimedConnector, _name, _timed(_method))
