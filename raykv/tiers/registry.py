"""Finds the maker of a tier by its URL's scheme. A tier's library is imported only when the tier is needed."""

from collections.abc import Callable
from importlib.metadata import entry_points

from raykv.system.extras import to_install
from raykv.tiers.base import Tier, TierUrl

Maker = Callable[[TierUrl], Tier]
ENTRY_POINTS = "raykv.tiers"
REDIS = ("redis", "rediss", "valkey", "valkeys")
_registered: dict[str, Maker] = {}  # by scheme


def register_tier(scheme: str, make: Maker) -> None:
    """Let `make` open `external=` URLs of this scheme, in this process.

    scheme: the URLs' scheme, in upper or lower case. make: takes a TierUrl and returns an open Tier. If `make` fails,
    it must raise ValueError or OSError with a text that says what to change. Other processes find a maker through an
    entry point: its group is "raykv.tiers", and its name is the scheme.
    """
    _registered[scheme.lower()] = make


def open_tier(url: TierUrl) -> Tier:
    """Open a URL's tier. Raises as `tier_for` does.

    If the tier is unusable, raises ValueError or OSError, whose text says what to change.
    """
    return tier_for(url)(url)


def tier_for(url: TierUrl) -> Maker:
    """Return the maker of a URL's tier.

    Raises ValueError for `local` and unknown schemes, and ImportError if the tier's library is missing.
    """
    make = registered(url.scheme)
    if make:
        return make
    if url.scheme == "local":  # fsspec would write files that other users could read, or replace by links
        raise ValueError(f"external={url.text}: write file://{url.parts.path}")
    if url.scheme == "file":
        from raykv.tiers.file import FileTier

        return FileTier
    if url.scheme in REDIS:
        try:
            from raykv.tiers.redis import RedisTier
        except ModuleNotFoundError as error:
            raise ImportError(f"external={url.text}: {error}: {to_install('redis')}") from error
        return RedisTier
    return _of_fsspec(url)


def registered(scheme: str) -> Maker | None:
    """Return the maker that `register_tier` or a package's entry point registered for a scheme, or None."""
    if scheme not in _registered:
        for entry_point in entry_points(group=ENTRY_POINTS, name=scheme):
            _registered[scheme] = entry_point.load()
    return _registered.get(scheme)


def _of_fsspec(url: TierUrl) -> Maker:
    known = f"file, {', '.join(REDIS)}, those registered by raykv.tiers.register_tier"
    unknown = f"external={url.text}: unknown scheme {url.scheme!r}: known are {known}"
    try:
        import fsspec

        from raykv.tiers.fsspec import FsspecTier
    except ModuleNotFoundError as error:
        raise ImportError(f"{unknown}, and those of fsspec: {to_install('fsspec')}") from error
    if url.scheme not in fsspec.available_protocols():
        raise ValueError(f"{unknown}, and those of fsspec: {', '.join(sorted(fsspec.available_protocols()))}")
    try:
        fsspec.get_filesystem_class(url.scheme)
    except ImportError as error:
        raise ImportError(f"external={url.text}: {error}") from error
    return FsspecTier
