"""Questions and stores of a vLLM scheduler for ranks on several nodes, and for parts of several kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from helpers.engines.rank import HASHES, StoringRank
from helpers.pools import MIB, eventually, node_store, other_node, settled, worker

import raykv
from raykv.client.directory_client import DirectoryClient

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.request import request
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from raykv.integrations.vllm.identity.groups import Group
from raykv.integrations.vllm.scheduler.manager import RayKVManager
from raykv.integrations.vllm.worker.ranks import Rank, tell, told

BYTES = (4096, 8192)  # of a part: the stages of a pipeline may have different numbers of layers
KEYS = [make_offload_key(one, 0) for one in HASHES]
GROUPS = [Group(0, 0, 16, 0)]


@pytest.fixture
def manager(start: Callable[..., raykv.KVPool]) -> Iterator[RayKVManager]:
    pool = raykv.attach(start(cpu_memory=64 * MIB).name)
    manager = RayKVManager(pool, {"model": "m", "dtype": "uint8", "layout": "rows"})
    yield manager
    manager.shutdown()


def ask(manager: RayKVManager, context: ReqContext) -> int:
    """How many leading chunks are hits."""

    def answered() -> list[LookupResult]:
        answers = [manager.lookup(key, context) for key in KEYS]
        return [] if LookupResult.RETRY in answers else answers

    return eventually(answered).count(LookupResult.HIT)


def test_one_question_for_all_ranks_whose_blocks_are_on_several_nodes(
    manager: RayKVManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = manager._pool
    here, there = pool.node_id, other_node(pool)
    manager.set_ranks([Rank(here, (0,), BYTES[:1]), Rank(there, (1,), BYTES[1:])], GROUPS)
    writers = {0: here, 1: there}
    for part, count in ((0, 12), (1, 7)):
        actor = worker(pool, writers[part], StoringRank)
        stored = ray.get(actor.put.remote(part, BYTES[part], count))
        assert stored == count
    calls: Counter[str] = Counter()
    send = DirectoryClient._send

    def spied(self: DirectoryClient, kind: Any, method: str, *request: Any, **how: Any) -> Any:
        calls[method] += 1
        return send(self, kind, method, *request, **how)

    monkeypatch.setattr(DirectoryClient, "_send", spied)
    context = request("one", KEYS)
    assert ask(manager, context) == 7
    assert calls["match_parts"] == 1 and calls["match"] == 0
    load = manager.prepare_load(KEYS[2:7], context)
    assert [[part.away for part in rank] for rank in load.ranks] == [[False], [False]]
    nonces = [ray.get(node_store(pool, node).describe_arena.remote(None))[2] for node in (here, there)]
    assert [rank[0].leased[0].name.nonce for rank in load.ranks] == nonces
    stats = pool.stats()
    assert (stats["leases"], stats["hits"], stats["remote_hits"]) == (2, 14, 0)
    manager.complete_load(KEYS[2:7], context)
    manager.on_request_finished(context)
    eventually(lambda: settled(pool))


def test_what_all_ranks_have_is_stored_once_and_read_on_every_node(manager: RayKVManager) -> None:
    pool = manager._pool
    here, there = pool.node_id, other_node(pool)
    manager.set_ranks([Rank(node, (0,), BYTES[:1]) for node in (here, there, there)], GROUPS)
    actors = [worker(pool, node, StoringRank) for node in (here, there, there)]
    assert ray.get(actors[1].put.remote(0, BYTES[0], 9)) == 9
    assert pool.stats()["keys"] == 9
    context = request("latent", KEYS)
    assert ask(manager, context) == 9
    load = manager.prepare_load(KEYS[:9], context)
    assert [part.away for (part,) in load.ranks] == [True, False, False]
    for actor, (part,) in zip(actors, load.ranks, strict=True):
        out = ray.get(actor.get.remote(part.leased, BYTES[0]))
        assert out.shape == (9, BYTES[0]) and (out == 0).all()
    manager.complete_load(KEYS[:9], context)
    manager.on_request_finished(context)
    eventually(lambda: settled(pool))


def test_nothing_is_asked_or_stored_before_the_workers_told_where_they_are(manager: RayKVManager) -> None:
    context = request("early", KEYS)
    assert ask(manager, context) == 0
    assert manager.prepare_store(KEYS, context).keys_to_store == []
    manager.on_request_finished(context)


def test_workers_tell_where_they_are_in_the_order_of_ranks(manager: RayKVManager) -> None:
    pool = manager._pool
    ranks = [Rank(f"n{number}", (number,), (1, 2)) for number in range(4)]
    for number in (2, 0, 3, 1):
        tell(pool.name, "engine", number, ranks[number])
    with pytest.raises(RuntimeError, match="4 of 5 workers"):
        told(pool.name, "engine", 5)
    assert told(pool.name, "engine", 4) == ranks
    with pytest.raises(RuntimeError, match="0 of 4 workers"):  # the ranks told of another start of the engine
        told(pool.name, "engine", 4)
