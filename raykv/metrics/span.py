"""OpenTelemetry spans of a client's work, in a process that has set up OpenTelemetry."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

OFF: AbstractContextManager[None] = nullcontext()


def span(name: str, **attributes: Any) -> AbstractContextManager[Any]:
    """Make a span `raykv.<name>` around a `with` block, as a child of the current span.

    The `with` block gets the span. If the process has no tracer provider, the block gets None, at little cost.
    attributes: attributes of the span, with the names `raykv.<attribute>`.
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
    except Exception:  # another thread is importing OpenTelemetry, or a provider of the environment can't be loaded
        return OFF
    return made


def under(headers: Mapping[str, str] | None) -> AbstractContextManager[Any]:
    """Make spans of a `with` block children of the span in these W3C trace headers, if there are any."""
    if not headers or sys.modules.get("opentelemetry.trace") is None:
        return OFF
    try:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        return _attached(context, TraceContextTextMapPropagator().extract(headers))
    except Exception:  # another thread is importing OpenTelemetry
        return OFF


@contextmanager
def _attached(context: Any, parent: Any) -> Iterator[None]:
    token = context.attach(parent)
    try:
        yield
    finally:
        context.detach(token)


def tell(it: Any, **attributes: Any) -> None:
    """Add attributes to a span that `span` made. Does nothing for None."""
    if it is not None:
        it.set_attributes(_named(attributes))


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"raykv.{name}": value for name, value in attributes.items()}
