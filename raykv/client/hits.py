"""What matches found, and what that spared their engines, for the metrics."""

from collections.abc import Iterable

from raykv.client.lease import Lease
from raykv.client.session import Session
from raykv.keys import CacheId


def found_tokens(leases: Iterable[Lease], cache: CacheId) -> dict[str, int]:
    """Tokens that were found, by where they were."""
    found = dict.fromkeys(("memory", "node", "external"), 0)
    for lease in leases:
        for source, blocks in lease.found.items():
            found[source] += blocks * cache.block_tokens
    return found


def count_found(session: Session, cache: CacheId, asked: int, found: dict[str, int]) -> None:
    """Count tokens that were asked for and found, by where they were."""
    metrics = session.directory.metrics
    metrics.add("asked_tokens_total", asked, model=cache.model)
    for source, tokens in found.items():
        metrics.add("hit_tokens_total", tokens, model=cache.model, source=source)


def count_saved(session: Session, cache: CacheId, blocks: int, block_s: float) -> None:
    """Count blocks that an engine reads instead of computing them, which takes `block_s` seconds each."""
    metrics = session.directory.metrics
    metrics.add("saved_tokens_total", blocks * cache.block_tokens, model=cache.model)
    metrics.add("saved_prefill_seconds_total", blocks * block_s, model=cache.model)
