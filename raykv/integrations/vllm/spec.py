"""What vLLM makes a connector's manager and worker by: the caches of the pool that an engine's chunks are in."""

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingSpec

from raykv.client.pool import KVPool
from raykv.integrations.vllm.manager import METRICS, RayKVManager
from raykv.integrations.vllm.node import attach
from raykv.integrations.vllm.worker import RayKVWorker


class RayKVOffloadingSpec(OffloadingSpec):  # type: ignore[misc]
    """A cache of the pool for each rank of an engine."""

    def __init__(self, config: Any) -> None:
        """config: vLLM's, with what `RayKVConnector` added to its extra configuration."""
        super().__init__(config)
        self._arguments = {
            **self.extra_config["cache"],
            "block_tokens": self.tokens_per_block[0] * self.blocks_per_chunk,
            "block_bytes": config.worker_kv_bytes_per_block * self.blocks_per_chunk,
        }
        self._manager: RayKVManager | None = None
        self._worker: RayKVWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Counters of the manager, by name."""
        return METRICS

    def get_manager(self) -> RayKVManager:
        """The scheduler's side, with a cache of every rank. Made at the first call."""
        if self._manager is None:
            ranks = self.config.parallel.tp_size
            pools = [self._attach(0)] * ranks if current_platform.is_cpu() else [*map(self._attach, range(ranks))]
            self._manager = RayKVManager(pools, self._arguments)
        return self._manager

    def _attach(self, rank: int) -> KVPool:
        """The pool, of the memory that a rank reads and writes first: its GPU's, if that has a tier."""
        gpu = None if current_platform.is_cpu() else current_platform.get_device_uuid(rank)
        return attach(self.extra_config.get("pool", "default"), gpu)

    def get_worker(self, kv_caches: Any) -> RayKVWorker:
        """This rank's side. kv_caches: vLLM's KV tensors. Made at the first call."""
        if self._worker is None:
            rank = self.config.parallel.rank
            pool = self._attach(rank)
            cache = pool.cache(**self._arguments, part=rank)
            self._worker = RayKVWorker(pool, cache, rank, kv_caches, self.blocks_per_chunk)
        return self._worker
