"""What vLLM's scheduler tells its workers of a request's chunks: which to load, from where, and which to store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.kv_offload.base import LoadStoreSpec

from raykv.client.leases.lease import Leased
from raykv.integrations.vllm.identity.adapters import Adapter


class Origin(NamedTuple):
    """Where a request comes from: vLLM's id of it, of its caller the trace headers and the salt, and the LoRA adapter
    that it asks for, once the workers have told which weights that has (see `adapters`)."""

    id: str
    headers: Mapping[str, str] | None = None
    salt: str | None = None
    adapter: Adapter | None = None

    @property
    def weights(self) -> bytes:
        """What makes an adapter's keys its own."""
        return self.adapter.weights if self.adapter else b""


class PartToLoad(NamedTuple):
    """A part of a group's chunks that are leased, for the rank that reads it.

    group: its place among vLLM's. number: of the part, among those that the rank has. away: some are on other nodes.
    """

    group: int
    number: int
    away: bool
    leased: list[Leased]


@dataclass
class ChunksToLoad(LoadStoreSpec):  # type: ignore[misc]
    """Where chunks lie. ranks: by rank, the parts that it reads. origin: of the request. digests: see ChunksToStore."""

    ranks: list[list[PartToLoad]]
    origin: Origin
    digests: dict[int, bytes] = field(default_factory=dict)


class ChunksOfGroup(NamedTuple):
    """Chunks that the workers are to offer. keys: by part, as bytes. position: of the first in its chain.

    tail: of a prompt's tail, the engine's blocks that it is in: fewer than fill a chunk, or as many.
    """

    keys: dict[int, bytes]
    position: int
    tail: int = 0


@dataclass
class ChunksToStore(LoadStoreSpec):  # type: ignore[misc]
    """Chunks that the workers are to offer, by group. salt, adapter: of the request's origin.

    digests: by group, of what each of its chunks holds (see `contents`); none where that is not verified, or unknown.
    """

    groups: dict[int, ChunksOfGroup]
    salt: str | None = None
    adapter: Adapter | None = None
    digests: dict[int, bytes] = field(default_factory=dict)
