"""The tail of a prompt: its last tokens, which do not fill a chunk of the pool.

If prefill and decode run in separate engines, the decode engine reads the prompt up to its last token. So the pool also
has the tail, as a partly filled chunk. The tail's key contains the number of its tokens, so a reader uses exactly these
tokens. vLLM hashes only full blocks, and offloads only full chunks. Therefore this module appends an extra chunk to a
request's chunks while vLLM's scheduler looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.kv_offload.base import GPULoadStoreSpec, make_offload_key

Hash = Callable[[Any], bytes]
LIMITS = LOAD_LIMIT, OFFLOAD_LIMIT = "max_load_tokens", "max_offload_tokens"  # keys in a request's kv_transfer_params


class Tail(NamedTuple):
    """The tail of a prompt: tokens [start, stop). key: a key like that of a vLLM chunk. number: the chunk's number."""

    key: bytes
    number: int
    start: int
    stop: int

    def is_next(self, computed: int, found: int, block_tokens: int) -> bool:
        """Whether to ask for the tail.

        computed: number of tokens that the engine has. found: number of further tokens in the pool. If only the tail is
        missing, and it is shorter than an engine block, the engine computes it, which is as fast as loading it.
        """
        if not self.start <= computed + found < self.stop - 1:
            return False
        return found > 0 or self.stop - computed >= block_tokens


def tail_of(request: Any, chunk_tokens: int, block_tokens: int, function: Hash) -> Tail | None:
    """Return the prompt's tail, or None if it is not worth a transfer, or if the request limits its transfers.

    block_tokens: number of tokens in a block that vLLM hashes. function: vLLM's hash. A tail of one token is useless,
    as the last token is always computed.
    """
    stop = request.num_prompt_tokens
    number, tokens = divmod(stop, chunk_tokens)
    if tokens < 2 or stop < block_tokens or any(name in (request.kv_transfer_params or {}) for name in LIMITS):
        return None
    hashed = stop // block_tokens
    first = hashed * block_tokens
    extra, _ = generate_block_hash_extra_keys(request, first, stop, 0)
    parent = request.block_hashes[hashed - 1] if hashed else None
    last = hash_block_tokens(function, parent, request.all_token_ids[first:stop], extra)
    key = make_offload_key(b"tail" + tokens.to_bytes(8, "big") + last, 0)
    return Tail(key, number, stop - tokens, stop)


@contextmanager
def as_chunk(tail: Tail, status: Any) -> Iterator[None]:
    """Return a context in which vLLM's scheduler treats the tail as the last chunk. status: the request's state."""
    (state,) = status.group_states
    state.offload_keys.append(tail.key)
    try:
        yield
    finally:
        state.offload_keys.pop()
        state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, tail.number)  # the chunk is not full yet


def store_job(tail: Tail, status: Any, scheduler: Any) -> dict[int, TransferJob]:
    """Register a job with vLLM's scheduler. The job stores the tail of a request, which this step computes.

    status: the scheduler's state of the request. Returns {job's id: job}, or {} if nothing is stored.
    """
    config = scheduler.config.kv_group_configs[0]
    first, last = tail.start // config.tokens_per_block, -(-tail.stop // config.tokens_per_block)
    blocks = status.group_states[0].block_ids[first:last]
    output = scheduler.manager.prepare_store([tail.key], status.req_context)
    if not output.keys_to_store:
        return {}
    job = scheduler._generate_job_id()
    status.transfer_jobs.add(job)
    scheduler._jobs[job] = TransferJobStatus(
        req_id=status.req.request_id,
        pending_count=scheduler.config.num_workers,
        keys={tail.key},
        is_store=True,
        deferred_fence_block_ids=blocks,
    )
    source = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[first])
    places = {place: chunks._replace(tail=len(blocks)) for place, chunks in output.store_spec.places.items()}
    return {job: TransferJob(status.req.request_id, source, replace(output.store_spec, places=places))}
