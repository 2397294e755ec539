"""The ranks of an engine: on which nodes they are, and which parts of a chunk each of them has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

T = TypeVar("T")


@dataclass(frozen=True)
class Rank(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler's side, in vLLM's handshake.

    memory: what the directory calls the memory that it reads and writes, on the node that it runs on. parts: of a
    chunk, those that it has. part_bytes: of one of them.
    """

    memory: str
    parts: tuple[int, ...]
    part_bytes: int


def in_order(told: Mapping[tuple[int, int], T], parallel: Any) -> list[T]:
    """What workers told, by (pipeline rank, tensor rank), in the order of their ranks.

    parallel: vLLM's parallel_config. RuntimeError unless all have.
    """
    ranks = [told[place] for place in sorted(told)]
    if len(ranks) != parallel.world_size:
        raise RuntimeError(
            f"{len(ranks)} of {parallel.world_size} workers told where they run, so raykv can't know which nodes' "
            f"memory they read: leave kv_transfer_config out"
        )
    return ranks
