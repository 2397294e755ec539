"""Metrics of matches: tokens that were found, and tokens and seconds that engines saved."""

from collections.abc import Iterable

from raykv.client.leases.lease import Lease
from raykv.client.session import Session
from raykv.keys import CacheId


def found_tokens(leases: Iterable[Lease], cache: CacheId) -> dict[str, int]:
    """Found tokens, by source: "memory", "node" or "external"."""
    found = dict.fromkeys(("memory", "node", "external"), 0)
    for lease in leases:
        for source, blocks in lease.found.items():
            found[source] += blocks * cache.block_tokens
    return found


def count_found(session: Session, cache: CacheId, asked: int, found: dict[str, int]) -> None:
    """Count a look-up. asked: tokens. found: tokens by source."""
    metrics, tags = session.directory.metrics, _tags(session, cache)
    hits = {("hit_tokens_total", (*tags, ("source", source))): tokens for source, tokens in found.items()}
    metrics.add_each({("lookups_total", tags): 1, ("asked_tokens_total", tags): asked, **hits})


def count_saved(session: Session, cache: CacheId, tokens: int, tokens_per_s: float) -> None:
    """Count tokens that an engine reads instead of computing them, `tokens_per_s` a second."""
    metrics, tags = session.directory.metrics, _tags(session, cache)
    metrics.add_each(
        {("saved_tokens_total", tags): tokens, ("saved_prefill_seconds_total", tags): tokens / tokens_per_s}
    )


def _tags(session: Session, cache: CacheId) -> tuple[tuple[str, str], ...]:
    metrics, kind = (
        session.directory.metrics,
        "tenant" if cache.is_named else "salt",
    )  # users choose salts, in any number
    return ("model", metrics.label("model", cache.model)), ("tenant", metrics.label(kind, cache.tenant))
