"""The chunks that a request must compute. Other engines may wait for these chunks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from raykv.integrations.vllm.scheduler.ask import Ask


@dataclass
class Computing:
    """The first group's chunks that a request must compute, and since when.

    ask: the question whose intent lets other engines wait. missed: chunks not yet offered to the workers. offered:
    chunks whose `complete_store` is yet to come. measured: this engine's speed was measured, or can't be: another
    request computes the chunks.
    """

    since: float
    ask: Ask
    missed: set[bytes]
    offered: set[bytes] = field(default_factory=set)
    measured: bool = False

    def offer(self, keys: Collection[bytes]) -> None:
        """The workers are offered these chunks."""
        offered = self.missed.intersection(keys)
        self.missed -= offered
        self.offered |= offered
