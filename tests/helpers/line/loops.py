"""Event loops of asyncio and, where it is installed, of uvloop."""

import asyncio
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
with suppress(ImportError):
    import uvloop

    LOOPS["uvloop"] = uvloop.new_event_loop


def run(new_loop: Callable[[], asyncio.AbstractEventLoop], coroutine: Any) -> Any:
    """Run a coroutine in a loop of its own. At the end the loop must watch no socket."""
    with closing(new_loop()) as loop:
        return loop.run_until_complete(coroutine)
