"""Checks that values from another process match type hints."""

from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

Take = Callable[[Any], Any]


def taker(hint: Any) -> Take:
    """Return a function that converts a plain value to a hinted type. It raises ValueError for values of other types.

    hint: a class, a NamedTuple, a tuple of such types, or `hint | None`. The plain value of a NamedTuple is a sequence
    of its fields.
    """
    if isinstance(hint, UnionType):
        (one,) = (taker(kind) for kind in get_args(hint) if kind is not NoneType)
        return lambda value: None if value is None else one(value)
    if get_origin(hint) is tuple:
        whole, (first, *others) = taker(tuple), get_args(hint)
        if others == [...]:
            each = taker(first)
            return lambda value: tuple(map(each, whole(value)))
        takes = [taker(kind) for kind in (first, *others)]
        return lambda value: tuple(take(one) for take, one in zip(takes, whole(value), strict=True))
    if hasattr(hint, "_fields"):
        return _maker(hint)
    return _checker(hint)


def takers(function: Callable[..., Any]) -> list[Take]:
    """Return the takers of a method's parameters, in order."""
    return [taker(hint) for name, hint in get_type_hints(function).items() if name != "return"]


def _checker(kind: type) -> Take:
    kinds = (float, int) if kind is float else (kind,)

    def take(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise ValueError(f"{value!r:.80}: give {kind.__name__}, not {type(value).__name__}")
        return value

    return take


def _maker(kind: Any) -> Take:
    checks = [taker(hint) for hint in get_type_hints(kind).values()]
    sound = set[tuple[type, ...]]()  # types of fields that have passed the checks before

    def take(value: Any) -> Any:
        made = kind(*value)
        types = tuple(map(type, made))
        if types not in sound:
            for check, field in zip(checks, made, strict=True):
                check(field)
            sound.add(types)
        return made

    return take
