"""A test with vLLM's scheduler: a hit of windows and states ends where the scheduler ends the load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.v1.kv_connector.unit.conftest import _mock_cpu_backend_block_sizes  # noqa: F401
from tests.v1.kv_connector.unit.offloading_connector.utils import generate_store_output, request_runner  # noqa: F401
from tests.v1.kv_connector.unit.utils import EOS_TOKEN_ID
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import LookupResult

SIZES: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


@pytest.mark.parametrize(("allowed", "loaded"), [(9, 2), (12, 2), (13, 3), (None, 4)])
def test_a_request_that_limits_what_is_loaded_finds_the_window_before_that(
    request_runner: Any,  # noqa: F811
    allowed: int | None,
    loaded: int,
) -> None:
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(**SIZES)),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(**SIZES, sliding_window=4)),
    ]
    runner = request_runner(block_size=4, num_gpu_blocks=100, async_scheduling=False, kv_cache_groups=groups)
    runner.manager.prepare_store.side_effect = lambda keys, req_context: generate_store_output(keys)
    runner.new_request([0] * 17)
    runner.run([EOS_TOKEN_ID], expected_stored=tuple((group, n) for group in (0, 1) for n in range(4)))
    runner.scheduler.reset_prefix_cache()
    runner.manager.lookup.return_value = LookupResult.HIT
    runner.manager.prepare_store.side_effect = lambda keys, req_context: generate_store_output([])
    runner.new_request([0] * 17, kv_transfer_params={} if allowed is None else {"max_load_tokens": allowed})
    expected = [(0, n) for n in range(loaded)] + [(1, loaded - 1)]
    runner.run([EOS_TOKEN_ID], expected_loaded=tuple(expected))
