"""The manager's counters, which are among vLLM's metrics."""

from vllm.v1.kv_offload.base import OffloadingCounterMetadata

ASKED, HITS, FAILED = "vllm:raykv_asked_chunks", "vllm:raykv_hit_chunks", "vllm:raykv_failed_loads"
WAITED, LEFT_OUT = "vllm:raykv_waits", "vllm:raykv_left_out_chunks"
COUNTERS = {
    ASKED: OffloadingCounterMetadata("Chunks that requests asked the raykv pool for."),
    HITS: OffloadingCounterMetadata("Of them, chunks that were leased in the memory of any node."),
    FAILED: OffloadingCounterMetadata("Requests that were computed because a load from the raykv pool failed."),
    WAITED: OffloadingCounterMetadata("Requests that waited for chunks which another engine computed or stored."),
    LEFT_OUT: OffloadingCounterMetadata("Chunks that were not stored: answers left out, or below store_threshold."),
}
