"""Which layers are a drafter's, and which pages go into the drafter's part of a chunk."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

import numpy as np
import torch
from contract.manager import Manager
from contract.pool import BLOCK_BYTES, NODE, READY, Content, open_pool
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from raykv.integrations.vllm.chunks.chain import Chain
from raykv.integrations.vllm.chunks.chunks import Origin
from raykv.integrations.vllm.configuration import block_bytes
from raykv.integrations.vllm.identity.drafters import draft_layers, target_layers
from raykv.integrations.vllm.identity.groups import Group, Layers, first_parts, groups_of
from raykv.integrations.vllm.scheduler.waiting import PATIENCE
from raykv.integrations.vllm.worker.pages import pages_of
from raykv.integrations.vllm.worker.ranks import Rank

BLOCKS, PAGE = 3, 64


def engine(method: str | None, layers: int = 2) -> Any:
    """vLLM's configuration of an engine whose target has so many layers."""
    return SimpleNamespace(
        speculative_config=method and SimpleNamespace(method=method),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: layers),
    )


def group(*names: str) -> Any:
    return SimpleNamespace(layer_names=list(names), kv_cache_spec="spec")


@pytest.mark.parametrize(
    ("method", "layer"),
    [
        ("draft_model", "draft_model.model.layers.0.self_attn.attn"),
        ("eagle", "model.layers.2.self_attn.attn"),
        ("eagle3", "model.layers.2.self_attn.attn"),
        ("dflash", "model.layers.3.self_attn.attn"),
        ("mtp", "mtp.layers.0.self_attn.attn"),
        ("mtp", "model.layers.2.mtp_block.self_attn.attn"),
        ("dspark", "draft.layers.0.self_attn.attn"),
    ],
)
def test_a_drafters_layers_are_known_by_their_names(method: str, layer: str) -> None:
    groups = [group("model.layers.0.self_attn.attn", layer), group("model.layers.1.linear_attn")]
    assert draft_layers(engine(method), groups) == [[False, True], [False]]
    assert target_layers(engine(method), groups) == [
        ("spec", ["model.layers.0.self_attn.attn"]),
        ("spec", ["model.layers.1.linear_attn"]),
    ]
    assert draft_layers(engine(method), groups[::-1]) == [[False], [False, True]]


@pytest.mark.parametrize("method", [None, "ngram", "suffix"])
def test_without_a_drafter_all_layers_are_the_targets(method: str | None) -> None:
    """This includes layers whose numbers follow the target's, such as those of an encoder."""
    assert draft_layers(engine(method), [group("model.layers.0.attn", "model.layers.7.attn")]) == [[False, False]]


def caches(*groups: int) -> Any:
    """vLLM's canonical KV caches. groups: number of layers in each; all pages of layer n hold n."""
    total = sum(groups)
    tensors = [torch.full((BLOCKS, PAGE), number, dtype=torch.int8) for number in range(total)]
    refs = [SimpleNamespace(tensor_idx=number, page_size_bytes=PAGE) for number in range(total)]
    return SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor) for tensor in tensors],
        group_data_refs=[[refs.pop(0) for _ in range(count)] for count in groups],
    )


def numbers(rows: Any) -> list[int]:
    """Numbers of the layers whose pages a block's row has."""
    return [int(np.frombuffer(page[1].numpy().tobytes(), np.int8)[0]) for page in rows.memory]


def test_pages_of_a_drafter_in_the_targets_group_are_apart() -> None:
    pages = pages_of(caches(3, 1, 2), [[False, True, False], [True], [False, False]])
    assert [(of.layers, numbers(of.rows), of.rows.bytes) for of in pages] == [
        (Layers(0), [0, 2], 2 * PAGE),
        (Layers(1, of_drafter=True), [3], PAGE),
        (Layers(2), [4, 5], 2 * PAGE),
        (Layers(0, of_drafter=True), [1], PAGE),
    ]
    assert [of.layers for of in pages_of(caches(3, 1))] == [Layers(0), Layers(1)]


def test_pages_that_vllm_has_packed_are_the_drafters_as_a_whole() -> None:
    """Then only engines with this drafter can read the pages."""
    pages = pages_of(caches(1, 1), [[False, False, True], [False, False]])
    assert [of.layers for of in pages] == [Layers(0, of_drafter=True), Layers(1)]


def test_keys_of_an_engine_with_two_pages_a_layer_are_apart_too() -> None:
    """Some versions of vLLM have a tensor for keys and one for values."""
    pages = pages_of(caches(4), [[False, True]])
    assert [(of.layers, numbers(of.rows)) for of in pages] == [(Layers(0), [0, 1]), (Layers(0, True), [2, 3])]


