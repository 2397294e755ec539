"""What a match counts of the blocks that it found."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from raykv.client.hits import count_found, found_tokens
from raykv.client.lease import Lease
from raykv.keys import CacheId
from raykv.metrics.exporter import Exporter
from raykv.protocol import LOCATION

HERE, TIER, BLOCKS = 4, 3, 4


def test_blocks_that_were_fetched_from_a_tier_are_counted_once() -> None:
    exporter, rows = Exporter("p"), np.zeros((BLOCKS, 16), np.uint8)
    session: Any = SimpleNamespace(local=None, directory=SimpleNamespace(metrics=exporter))
    source = np.zeros(BLOCKS, LOCATION)
    source["node"] = TIER
    cache = CacheId("m", 16, 4096, b"")
    lease = Lease(session, None, 4096, (b"", HERE, 1, 1, 0), source, rows)
    lease.source["node"] = HERE  # as `fetch` does
    count_found(session, cache, 16 * BLOCKS, found_tokens([lease], cache))
    hits = {tags: value for (name, tags), value in exporter._added.items() if name == "hit_tokens_total"}
    assert hits == {(("model", "m"), ("source", "external")): 16 * BLOCKS}
