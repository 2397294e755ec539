"""The differences between the versions of vLLM that raykv supports. Only this module asks for the version.

| vLLM | difference |
| --- | --- |
| before 0.30 | workers report failed loads by block, for only one KV cache group |
| before 0.30 | vLLM stores a block that ends with a request's last token, whose KV was never computed |
| before 0.31 | a KV cache has no `kv_tp_replicas`; extra keys of a block's hash are published unchanged |
| before 0.31 | a request can't limit how many tokens are loaded, and has no `kv_hints` |
| before 0.32 | a continued session keeps hashes of dropped tokens, so raykv stores no further chunks of the session |
| from 0.33 on | loads may be `expedited` (done within a step), which `RayKVConnector` turns off |
"""

from __future__ import annotations

import logging
import re
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core import kv_cache_utils

from raykv.integrations.vllm.chunks import hints

log = logging.getLogger("raykv")

OLDEST, NEWEST = (0, 29), (0, 33)  # versions of vLLM; these two and all versions between were tested
INSTALL = "pip install 'vllm>=0.29,<0.34'"
# With `kv_offloading_size`, vLLM looks for one of these names in our module, instead of the configured name
REPLACING = ("OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheConnectorV1", "LMCacheMPConnector")


def check_version(version: str) -> None:
    """Raise ValueError if vLLM is too old.

    An untested newer version causes only a warning, as an error would leave the engine without a cache.
    """
    minor = _minor(version)
    if minor and minor < OLDEST:
        raise ValueError(f"vLLM {version} is installed, but raykv supports 0.29 to 0.33: {INSTALL}")
    if not minor or minor > NEWEST:
        log.warning("vLLM %s was never tried with raykv, which knows 0.29 to 0.33. If it fails: %s", version, INSTALL)


def _minor(version: str) -> tuple[int, int] | None:
    """Return (major, minor), or None for a version without numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def knows_strides(version: str) -> bool:
    """Whether decode context parallelism works with a connector. In 0.29, attention reads KV by a wrong interleave."""
    return (_minor(version) or NEWEST) >= (0, 30)


def missing(module: str, name: str) -> Exception:
    """Return the error for a connector name that our modules lack."""
    if name in REPLACING:
        return ValueError(
            f"kv_offloading_size has vLLM use its own {name} in the place of raykv's connector: leave "
            f"kv_offloading_size out, or kv_transfer_config"
        )
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def kv_replicas(kv_cache_config: Any, tensor: int) -> int:
    """Return how many ranks have the same latent of an MLA model. tensor: tensor-parallel size."""
    return getattr(kv_cache_config, "kv_tp_replicas", tensor)  # before 0.31 all ranks had the same latent


def load_limit(status: Any) -> int | None:
    """Return how many tokens a request allows to load, or None for any number. status: vLLM's state of the request."""
    return getattr(status, "max_load_tokens", None)


def hint_of(request: Any) -> hints.Hint:
    """Return a request's hint about its session."""
    return hints.hint_of(request.kv_transfer_params, request.session_id, getattr(request, "kv_hints", None))


# converts results of generate_block_hash_extra_keys, one per block, to the form used in KV events
event_extra_keys: Any = getattr(kv_cache_utils, "to_event_extra_keys", list)


class ByRequest(OffloadingConnector):  # type: ignore[misc]
    """A connector whose workers tell the scheduler's side which requests had a failed load."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        requests = dict(self.connector_worker._load_jobs)
        sent, received = self.get_finished(finished_req_ids)
        failed = {requests[job] for job in self.connector_worker.worker.take_failed()}
        return base.KVConnectorTransferResults(sent, received, failed)

    def failed_requests(self, connector_output: Any) -> set[str]:
        """Return the requests whose load failed, as the workers reported in this step."""
        return set(connector_output.failed_recving or ())


class ByBlock(OffloadingConnector):  # type: ignore[misc]
    """A connector whose workers report missing blocks. The scheduler's side finds the requests of these blocks."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            _leave_out_last_sampled(self.connector_scheduler)
        self._loads: dict[str, set[int]] = {}  # blocks of each request that loads

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {block for blocks in self.connector_worker.worker.take_failed().values() for block in blocks}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._loads[request.request_id] = set(blocks.get_block_ids()[0])

    def failed_requests(self, connector_output: Any) -> set[str]:
        """Return the requests whose load failed, as the workers reported in this step."""
        missing = connector_output.invalid_block_ids
        failed = {request for request, blocks in self._loads.items() if not blocks.isdisjoint(missing)}
        for request in connector_output.finished_recving or ():
            self._loads.pop(request, None)
        return failed


def _leave_out_last_sampled(scheduler: Any) -> None:
    """Make `scheduler` skip a block that ends with a request's last token. This token was sampled, but not computed."""
    count = scheduler._calc_num_offloadable_tokens

    def computed(status: Any, tokens: int) -> int:
        if status.req.is_finished():
            tokens = min(tokens, max(status.req.num_prompt_tokens, status.req.num_tokens - 1))
        return int(count(status, tokens))

    scheduler._calc_num_offloadable_tokens = computed


TRIMS_HASHES = (_minor(vllm.__version__) or NEWEST) >= (0, 32)  # whether vLLM drops the hashes of dropped tokens
TAKES_GROUPS = hasattr(base, "KVConnectorTransferResults")  # whether several KV cache groups are supported
Connector: Any = ByRequest if TAKES_GROUPS else ByBlock