def test_the_targets_places_have_the_same_numbers_with_a_drafters_between() -> None:
    """Otherwise a layer's KV would get the key of another layer."""
    with open_pool() as pool:
        arguments = {"model": "m", "dtype": "uint8", "layout": "rows"}
        plain, drafting = (Manager(pool, arguments, True, PATIENCE, arguments | {"revision": "d"}) for _ in range(2))
        plain.set_ranks([Rank(NODE, (0,), (BLOCK_BYTES,) * 2)], [Group(0, 0, 16, 0), Group(1, 1, 16, 0)])
        groups = [Group(0, 0, 16, 0), Group(1, 1, 16, 0, of_drafter=True), Group(2, 2, 16, 0)]
        drafting.set_ranks([Rank(NODE, (0,), (BLOCK_BYTES,) * 3)], groups)
        roots = [[of.caches[place][0].id_for(None) for place in sorted(of.caches)] for of in (plain, drafting)]
    assert roots[0] == roots[1][::2] and len(set(roots[1])) == 3
    assert first_parts([False, True, False, True, True], [(0,)]) == [0, 0, 1, 1, 2]


def test_engines_wait_for_engines_with_the_same_drafter() -> None:
    """The first part of a look-up names the intent. Only engines with a drafter announce the drafter's part."""
    full, drafter = Group(0, 0, 16, 0), Group(0, 1, 16, 0, of_drafter=True)
    arguments = {"model": "m", "dtype": "uint8", "layout": "rows"}
    with open_pool() as pool:
        manager = Manager(pool, arguments, True, PATIENCE, arguments | {"revision": "d"})
        manager.set_ranks([Rank(NODE, (0,), (BLOCK_BYTES,) * 2)], [full, drafter])
        assert manager.first_cache == manager.caches[0][0], "routers know the target's keys"
        assert [of.group for of in manager._rank_parts()] == [drafter, full]


def test_chunks_have_as_many_blocks_as_without_a_drafter() -> None:
    """Windows and full attention have a group each, and the drafter's layer makes one group wider."""

    def chunk_bytes(method: str | None, *layers: str) -> int:
        groups = [group(*[f"model.layers.{number}.attn" for number in range(12)]), group(*layers)]
        widest = max(len(group.layer_names) for group in groups)
        config = SimpleNamespace(
            kv_cache_groups=groups, num_blocks=BLOCKS, kv_cache_tensors=[SimpleNamespace(size=widest * PAGE * BLOCKS)]
        )
        one = SimpleNamespace(pipeline_parallel_size=1)
        return block_bytes(SimpleNamespace(**vars(engine(method, 24)), parallel_config=one), config)

    full = [f"model.layers.{number}.attn" for number in range(12, 24)]
    assert chunk_bytes("eagle3", *full, "model.layers.24.attn") == chunk_bytes(None, *full) == 12 * PAGE


def configured(index: int, tokens: int, window: int | None, ahead: bool) -> Any:
    return SimpleNamespace(
        group_idx=index, tokens_per_chunk=tokens, sliding_window_size_in_chunks=window, is_eagle_group=ahead
    )


def test_groups_are_those_of_the_workers_layers() -> None:
    configs = [configured(0, 16, 4, False), configured(2, 16, None, True)]
    assert groups_of(configs, [Layers(0), Layers(1), Layers(1, True)]) == [
        Group(2, 1, 16, 0, 1),
        Group(2, 2, 16, 0, 1, of_drafter=True),
        Group(0, 0, 16, 4),
    ]
    assert groups_of(configs) == [Group(2, 1, 16, 0, 1), Group(0, 0, 16, 4)]


@pytest.mark.parametrize(("most", "found"), [(None, 3), (64, 3), (48, 3), (32, 2), (0, 0)])
def test_a_chunk_after_the_hit_is_there_and_windows_end_before_it(
    monkeypatch: pytest.MonkeyPatch, most: int | None, found: int
) -> None:
    """vLLM asks for one more chunk of a drafter's group, and drops it. States are read where the hit then ends."""
    full, drafter, state = Group(0, 0, 16, 0, 1), Group(0, 2, 16, 0, 1, of_drafter=True), Group(1, 1, 16, 1)
    keys = {group: [make_offload_key(bytes([number]) * 32, group) for number in range(4)] for group in (0, 1)}
    with open_pool() as pool, closing(Content()) as content:
        monkeypatch.setattr(Manager, "content", content, raising=False)
        manager = Manager(pool, {"model": "m", "dtype": "uint8", "layout": "rows"})
        manager.set_ranks([Rank(NODE, (0,), (BLOCK_BYTES,) * 3)], [full, drafter, state])
        manager.says = lambda key: READY
        context = ReqContext("r")
        context.set_state(Chain(keys, Origin("r"), most=most))
        hits = {
            group: [number for number, key in enumerate(of_group) if manager.lookup(key, context) is LookupResult.HIT]
            for group, of_group in keys.items()
        }
    assert hits == {0: list(range(found + 1)) if found else [], 1: [found - 1] if found else []}
