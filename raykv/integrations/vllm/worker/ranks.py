"""The ranks of an engine: their nodes, and their parts of a chunk.

A part is one block of the pool. If each rank has different bytes, each rank has its own part. If all ranks have the
same bytes (the latent of MLA models), the chunk is one part: one rank stores the part, and all ranks read it. With
decode context parallelism of n, the latent has n parts, each with every n-th run of tokens. With `canonical_layout`,
pages are stored head by head, and each part is a group of heads. So engines with other tensor-parallel sizes have the
same parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from raykv.cluster import internal_kv
from raykv.cluster.internal_kv import Kept
from raykv.integrations.vllm.identity.groups import Layers

HEADS = "heads"
GROUPS = 8  # maximum number of groups of heads, as every part has its own key in the pool


class Rank(NamedTuple):
    """A worker's report to the scheduler's side.

    memory: name of the memory that the worker reads and writes. parts: numbers of the worker's parts of a chunk.
    part_bytes: bytes of one part, by place. layers: the Layers by place; if empty, one for each vLLM group. cut: name
    of the worker's Cut; "": the scheduler's Cut. Cuts may differ, as vLLM changes the interleave of some workers.
    """

    memory: str
    parts: tuple[int, ...]
    part_bytes: tuple[int, ...]
    layers: tuple[Layers, ...] = ()
    cut: str = ""


class Cut(NamedTuple):
    """How chunks are cut into parts.

    name: equal in engines that share chunks. parts: each rank's parts. stores: whether each rank stores its parts.
    """

    name: str
    parts: list[list[int]]
    stores: list[bool]

    @property
    def by_heads(self) -> bool:
        """Whether parts are groups of heads."""
        return self.name.startswith(HEADS)


def cut(parallel: Any, heads: int, latent: bool) -> Cut:
    """Return the parts of a chunk that each rank of an engine has.

    parallel: vLLM's parallel_config. heads: number of the model's KV heads if engines with other tensor-parallel sizes
    must have the same parts, else 0. latent: whether tensor-parallel ranks with the same tokens have the same bytes.
    """
    tensor, stages, strides = (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.decode_context_parallel_size,
    )
    groups = max((n for n in range(1, GROUPS + 1) if heads and heads % n == 0), default=0)
    if latent:
        name, of_stage, readers = "replicated", strides, tensor // strides
    elif groups and groups % tensor == 0:
        name, of_stage, readers = f"{HEADS}{groups}", groups, 1
    elif groups == heads > 0 and tensor % heads == 0:
        name, of_stage, readers = f"{HEADS}{groups}", groups, tensor // heads
    else:
        name, of_stage, readers = f"tp{tensor}", tensor, 1
    each = max(1, of_stage // tensor)
    parts, stores = [], []
    for stage in range(stages):
        for rank in range(tensor):
            own = rank % strides if latent else rank // readers * each  # vLLM's DCP groups consist of adjacent ranks
            parts.append(list(range(stage * of_stage + own, stage * of_stage + own + each)))
            stores.append(rank < strides if latent else rank % readers == 0)
    if stages > 1:
        name += f"pp{stages}"
    if strides > 1:
        name += f"dcp{strides}x{parallel.cp_kv_cache_interleave_size}"
    return Cut(name, parts, stores)


def check_heads(kv_caches: Mapping[str, torch.Tensor], heads: int) -> None:
    """Raise ValueError unless pages are stored head by head, as only such pages can be cut into groups of heads.

    kv_caches: by layer, the tensor of the layer's blocks, which have `heads` heads.
    """
    for layer, tensor in kv_caches.items():
        shape, strides = tuple(tensor.shape), tensor.stride()
        if len(shape) != 4 or shape[1] != heads or strides[1] * heads != strides[0] or strides[3] != 1:
            raise ValueError(
                f"canonical_layout needs KV pages that lie head by head, but those of {layer} have shape {shape} and "
                f"strides {strides}: leave canonical_layout out"
            )


def engine_name(vllm_config: Any) -> str:
    """Return a name for one start of an engine. Its engine_id is not enough, as several engines may share it."""
    return f"{vllm_config.kv_transfer_config.engine_id}-{vllm_config.instance_id}"


def tell(pool: str, engine: str, number: int, rank: Rank) -> None:
    """Report a worker's rank to the scheduler's side. engine: see `engine_name`. number: number of the rank.

    vLLM's handshake can't be used, as inside its MultiConnector the handshake belongs to the first connector.
    """
    internal_kv.put(pool, Kept.RANK, json.dumps(rank).encode(), f"{engine}/{number}")


def told(pool: str, engine: str, count: int) -> list[Rank]:
    """Take the workers' reports out of the pool. Raises RuntimeError unless all `count` workers have reported."""
    names = [f"{engine}/{number}" for number in range(count)]
    found = [json.loads(value) for name in names if (value := internal_kv.get(pool, Kept.RANK, name))]
    if len(found) != count:
        raise RuntimeError(
            f"{len(found)} of {count} workers told where they run, so raykv can't know which nodes' memory they read: "
            f"leave kv_transfer_config out"
        )
    for name in names:
        internal_kv.drop(pool, Kept.RANK, name)
    return [
        Rank(memory, tuple(parts), tuple(part_bytes), tuple(Layers(*of) for of in layers), cut)
        for memory, parts, part_bytes, layers, cut in found
    ]
