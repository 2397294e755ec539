"""What a match counts of the blocks that it found."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from raykv.client.lease import Lease
from raykv.client.match import Match
from raykv.keys import CacheId, Keys
from raykv.metrics.exporter import Exporter
from raykv.protocol import LOCATION

HERE, TIER, BLOCKS = 4, 3, 4


def test_blocks_that_were_fetched_from_a_tier_are_counted_once() -> None:
    exporter, rows = Exporter("p"), np.zeros((BLOCKS, 16), np.uint8)
    session: Any = SimpleNamespace(local=None, directory=SimpleNamespace(metrics=exporter))
    source = np.zeros(BLOCKS, LOCATION)
    source["node"] = TIER
    match = Match(session, Keys(rows, CacheId("m", 16, 4096, b"")), 1.0)
    match._leases.append(Lease(session, 4096, HERE, (1, 1, 0), source, rows))
    match._leases[0].source["node"] = HERE  # as `fetch` does
    match.count()
    hits = {tags: value for (name, tags), value in exporter._added.items() if name == "hit_tokens_total"}
    assert hits == {(("model", "m"), ("source", "external")): 16 * BLOCKS}
