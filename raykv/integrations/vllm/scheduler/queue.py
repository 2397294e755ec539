"""Requests in the engine's queue. While they wait, their chunks are fetched to this node."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from raykv.integrations.vllm.chunks.chain import Chain

AT_ONCE = 2  # requests that are fetched for at a time: chunks of more would push out those of the first


class Queue:
    """Requests that vLLM has not looked up yet, in the order of their arrival. One thread calls it."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Chain, int]] = {}  # and the step before which they came
        self._fetching: list[Future[Any]] = []
        self._step = 0

    def add(self, request: str, chain: Chain) -> None:
        self._waiting[request] = chain, self._step

    def leave(self, request: str) -> None:
        """The request is looked up, has chunks on their way, or has ended."""
        self._waiting.pop(request, None)

    def step(self) -> list[Chain]:
        """The requests to fetch for now. Each has waited for a whole step, and is named once."""
        self._fetching = [fetching for fetching in self._fetching if not fetching.done()]
        free = AT_ONCE - len(self._fetching)
        late = [request for request, (_, step) in self._waiting.items() if step < self._step][: max(0, free)]
        self._step += 1
        return [self._waiting.pop(request)[0] for request in late]

    def begin(self, fetching: Future[Any]) -> None:
        """Chunks of a request are on their way."""
        self._fetching.append(fetching)
