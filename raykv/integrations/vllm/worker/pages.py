"""The engine's pages: the rows that a worker copies to and from blocks of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from raykv.arena.buffers import Rows, rows_of
from raykv.integrations.vllm.identity.groups import Layers


class Pages(NamedTuple):
    """The engine's blocks as rows: row i has the pages of block i in these layers."""

    layers: Layers
    rows: Rows


def pages_of(kv_caches: Any, drafts: Sequence[Sequence[bool]] = ()) -> list[Pages]:
    """Return an engine's pages by place. The list begins with one Pages for each group.

    If a group has layers of the target and of a drafter, a second Pages at the list's end has the drafter's layers.
    kv_caches: vLLM's canonical KV caches. Groups may share memory. drafts: by group, whether each layer is a drafter's;
    if empty, no layer is. Raises ImportError for GPU memory without CuPy.
    """
    tensors = [piece.tensor.view(torch.uint8) for piece in kv_caches.tensors]
    first, beside = list[Pages](), list[Pages]()
    for group, refs in enumerate(kv_caches.group_data_refs):
        pages = [tensors[ref.tensor_idx][:, : ref.page_size_bytes] for ref in refs]
        of_layers = drafts[group] if drafts else [False]
        if len(pages) % len(of_layers):  # vLLM has packed all layers into one page
            of_layers = [any(of_layers)]
        each = len(pages) // len(of_layers)
        marked = list(zip(pages, np.repeat(of_layers, each).tolist(), strict=True))
        targets, drafters = ([page for page, mark in marked if mark == draft] for draft in (False, True))
        first.append(_pages(Layers(group, not targets), targets or drafters))
        if targets and drafters:
            beside.append(_pages(Layers(group, True), drafters))
    return first + beside


def _pages(layers: Layers, pages: list[torch.Tensor]) -> Pages:
    return Pages(layers, replace(rows_of(pages), after=()))  # each job has its own events
