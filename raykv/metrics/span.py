"""Spans of what a client does, for OpenTelemetry where the process has set it up."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

OFF: AbstractContextManager[None] = nullcontext()


def span(name: str, **attributes: Any) -> AbstractContextManager[Any]:
    """A span `raykv.<name>` around a `with` block, a child of the current one. Gives it to the block, or None.

    attributes: become `raykv.<attribute>`. None, at the cost of a question, unless the process has a tracer provider.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return OFF
    try:
        if isinstance(provider := trace.get_tracer_provider(), trace.ProxyTracerProvider):
            return OFF
        made: AbstractContextManager[Any] = provider.get_tracer("raykv").start_as_current_span(
            f"raykv.{name}", attributes=_named(attributes)
        )
    except Exception:  # another thread is importing it, or the provider that the environment names can't be loaded
        return OFF
    return made


def tell(it: Any, **attributes: Any) -> None:
    """Add attributes to what `span` gave."""
    if it is not None:
        it.set_attributes(_named(attributes))


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"raykv.{name}": value for name, value in attributes.items()}
