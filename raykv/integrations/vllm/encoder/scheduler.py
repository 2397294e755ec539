"""The scheduler's side: fetches outputs that the pool has, and passes them to the workers with a step.

vLLM ends the engine if a worker lacks an output that the scheduler has promised. So the scheduler promises no output
before it has the bytes, and the workers get the bytes along with the promise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

from raykv.integrations.vllm.identity.weights import Weights

FETCH_S = 1.0  # maximum seconds that a request waits for an output; then the engine computes the output
FETCHES = 32  # maximum number of outputs that the scheduler fetches or keeps, for the first requests in the queue
NOT_OF_ENCODERS = "prompt_embeds"  # modality of tensors from a client, which vLLM treats like outputs


class Step(ECConnectorMetadata):  # type: ignore[misc]
    """The message to the workers for a step.

    files: outputs to load, by identifier. names: names of the outputs to store after the step, by identifier.
    """

    def __init__(self, files: dict[str, bytes], names: dict[str, str]) -> None:
        self.files, self.names = files, names


class Fetch(NamedTuple):
    """The search for one output in the pool."""

    reading: Future[bytes | None]
    until: float

    def is_over(self) -> bool:
        return self.reading.done() or time.monotonic() > self.until

    def is_miss(self) -> bool:
        return self.reading.done() and self.reading.result() is None

    def file(self) -> bytes | None:
        """Return the output, or None if the pool lacks it or has not returned it yet."""
        return self.reading.result() if self.reading.done() else None


class EncoderScheduler:
    """Fetches the outputs that this engine's requests need. Not thread-safe.

    features: vLLM's `mm_features` of a request. Outputs are named by vLLM's identifiers.
    """

    def __init__(self, read: Callable[[str, int], Future[bytes | None]], weights: Weights) -> None:
        """read: starts to read an output, given the output's name and its number of tokens.

        weights: the name of the weights is the beginning of every output's name.
        """
        self._read, self._weights = read, weights
        self._weights_are_known = False  # whether the weights' name was read in this step
        self._present = set[str]()  # outputs that the engine's own cache has, or gets in this step
        self._fetches: dict[str, Fetch] = {}
        self._to_load: dict[str, bytes] = {}
        self._to_store: set[str] = set()

    def is_settled(self, features: Any, computed: int) -> bool:
        """Whether all fetches of a request's outputs have ended or timed out. The first call starts the fetches.

        computed: number of leading tokens of the request that need no output.
        """
        missing = [
            of
            for of in features
            if of.mm_position.offset + of.mm_position.length > computed
            and of.identifier not in self._present
            and of.modality != NOT_OF_ENCODERS
        ]
        if missing:
            self._name_weights()
        for of in missing:
            self._begin(of)
        fetches = [self._fetches[of.identifier] for of in missing if of.identifier in self._fetches]
        return all(fetch.is_over() for fetch in fetches)

    def _begin(self, feature: Any) -> None:
        if feature.identifier in self._fetches or sum(not of.is_miss() for of in self._fetches.values()) >= FETCHES:
            return
        name = self._weights.name + feature.identifier
        try:
            reading = self._read(name, feature.mm_position.get_num_embeds())
        except RuntimeError:  # the system can't start a thread
            return
        self._fetches[feature.identifier] = Fetch(reading, time.monotonic() + FETCH_S)

    def _name_weights(self) -> None:
        """Read the weights' name, once per step. If it changed, drop all fetches, as their outputs are outdated."""
        if self._weights_are_known:
            return
        self._weights_are_known = True
        if self._weights.renew():
            for identifier in list(self._fetches):
                self._drop(identifier)

    def _drop(self, identifier: str) -> Fetch | None:
        fetch = self._fetches.pop(identifier, None)
        if fetch:
            fetch.reading.cancel()
        return fetch

    def has(self, identifier: str) -> bool:
        """Whether the output has arrived from the pool. vLLM asks this if its own cache lacks the output."""
        self._present.discard(identifier)
        self._name_weights()
        return identifier in self._fetches and self._fetches[identifier].file() is not None

    def allocate(self, feature: Any) -> None:
        """Note that the engine's cache has room for an output, which this step loads or computes."""
        self._present.add(feature.identifier)
        fetch = self._fetches.get(feature.identifier)
        file = fetch.file() if fetch else None
        self._drop(feature.identifier)
        if file is not None:
            self._to_load[feature.identifier] = file
        elif feature.modality != NOT_OF_ENCODERS:
            self._to_store.add(feature.identifier)

    def step(self, scheduled: Any) -> Step:
        """Return the message to the workers for a step. scheduled: vLLM's SchedulerOutput."""
        self._present.difference_update(scheduled.free_encoder_mm_hashes)
        self._present |= self._to_load.keys() | self._to_store  # outputs that were freed, but are needed again
        if self._to_store:
            self._name_weights()
        self._weights_are_known = False
        if not scheduled.total_num_scheduled_tokens:  # vLLM's first model runner calls no connector in such a step
            return Step({}, {})
        step = Step(self._to_load, {identifier: self._weights.name + identifier for identifier in self._to_store})
        self._to_load, self._to_store = {}, set()
        return step

    def forget(self, features: Any) -> None:
        """Drop the fetches of a request that has ended. Other requests fetch the same outputs again."""
        for of in features:
            self._drop(of.identifier)
