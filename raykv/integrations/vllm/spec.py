"""Makes a connector's manager and worker for vLLM, with the pool's caches for an engine's chunks."""

from typing import Any

from vllm.v1.kv_offload.base import OffloadingSpec

from raykv.integrations.node import attach
from raykv.integrations.vllm.chunks.contents import DIGEST_BYTES
from raykv.integrations.vllm.identity.groups import first_parts
from raykv.integrations.vllm.scheduler.answers import Answers
from raykv.integrations.vllm.scheduler.counters import COUNTERS
from raykv.integrations.vllm.scheduler.manager import RayKVManager
from raykv.integrations.vllm.scheduler.threshold import threshold_of
from raykv.integrations.vllm.worker.pages import pages_of
from raykv.integrations.vllm.worker.worker import RayKVWorker


class RayKVOffloadingSpec(OffloadingSpec):  # type: ignore[misc]
    """Makes a cache of the pool for each part of an engine's chunks."""

    def __init__(self, config: Any) -> None:
        """config: vLLM's configuration, which `RayKVConnector` has extended."""
        super().__init__(config)
        self._pool = self.extra_config.get("pool", "default")
        self._arguments: dict[str, Any] = self.extra_config["cache"]
        self._drafter: dict[str, Any] = self.extra_config.get("drafter", self._arguments)
        self._manager: RayKVManager | None = None
        self._worker: RayKVWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return the manager's counters, by name."""
        return COUNTERS

    def get_manager(self) -> RayKVManager:
        """Return the scheduler's side, which is made at the first call."""
        if self._manager is None:
            stores, patience = any(self.extra_config["stores"]), self.extra_config["patience"]
            answers = Answers() if self.extra_config.get("answers") == "auto" else None
            threshold = threshold_of(self.extra_config)
            pool = attach(self._pool)
            self._manager = RayKVManager(pool, self._arguments, stores, patience, self._drafter, answers, threshold)
        return self._manager

    def get_worker(self, kv_caches: Any) -> RayKVWorker:
        """Return the worker's side on this rank, which is made at the first call.

        The worker uses memory of its node, or of its GPU if the GPU has a tier. kv_caches: vLLM's KV tensors.
        """
        if self._worker is None:
            device, rank = kv_caches.tensors[0].tensor.device, self.config.parallel.rank
            pool = attach(self._pool, None if device.type == "cpu" else str(device))
            parts, stores = self.extra_config["parts"], self.extra_config["stores"][rank]
            pages = pages_of(kv_caches, self.extra_config["drafts"])
            verifies = self.extra_config["verify_tokens"]
            firsts = first_parts((of.layers.of_drafter for of in pages), parts)
            caches = [
                {
                    part: pool.cache(
                        **(self._drafter if of.layers.of_drafter else self._arguments),
                        block_tokens=self.tokens_per_block[of.layers.group] * self.blocks_per_chunk,
                        block_bytes=of.rows.bytes * self.blocks_per_chunk // len(parts[rank]) + verifies * DIGEST_BYTES,
                        part=first + part,
                    )
                    for part in parts[rank]
                }
                for of, first in zip(pages, firsts, strict=True)
            ]
            self._worker = RayKVWorker(
                pool,
                caches,
                rank,
                pages,
                self.blocks_per_chunk,
                stores,
                verifies,
                self.extra_config["produces"],
            )
        return self._worker
