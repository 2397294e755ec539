"""The metrics that a match counts: which blocks it found, and for which tenant."""

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
from helpers.directory.pool import KEYS

from raykv.client.cache import KVCache
from raykv.client.leases.hits import count_found, found_tokens
from raykv.client.leases.lease import Lease
from raykv.client.leases.leased_blocks import LeasedBlocks, LeaseName
from raykv.client.leases.match import Match
from raykv.client.request_record import RequestReport
from raykv.keys import CacheId, Keys, tenant_of
from raykv.metrics.exporter import LABELS_MAX, OTHER, Exporter
from raykv.protocol.clients import Matched
from raykv.protocol.location import LOCATION

HERE, TIER, BLOCKS, SECRET = 4, 3, 4, b"s" * 32
SALTED = CacheId("m", 16, 4096, b"", tenant_of("acme", SECRET))


def session(exporter: Exporter) -> Any:
    """The session of a process without a store. Its directory finds nothing."""
    directory = SimpleNamespace(
        metrics=exporter, requests=RequestReport(), client=1, release=lambda lease: None, drop=list
    )
    directory.match = lambda *request: (1, Matched(1, b"", b""))
    nothing = SimpleNamespace(
        name="p", secret=SECRET, local=None, memory_name="", directory=directory, local_with=lambda *what: None
    )
    nothing.background = lambda function, *arguments: function(*arguments)
    return nothing


def added(exporter: Exporter, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    return {tags: value for (metric, tags), value in exporter._added.items() if metric == name}


def test_blocks_that_were_fetched_from_a_tier_are_counted_once() -> None:
    exporter, rows = Exporter("p"), np.zeros((BLOCKS, 16), np.uint8)
    source = np.zeros(BLOCKS, LOCATION)
    source["node"] = TIER
    match = Match(session(exporter), Keys(rows, SALTED), 1.0, counted=True)
    name, directory = LeaseName(b"", HERE, 1, 1, 0), match._session.directory
    match._leases.append(Lease(match._session, None, LeasedBlocks(directory, 4096, name, source, rows)))
    match._leases[0].blocks.source["node"] = HERE  # as `fetch` does
    count_found(match._session, SALTED, match._asked, found_tokens(match._leases, SALTED))
    tags = (("model", "m"), ("tenant", tenant_of("acme", SECRET)))
    assert added(exporter, "hit_tokens_total") == {(*tags, ("source", "external")): 16 * BLOCKS}
    assert added(exporter, "asked_tokens_total") == {tags: 16 * BLOCKS}
    assert added(exporter, "lookups_total") == {tags: 1}


def test_only_what_an_engine_asks_for_is_a_look_up() -> None:
    exporter = Exporter("p")
    cache = KVCache(session(exporter), SALTED, bytes(32), 1.0)
    keys = Keys(np.frombuffer(b"".join(KEYS[:BLOCKS]), np.uint8).reshape(-1, 16), SALTED)
    assert not cache.prefetch(keys)  # the stand-in for the directory answers at once
    Match(cache.session, keys, 1.0).ask()  # a drain asks so, and a swap that is tried again
    assert not added(exporter, "asked_tokens_total") and not added(exporter, "lookups_total")
    cache.match(keys)
    assert sum(added(exporter, "asked_tokens_total").values()) == 16 * BLOCKS


def test_tenants_and_models_are_bounded() -> None:
    exporter = Exporter("p")
    labels = [exporter.label("tenant", tenant_of(str(number), SECRET)) for number in range(LABELS_MAX + 10)]
    assert len(set(labels)) == LABELS_MAX + 1 and labels[LABELS_MAX:] == [OTHER] * 10
    assert exporter.label("tenant", labels[0]) == labels[0] and exporter.label("model", "m") == "m"


def test_salts_do_not_make_named_tenants_others() -> None:
    exporter, nothing = Exporter("p"), found_tokens([], SALTED)
    for number in range(LABELS_MAX + 1):
        count_found(session(exporter), SALTED._replace(tenant=tenant_of(str(number), SECRET)), 1, nothing)
    count_found(session(exporter), SALTED._replace(tenant="acme", is_named=True), 1, nothing)
    tenants = [dict(tags)["tenant"] for tags in added(exporter, "lookups_total")]
    assert tenants[-2:] == [OTHER, "acme"] and len(set(tenants)) == LABELS_MAX + 2


def test_a_salt_is_told_by_its_hash_and_no_salt_by_nothing() -> None:
    assert tenant_of("acme", SECRET) == tenant_of(b"acme", SECRET) != tenant_of("acme", bytes(32))
    assert len(tenant_of("acme", SECRET)) == 8 and not tenant_of("", SECRET) and not tenant_of(None, SECRET)
    assert tenant_of("acme", SECRET) != hashlib.sha256(b"acme").hexdigest()[:8], "a list of salts would tell it"
    assert SALTED._replace(tenant="") == SALTED and SALTED._replace(model="n") != SALTED
    cache = KVCache(session(Exporter("p")), SALTED._replace(tenant=""), bytes(32), 1.0)
    keys = cache.keys(range(32), salt="acme")
    assert keys[:1].cache.tenant == tenant_of("acme", SECRET) and not cache.keys(range(32)).cache.tenant
    assert cache.match(keys).num_blocks == 0  # the cache accepts the keys
