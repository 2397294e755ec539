"""The tail of a prompt: its last tokens, which do not fill a chunk of the pool.

Where prefill runs apart from decode, what one engine has prefilled is read by another to its last token. So the tail is
in the pool too, under a key that says how many tokens it has, as a chunk which is filled in part: whoever reads it has
asked for as many tokens, and takes nothing after them for KV. vLLM hashes full blocks only, and offloads full chunks:
here it is told of one chunk more, for as long as it looks at a request's.
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
LIMITS = ("max_load_tokens", "max_offload_tokens")  # of a request, in its kv_transfer_params


class Tail(NamedTuple):
    """A prompt's, of tokens [start, stop). key: as vLLM names a chunk. number: of the chunk that it would fill."""

    key: bytes
    number: int
    start: int
    stop: int

    def is_next(self, computed: int, found: int, block_tokens: int) -> bool:
        """Whether to ask for it. computed: tokens that an engine has. found: by the pool, after those.

        What is shorter than a block of the engine's, and not the end of a longer load, is computed as soon as loaded.
        """
        if not self.start <= computed + found < self.stop - 1:
            return False
        return found > 0 or self.stop - computed >= block_tokens


def tail_of(request: Any, chunk_tokens: int, block_tokens: int, function: Hash) -> Tail | None:
    """The tail of a request's prompt; None where it is worth nothing, or the request limits what is transferred.

    block_tokens: of what vLLM hashes. function: that it hashes by. One token is worth nothing: the last is computed.
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
    """Inside, vLLM's scheduler takes the tail for the request's last chunk. status: its state of the request."""
    (state,) = status.group_states
    state.offload_keys.append(tail.key)
    try:
        yield
    finally:
        state.offload_keys.pop()
        state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, tail.number)  # the chunk is yet to be filled


def store_job(tail: Tail, status: Any, scheduler: Any) -> dict[int, TransferJob]:
    """Have vLLM's scheduler know of a job that stores the tail of a request, which this step computes.

    status: its state of the request. Returns the job for the workers, by its id; none where nothing is stored.
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
    groups = {place: chunks._replace(tail=len(blocks)) for place, chunks in output.store_spec.groups.items()}
    return {job: TransferJob(status.req.request_id, source, replace(output.store_spec, groups=groups))}
