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
    """An actor that every request passes. Closed, it holds them all until some wait on so many nodes."""

    def __init__(self) -> None:
        self.enough = 0
        self.reached: set[str] = set()  # nodes that requests came to since it was closed
        self.opened = asyncio.Event()

    async def close(self, enough: int) -> None:
        """enough: on how many nodes."""
        self.enough, self.reached, self.opened = enough, set(), asyncio.Event()

    async def wait(self, node: str) -> None:
        """For requests: returns once they may go on. node: where this one is."""
        self.reached.add(node)
        if len(self.reached) < self.enough:
            with contextlib.suppress(TimeoutError):  # the test is to fail, not to hang
                await asyncio.wait_for(self.opened.wait(), HELD_S)
        self.opened.set()


def start_gate() -> Any:
    """A handle of the gate. Engines look for it when they start."""
    return ray.remote(Gate).options(name=GATE, namespace=NAMESPACE, num_cpus=0).remote()
