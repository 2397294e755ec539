"""Our spec in place of the one in vLLM's tests: with our manager, and vLLM's mock of a worker."""

from __future__ import annotations

import itertools
from typing import Any

from contract.manager import Told
from tests.v1.kv_connector.unit.offloading_connector.utils import (
    MockLoadStoreSpec,
    MockOffloadingSpec,
    MockOffloadingWorker,
)
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from raykv.integrations.vllm.scheduler.waiting import PATIENCE
from raykv.integrations.vllm.spec import RayKVOffloadingSpec

numbers = itertools.count()


def arguments() -> dict[str, Any]:
    """Arguments of a cache that no other test has."""
    return {"model": f"contract-{next(numbers)}", "dtype": "uint8", "layout": "rows"}


class Worker(MockOffloadingWorker):  # type: ignore[misc]
    """vLLM's mock of a worker, which copies nothing, with the methods that our connector calls beside vLLM's."""

    def computes(self) -> None:
        """An engine's step began."""

    pause = computes


class Spec(MockOffloadingSpec):  # type: ignore[misc]
    """Takes the configuration of vLLM's tests, with or without the fields that our connector adds."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.handler = Worker()

    def get_manager(self) -> Told:
        extra = self.extra_config
        extra.setdefault("parts", [[0]])
        extra.setdefault("stores", [True])
        extra.setdefault("patience", PATIENCE)
        extra["cache"] = extra.get("cache", {}) | arguments()
        told = Told(RayKVOffloadingSpec(self.config).get_manager())
        told.lookup.return_value = LookupResult.MISS
        told.get_load_source.return_value = CacheHitSource.EXTERNAL_UNSPECIFIED
        told.on_new_request.return_value = RequestOffloadingContext()
        told.prepare_load = lambda keys, req_context: MockLoadStoreSpec(told.load(keys, req_context))
        self.manager = told
        return told
