"""The engine of examples/serve_transformers.py behind a gate, which holds requests until a test lets them go on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import ray

from examples import serve_transformers

GATE, NAMESPACE = "gate", "raykv-tests"
HELD_S = 60.0
Engine: Any = serve_transformers.Engine.func_or_class  # type: ignore[attr-defined]


class GatedEngine(Engine):  # type: ignore[misc]
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate = ray.get_actor(GATE, NAMESPACE)
        self.node = ray.get_runtime_context().get_node_id()

    async def __call__(self, token_ids: list[int], max_tokens: int) -> AsyncIterator[dict[str, Any]]:
        await self.gate.wait.remote(self.node)
        async for item in super().__call__(token_ids, max_tokens):
            yield item


class Gate:
    """An actor that every request passes. A closed gate holds all requests until enough nodes have one waiting."""

    def __init__(self) -> None:
        self.enough = 0
        self.reached: set[str] = set()  # nodes where requests have come since the gate was closed
        self.opened = asyncio.Event()

    async def close(self, enough: int) -> None:
        """enough: on how many nodes requests must wait."""
        self.enough, self.reached, self.opened = enough, set(), asyncio.Event()

    async def wait(self, node: str) -> None:
        """A request calls this, and goes on when it returns. node: the request's node."""
        self.reached.add(node)
        if len(self.reached) < self.enough:
            with contextlib.suppress(TimeoutError):  # so that the test fails and does not hang
                await asyncio.wait_for(self.opened.wait(), HELD_S)
        self.opened.set()


def start_gate() -> Any:
    """Start the gate. Returns its handle. Engines look the gate up when they start."""
    return ray.remote(Gate).options(name=GATE, namespace=NAMESPACE, num_cpus=0).remote()
