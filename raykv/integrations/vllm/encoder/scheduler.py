"""The scheduler's side: it fetches outputs that the pool has, and gives them to the workers with a step.

vLLM ends the engine if a worker lacks an output that the scheduler has promised. So the scheduler promises no output
before it has the bytes, and the workers get the bytes along with the promise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

from raykv.integrations.vllm.identity.weights import Weights

log = logging.getLogger("raykv")

FETCH_S = 1.0  # from then on a request does not wait for an output any more, and the engine computes it


class Step(ECConnectorMetadata):  # type: ignore[misc]
    """What workers are told with a step. files: outputs to load, by identifier. weights: name of the weights."""

    def __init__(self, files: dict[str, bytes], weights: str) -> None:
        self.files, self.weights = files, weights


class Fetch:
    """The search for one output in the pool."""

    def __init__(self, reading: Future[bytes | None]) -> None:
        self._reading, self._until = reading, time.monotonic() + FETCH_S

    def is_over(self) -> bool:
        return self._reading.done() or time.monotonic() > self._until

    def file(self) -> bytes | None:
        """The output; None if the pool has none, or has not given it yet."""
        if not self._reading.done():
            return None
        if error := self._reading.exception():
            log.warning("an encoder's output could not be read, so the engine computes it: %r", error)
            return None
        return self._reading.result()


class EncoderScheduler:
    """What this engine's requests need of the pool. One thread calls it. vLLM's identifiers name outputs."""

    def __init__(self, read: Callable[[str], Future[bytes | None]], weights: Weights) -> None:
        """read: begins to read the output of a name. weights: their name is a part of each name."""
        self._read, self._weights = read, weights
        self._computed = set[str]()  # outputs in the engine's own cache, or to be computed in this step
        self._fetches: dict[str, Fetch] = {}
        self._to_load: dict[str, bytes] = {}

    def is_settled(self, features: Any, computed: int) -> bool:
        """Whether it is known which outputs of a request the pool has. The first call begins to fetch them.

        features: vLLM's `mm_features`. computed: how many leading tokens of the request need no output.
        """
        wanted = [of.identifier for of in features if of.mm_position.offset + of.mm_position.length > computed]
        missing = [identifier for identifier in wanted if identifier not in self._computed]
        if missing:
            self._name_weights()
        return all([self._fetch(identifier).is_over() for identifier in missing])

    def _fetch(self, identifier: str) -> Fetch:
        if identifier not in self._fetches:
            self._fetches[identifier] = Fetch(self._read(self._weights.name + identifier))
        return self._fetches[identifier]

    def _name_weights(self) -> None:
        """Read the weights' name again. Other weights make other outputs."""
        if self._weights.renewed():
            self._fetches.clear()

    def has(self, identifier: str) -> bool:
        return identifier in self._fetches and self._fetches[identifier].file() is not None

    def allocate(self, identifier: str) -> None:
        """The engine's cache has room for an output, which the step loads or computes."""
        self._computed.add(identifier)
        fetch = self._fetches.pop(identifier, None)
        if fetch and (file := fetch.file()) is not None:
            self._to_load[identifier] = file

    def step(self, scheduled: Any) -> Step:
        """What the workers need for a step. scheduled: vLLM's SchedulerOutput."""
        self._computed.difference_update(scheduled.free_encoder_mm_hashes)
        if scheduled.scheduled_encoder_inputs:
            self._name_weights()
        files, self._to_load = self._to_load, {}
        return Step(files, self._weights.name)

    def forget(self, features: Any) -> None:
        """A request has ended. features: vLLM's `mm_features`. Other requests fetch the same outputs again."""
        for of in features:
            self._fetches.pop(of.identifier, None)
