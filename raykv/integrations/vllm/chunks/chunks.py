"""Messages from vLLM's scheduler to its workers: where to load a request's chunks from, and which chunks to store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.kv_offload.base import LoadStoreSpec

from raykv.client.leases.lease import Leased
from raykv.integrations.vllm.identity.adapters import Adapter


class Origin(NamedTuple):
    """Where a request comes from: its id in vLLM, its caller's trace headers, its salt, and its LoRA adapter.

    adapter: None until the workers have reported the adapter's weights (see `adapters`).
    """

    id: str
    headers: Mapping[str, str] | None = None
    salt: str | None = None
    adapter: Adapter | None = None

    @property
    def weights(self) -> bytes:
        """Digest of the adapter's weights, which becomes part of keys; b"" without an adapter."""
        return self.adapter.weights if self.adapter else b""


class PartToLoad(NamedTuple):
    """One part of the leased chunks of some layers, for the rank that reads this part.

    place: index of the layers, see Group. number: index of the part among the rank's parts. away: whether some chunks
    are on other nodes.
    """

    place: int
    number: int
    away: bool
    leased: list[Leased]


@dataclass
class ChunksToLoad(LoadStoreSpec):  # type: ignore[misc]
    """Where to read chunks.

    ranks: the parts to read, by rank. origin: the request's origin. digests: as in ChunksToStore.
    """

    ranks: list[list[PartToLoad]]
    origin: Origin
    digests: dict[int, bytes] = field(default_factory=dict)


class ChunksOfLayers(NamedTuple):
    """Chunks of some layers to store. keys: the chunks' keys, by part. position: the first chunk's number in its chain.

    tail: number of engine blocks with tokens of a prompt's tail; 0: no tail.
    """

    keys: dict[int, bytes]
    position: int
    tail: int = 0


@dataclass
class ChunksToStore(LoadStoreSpec):  # type: ignore[misc]
    """Chunks for the workers to store, by place of their layers. salt, adapter: from the request's origin.

    digests: digests of the chunks' contents (see `contents`), by vLLM's group. The content of a group without an entry
    is unknown or not verified.
    """

    places: dict[int, ChunksOfLayers]
    salt: str | None = None
    adapter: Adapter | None = None
    digests: dict[int, bytes] = field(default_factory=dict)
