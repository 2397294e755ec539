"""Finds the maker of a tier by its URL's scheme. What a tier needs is imported when one of its kind is asked for."""

from collections.abc import Callable
from importlib.metadata import entry_points

from raykv.tiers.base import Tier, TierUrl

Maker = Callable[[TierUrl], Tier]
ENTRY_POINTS = "raykv.tiers"
REDIS = ("redis", "rediss", "valkey", "valkeys")
_registered: dict[str, Maker] = {}


def register_tier(scheme: str, make: Maker) -> None:
    """Let `external=` URLs of this scheme be opened by `make`, in this process.

    Other processes find it by an entry point named after the scheme, in the group "raykv.tiers".
    """
    _registered[scheme.lower()] = make


def open_tier(url: TierUrl) -> Tier:
    """Raises as `tier_for`; ValueError or OSError where the tier can't be used, saying what to change."""
    return tier_for(url)(url)


def tier_for(url: TierUrl) -> Maker:
    """ValueError if nothing opens such a URL; ImportError where what opens it isn't installed."""
    make = registered(url.scheme)
    if make:
        return make
    if url.scheme == "file":
        from raykv.tiers.file import FileTier

        return FileTier
    if url.scheme in REDIS:
        try:
            from raykv.tiers.redis import RedisTier
        except ModuleNotFoundError as error:
            raise ImportError(f"external={url.text}: {error}: pip install 'raykv[redis]'") from error
        return RedisTier
    return _of_fsspec(url)


def registered(scheme: str) -> Maker | None:
    """What `register_tier` or an entry point of another package gives for the scheme."""
    if scheme not in _registered:
        for entry_point in entry_points(group=ENTRY_POINTS, name=scheme):
            _registered[scheme] = entry_point.load()
    return _registered.get(scheme)


def _of_fsspec(url: TierUrl) -> Maker:
    known = f"file, {', '.join(REDIS)}, what was given to raykv.tiers.register_tier"
    unknown = f"external={url.text}: unknown scheme {url.scheme!r}: known are {known}"
    try:
        import fsspec

        from raykv.tiers.fsspec import FsspecTier
    except ModuleNotFoundError as error:
        raise ImportError(f"{unknown}, and what fsspec knows: pip install 'raykv[fsspec]'") from error
    if url.scheme not in fsspec.available_protocols():
        raise ValueError(f"{unknown}, and what fsspec knows: {', '.join(sorted(fsspec.available_protocols()))}")
    try:
        fsspec.get_filesystem_class(url.scheme)
    except ImportError as error:
        raise ImportError(f"external={url.text}: {error}") from error
    return FsspecTier
