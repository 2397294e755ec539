"""Spans of what a client does, for OpenTelemetry where the process has set it up."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


def under(headers: Mapping[str, str] | None) -> AbstractContextManager[Any]:
    """Spans of a `with` block are children of the one that these W3C trace headers name, if there are any."""
    if not headers or sys.modules.get("opentelemetry.trace") is None:
        return OFF
    try:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        return _attached(context, TraceContextTextMapPropagator().extract(headers))
    except Exception:  # another thread is importing it
        return OFF


@contextmanager
def _attached(context: Any, parent: Any) -> Iterator[None]:
    token = context.attach(parent)
    try:
        yield
    finally:
        context.detach(token)


def tell(it: Any, **attributes: Any) -> None:
    """Add attributes to what `span` gave."""
    if it is not None:
        it.set_attributes(_named(attributes))


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"raykv.{name}": value for name, value in attributes.items()}
