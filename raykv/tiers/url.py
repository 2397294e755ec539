"""Parses `external=` URLs such as `file:///mnt/nvme/raykv?capacity=200GiB`."""

from urllib.parse import SplitResult, parse_qsl, urlsplit

from raykv.config import parse_size
from raykv.tiers.base import TierUrl
from raykv.tiers.registry import registered, tier_for


def parse(url: str) -> TierUrl:
    """Parse a URL. Raises ValueError with advice. The message contains no password and no query."""
    parts = _split(url)
    text = _text(parts)
    given = parse_qsl(parts.query, keep_blank_values=True)
    params = dict(given)
    if len(params) < len(given):
        raise ValueError(f"external={text}: a parameter is given twice")
    if "capacity" not in params:
        tier_for(TierUrl(parts.scheme, text, parts, 0, None, ()))  # an unknown scheme is reported first
        raise ValueError(f"external={text}: append how much may be kept there: ?capacity=200GiB")
    capacity, shared = _capacity(params.pop("capacity"), text), _shared(params.pop("shared", None), text)
    if params and not registered(parts.scheme):
        names = ", ".join(map(repr, params))
        raise ValueError(f"external={text}: unknown parameter {names}: there are capacity=200GiB and shared=0 or 1")
    return TierUrl(parts.scheme, text, parts, capacity, shared, tuple(params.items()))


def shown(url: str) -> str:
    """Return a URL without user and password, and with "?…" for its parameters. Raises ValueError as `parse` does."""
    parts = _split(url)
    return f"{_text(parts)}?…" if parts.query else _text(parts)


def _text(parts: SplitResult) -> str:
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        sound = url.lower().startswith(f"{parts.scheme}://") and bool(parts.scheme) and parts.port != 0
    except ValueError:  # the error's text repeats host or port, which may be part of a password
        sound = False
    if not sound:
        raise ValueError(
            "external= is not a URL such as file:///mnt/nvme/raykv?capacity=200GiB or redis://host:6379?capacity=50GiB "
            "(in a user's name or password, write '/' as %2F and '[' as %5B)"
        )
    if parts.fragment or "@" in parts.query or ("@" in parts.path and parts.scheme != "file"):
        raise ValueError(
            "external=: write '/', '?', '#' and '@' in a user's name, password or path as %2F, %3F, %23 and %40"
        )
    return parts


def _capacity(value: str, text: str) -> int:
    try:
        capacity = parse_size("capacity", value)
    except ValueError:
        capacity = 0.0
    if not isinstance(capacity, int):  # a fraction has no meaning here
        raise ValueError(f"external={text}: capacity={value!r}: write bytes, such as 200GiB or 500GB")
    return capacity


def _shared(value: str | None, text: str) -> bool | None:
    if value not in (None, "0", "1"):
        raise ValueError(f"external={text}: shared={value!r}: write 1 where all nodes see the same content, else 0")
    return None if value is None else value == "1"
