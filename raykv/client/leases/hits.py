"""Metrics of matches: tokens found, and tokens and seconds that engines saved."""

from collections.abc import Iterable
from functools import lru_cache

from raykv.client.leases.lease import Lease
from raykv.client.session import Session
from raykv.keys import CacheId
from raykv.metrics.exporter import Exporter, Series, Tags

SOURCES = "memory", "node", "external"  # places where tokens are found


def found_tokens(leases: Iterable[Lease], cache: CacheId) -> dict[str, int]:
    """Return the number of found tokens for each of SOURCES."""
    found = dict.fromkeys(SOURCES, 0)
    for lease in leases:
        for source, blocks in lease.blocks.found.items():
            found[source] += blocks * cache.block_tokens
    return found


def count_found(session: Session, cache: CacheId, asked: int, found: dict[str, int]) -> None:
    """Count a look-up. asked: number of requested tokens. found: the result of `found_tokens`."""
    metrics = session.directory.metrics
    series = _of_look_ups(metrics, cache.model, cache.tenant, cache.is_named)
    metrics.add_each(zip(series, (1, asked, *found.values()), strict=True))


def count_saved(session: Session, cache: CacheId, tokens: int, tokens_per_s: float) -> None:
    """Count tokens that an engine reads instead of computing them. tokens_per_s: rate at which the engine computes."""
    metrics = session.directory.metrics
    series = _of_reads(metrics, cache.model, cache.tenant, cache.is_named)
    metrics.add_each(zip(series, (tokens, tokens / tokens_per_s), strict=True))


@lru_cache(1024)  # building the series again would slow each look-up
def _of_look_ups(metrics: Exporter, model: str, tenant: str, is_named: bool) -> tuple[Series, ...]:
    tags = _tags(metrics, model, tenant, is_named)
    hits = [("hit_tokens_total", (*tags, ("source", source))) for source in SOURCES]
    return ("lookups_total", tags), ("asked_tokens_total", tags), *hits


@lru_cache(1024)
def _of_reads(metrics: Exporter, model: str, tenant: str, is_named: bool) -> tuple[Series, ...]:
    tags = _tags(metrics, model, tenant, is_named)
    return ("saved_tokens_total", tags), ("saved_prefill_seconds_total", tags)


def _tags(metrics: Exporter, model: str, tenant: str, is_named: bool) -> Tags:
    kind = "tenant" if is_named else "salt"  # users choose salts, so their number is unlimited
    return ("model", metrics.label("model", model)), ("tenant", metrics.label(kind, tenant))
