"""SGLang's HiCache on a pool: every method that SGLang calls, with SGLang's own host pools if its sources are here."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.engines.hicache import KINDS, documented, imported
from helpers.pools import eventually, kill, other_node

import raykv

PAGE = 16
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
Start = Callable[..., raykv.KVPool]


@pytest.fixture(scope="module", params=KINDS)
def hicache(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    with imported(request.param) as found:
        yield found


@pytest.fixture(scope="module")
def shared(start_for_module: Start) -> raykv.KVPool:
    """A pool for all tests of the file, each of which has its own prompts."""
    return start_for_module()


@pytest.fixture
def pool(shared: raykv.KVPool) -> raykv.KVPool:
    return shared


@pytest.fixture
def own_pool(start: Start) -> raykv.KVPool:
    """A pool for a test that ends it, or parts of it."""
    return start()


def storage(hicache: SimpleNamespace, pool: raykv.KVPool, host: Any, **config: Any) -> Any:
    """Our storage with a host pool, made as SGLang makes it."""
    whole = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "m",
        "extra_config": {"interface_v1": 1, "pool": pool.name},
    }
    made = hicache.Storage(hicache.Config(**{**whole, **config}), {})
    made.register_mem_pool_host(host)
    return made


def hashes(prompt: int, pages: int) -> list[str]:
    """Chained hashes of the length and alphabet of SGLang's, which its native code makes."""
    found, before = [], b""
    for page in range(pages):
        before = hashlib.sha256(before + b"%d/%d" % (prompt, page)).digest()
        found.append(before.hex())
    return found


def content(host: Any, key: str) -> torch.Tensor:
    """The only right bytes of a page."""
    page, seed = host.get_dummy_flat_data_page(), int(key[:12], 16)
    made = torch.randint(0, 256, (page.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return made.view(page.dtype)


def raw(host: Any, page: int) -> torch.Tensor:
    """Bytes of a page, read by SGLang's own copy."""
    found: torch.Tensor = host.get_data_page(page * host.page_size)
    return found.contiguous().view(torch.uint8)


def fill(host: Any, page: int, key: str) -> None:
    host.set_from_flat_data_page(page * host.page_size, content(host, key))


def is_right(host: Any, page: int, key: str) -> bool:
    return torch.equal(raw(host, page), content(host, key).view(torch.uint8))


def at(host: Any, pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * host.page_size, (page + 1) * host.page_size) for page in pages])


def put(made: Any, host: Any, keys: list[str], pages: list[int]) -> list[bool]:
    for page, key in zip(pages, keys, strict=True):
        fill(host, page, key)
    stored: list[bool] = made.batch_set_v1(keys, at(host, pages))
    return stored


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["kv_pool", "latent_pool"])
def test_pages_come_back_to_other_places_and_touch_no_others(
    hicache: SimpleNamespace, pool: raykv.KVPool, kind: str, layout: str
) -> None:
    host, keys = getattr(hicache, kind)(layout, PAGE), hashes(1, 6)
    made = storage(hicache, pool, host)
    assert made.batch_exists(keys) == 0
    assert put(made, host, keys[:4], [3, 0, 7, 5]) == [True] * 4
    assert made.batch_exists(keys) == 4
    before = [raw(host, page).clone() for page in range(16)]
    read = made.batch_get_v1(keys, at(host, [15, 9, 2, 11, 12, 1]))
    assert read == [True] * 4 + [False] * 2
    assert all(is_right(host, page, key) for page, key in zip([15, 9, 2, 11], keys, strict=False))
    assert all(torch.equal(raw(host, page), before[page]) for page in range(16) if page not in (15, 9, 2, 11))
    assert put(made, host, keys, [0, 1, 2, 3, 4, 5]) == [True] * 6  # the pool had four of them
    assert made.batch_exists(keys[2:]) == 4  # SGLang asks only for what follows the prefix that it has itself
    assert pool.stats()["faults"] == {}


@pytest.mark.promise
def test_another_engine_finds_them_and_parents_go_along(hicache: SimpleNamespace, pool: raykv.KVPool) -> None:
    host, keys = hicache.kv_pool("page_first", PAGE), hashes(2, 4)
    made = storage(hicache, pool, host)
    put(made, host, keys[:2], [0, 1])
    for page, key in enumerate(keys[2:]):
        fill(host, page, key)
    assert made.batch_set_v1(keys[2:], at(host, [0, 1]), hicache.Info(prefix_keys=keys[:2])) == [True, True]
    other = hicache.kv_pool("page_first", PAGE)
    assert storage(hicache, pool, other).batch_get_v1(keys, at(other, [4, 5, 6, 7])) == [True] * 4
    assert all(is_right(other, 4 + number, key) for number, key in enumerate(keys))


def test_pages_of_another_node_come_too(
    hicache: SimpleNamespace, pool: raykv.KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, keys = hicache.kv_pool("layer_first", PAGE), hashes(16, 6)
    put(storage(hicache, pool, host), host, keys, list(range(6)))
    module = sys.modules[hicache.Storage.__module__]
    monkeypatch.setattr(module, "attach", lambda name: raykv.attach(name, node_id=other_node(pool)))
    there = storage(hicache, pool, host)
    assert there.batch_get_v1(keys, at(host, list(range(8, 14)))) == [True] * 6
    assert all(is_right(host, 8 + number, key) for number, key in enumerate(keys))
    assert there._session.node_id == other_node(pool)


@pytest.mark.parametrize("extra", [{"interface_v1": 1}, {}], ids=["zero_copy", "flat"])
def test_pages_are_charged_to_the_tenant_that_is_configured(
    hicache: SimpleNamespace, pool: raykv.KVPool, extra: dict[str, Any]
) -> None:
    host, keys = hicache.kv_pool("page_first", PAGE), hashes(17 + len(extra), 2)
    made = storage(hicache, pool, host, extra_config={**extra, "pool": pool.name, "tenant": "team-a"})
    pool.set_quota("team-a", minimum=0.1)
    assert pool.quotas()["team-a"]["used"] == 0
    if extra:
        assert put(made, host, keys, [0, 1]) == [True, True]
    else:
        assert made.batch_set(keys, [content(host, key) for key in keys])
    assert pool.quotas()["team-a"]["used"] >= 2 * content(host, keys[0]).nbytes
    assert pool.remove_quota("team-a")


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model": ({}, {"model_name": "n"}),
    "rank": ({"tp_size": 2}, {"tp_size": 2, "tp_rank": 1}),
    "size": ({}, {"tp_size": 2}),
    "stage": ({"pp_size": 2}, {"pp_size": 2, "pp_rank": 1}),
    "context": ({"attn_cp_size": 2}, {"attn_cp_size": 2, "attn_cp_rank": 1}),
}


@pytest.mark.parametrize("which", OTHERS)
def test_who_has_other_kv_finds_nothing(hicache: SimpleNamespace, pool: raykv.KVPool, which: str) -> None:
    host, keys = hicache.kv_pool("page_first", PAGE), hashes(20 + list(OTHERS).index(which), 2)
    one, other = (storage(hicache, pool, host, **config) for config in OTHERS[which])
    assert put(one, host, keys, [0, 1]) == [True, True]
    assert one.batch_exists(keys) == 2 and other.batch_exists(keys) == 0
    assert other.batch_get_v1(keys, at(host, [2, 3])) == [False, False]


@pytest.mark.parametrize(
    "option", ["kv_cache_dtype", "quantization", "revision", "json_model_override_args", "context_length"]
)
def test_engines_with_other_options_share_nothing(
    hicache: SimpleNamespace, pool: raykv.KVPool, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """For SGLang's host pools all kinds of fp8 are uint8, and all weights of a model have one name."""
    host, keys = hicache.kv_pool("page_first", PAGE), hashes(hash(option), 2)
    one = storage(hicache, pool, host)
    assert put(one, host, keys, [0, 1]) == [True, True]
    monkeypatch.setattr(hicache.arguments, option, "another", raising=False)
    assert one.batch_exists(keys) == 2 and storage(hicache, pool, host).batch_exists(keys) == 0


def test_layouts_of_one_size_do_not_share(hicache: SimpleNamespace, pool: raykv.KVPool) -> None:
    keys = hashes(4, 1)
    for layout in LAYOUTS:
        host = hicache.kv_pool(layout, PAGE)
        made = storage(hicache, pool, host)
        assert made.batch_exists(keys) == 0
        put(made, host, keys, [0])


def test_ranks_that_have_the_same_kv_share_it(hicache: SimpleNamespace, pool: raykv.KVPool) -> None:
    host, keys = hicache.latent_pool("page_first", PAGE), hashes(5, 2)
    put(storage(hicache, pool, host, is_mla_model=True, tp_size=2), host, keys, [0, 1])
    assert storage(hicache, pool, host, is_mla_model=True, tp_size=2, tp_rank=1).batch_exists(keys) == 2
    assert storage(hicache, pool, host, is_mla_model=True, tp_size=4, tp_rank=3).batch_exists(keys) == 2


def test_data_parallel_engines_share(hicache: SimpleNamespace, pool: raykv.KVPool) -> None:
    host, keys = hicache.kv_pool("page_first", PAGE), hashes(6, 2)
    put(storage(hicache, pool, host), host, keys, [0, 1])
    assert storage(hicache, pool, host, dp_rank=1).batch_exists(keys) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_zero_copy_sglang_copies_pages_itself(
    hicache: SimpleNamespace, pool: raykv.KVPool, layout: str
) -> None:
    host, keys = hicache.kv_pool(layout, PAGE), hashes(7, 3)
    made = storage(hicache, pool, host, extra_config={"pool": pool.name})
    assert not made.exists(keys[0])
    assert made.get(keys[0], host.get_dummy_flat_data_page()) is None
    assert made.set(keys[0], content(host, keys[0]))
    assert made.batch_set(keys[:2], [content(host, key) for key in keys[:2]])
    assert made.exists(keys[1]) and made.batch_exists(keys) == 2
    pages = made.batch_get(keys, [host.get_dummy_flat_data_page() for _ in keys])
    assert pages[2] is None
    for number, key in enumerate(keys[:2]):
        host.set_from_flat_data_page(number * PAGE, pages[number])
        assert is_right(host, number, key)
    assert storage(hicache, pool, host).batch_exists(keys) == 0  # the stored blocks have another layout


def test_what_does_not_fit_is_a_miss_and_touches_nothing(hicache: SimpleNamespace, pool: raykv.KVPool) -> None:
    host, keys = hicache.kv_pool("page_first", PAGE), hashes(8, 2)
    made = storage(hicache, pool, host)
    put(made, host, keys, [0, 1])
    before = host.kv_buffer.clone()
    for wrong in (at(host, [2]), at(host, [2, 16]), at(host, [2, 3]) - 4 * PAGE):
        assert made.batch_get_v1(keys, wrong) == [False, False]
        assert made.batch_set_v1(hashes(9, 2), wrong) == [False, False]
    assert torch.equal(host.kv_buffer.view(torch.uint8), before.view(torch.uint8))
    assert made.batch_exists(hashes(9, 2)) == 0
    assert made.get(keys[0], torch.zeros(4)) is None and not made.set(keys[0], torch.zeros(4))
    assert made.batch_get_v2([hicache.Transfer(name="swa", host_indices=at(host, [0]), keys=keys[:1])]) == {
        "swa": [False]
    }
    assert pool.session.directory.faults == {} and made._session.directory.faults["sglang"] == 9


def transfer(hicache: SimpleNamespace, host: Any, keys: list[str], pages: list[int], name: str, policy: str) -> Any:
    found = getattr(hicache.Policy, policy)
    return hicache.Transfer(name=name, host_indices=at(host, pages), keys=keys, hit_policy=found)


def test_several_host_pools_have_their_own_say_on_a_prefix(hicache: SimpleNamespace, pool: raykv.KVPool) -> None:
    host, index, state = (
        hicache.kv_pool("page_first", PAGE),
        hicache.latent_pool("page_first", PAGE),
        hicache.state_pool(),
    )
    made, keys = storage(hicache, pool, host), hashes(10, 6)
    made.register_mem_host_pool_v2(host, "kv")
    made.register_mem_host_pool_v2(index, "indexer")
    made.register_mem_host_pool_v2(state, "mamba")
    put(made, host, keys, list(range(6)))
    for number, key in enumerate(keys[:5]):
        fill(index, number, key)
    for number, page in ((0, 1), (1, 3), (2, 5)):  # states at the ends of pages 1, 3 and 5
        fill(state, number, keys[page])
    indexer = transfer(hicache, index, keys[:5], list(range(5)), "indexer", "ALL_PAGES")
    states = transfer(hicache, state, [keys[1], keys[3], keys[5]], [0, 1, 2], "mamba", "TRAILING_PAGES")
    last = transfer(hicache, state, keys[5:], [0], "mamba", "TRAILING_PAGES")
    assert made.batch_exists_v2(keys, [indexer]).kv_hit_pages == 0
    assert made.batch_set_v2([indexer, states]) == {"indexer": [True] * 5, "mamba": [True] * 3}
    assert made.batch_exists_v2(keys, [indexer]).kv_hit_pages == 5
    both = made.batch_exists_v2(keys, [indexer, last])
    assert (both.kv_hit_pages, both.restorable_prefix_pages) == (4, [2, 4])
    assert both.extra_pool_hit_pages == {"kv": 4, "indexer": 4, "mamba": 4}
    groups = hicache.Transfer(name="swa", keys=keys, hit_policy=hicache.Policy.BLOCK_GROUPS)
    assert made.batch_exists_v2(keys, [groups, indexer]).extra_pool_hit_pages == {"kv": 5, "indexer": 5}
    alone = made.batch_exists_v2(keys)
    assert (alone.kv_hit_pages, alone.restorable_prefix_pages) == (6, [1, 2, 3, 4, 5, 6])
    wanted = [
        transfer(hicache, index, keys[:4], [9, 8, 7, 6], "indexer", "ALL_PAGES"),
        transfer(hicache, state, [keys[3]], [7], "mamba", "TRAILING_PAGES"),
    ]
    assert made.batch_get_v2(wanted) == {"indexer": [True] * 4, "mamba": [True]}
    assert all(is_right(index, page, key) for page, key in zip([9, 8, 7, 6], keys, strict=False))
    assert is_right(state, 7, keys[3])


def test_ranks_keep_states_of_their_own_beside_kv_that_is_the_same(
    hicache: SimpleNamespace, pool: raykv.KVPool
) -> None:
    host, state, keys = hicache.latent_pool("page_first", PAGE), hicache.state_pool(), hashes(11, 1)
    ranks = [storage(hicache, pool, host, is_mla_model=True, tp_size=2, tp_rank=rank) for rank in range(2)]
    for rank in ranks:
        rank.register_mem_host_pool_v2(state, "mamba")
    put(ranks[0], host, keys, [0])
    states = transfer(hicache, state, keys, [0], "mamba", "TRAILING_PAGES")
    ranks[0].batch_set_v2([states])
    assert [rank.batch_exists_v2(keys, [states]).kv_hit_pages for rank in ranks] == [1, 0]
    ranks[1].batch_set_v2([states])
    assert ranks[1].batch_exists_v2(keys, [states]).kv_hit_pages == 1


def test_kv_without_memory_goes_along_with_the_others(hicache: SimpleNamespace, pool: raykv.KVPool) -> None:
    host, side, keys = hicache.logical_pool(PAGE), hicache.latent_pool("page_first", PAGE), hashes(12, 3)
    made = storage(hicache, pool, host)
    made.register_mem_host_pool_v2(side, "deepseek_v4_c4")
    for number, key in enumerate(keys[:2]):
        fill(side, number, key)
    stored = transfer(hicache, side, keys[:2], [0, 1], "deepseek_v4_c4", "ALL_PAGES")
    assert made.batch_set_v1(keys, at(host, [0, 1, 2])) == [True] * 3
    assert made.batch_set_v2([stored]) == {"deepseek_v4_c4": [True, True]}
    assert made.batch_exists_v2(keys, [stored]).kv_hit_pages == 2
    assert made.batch_exists(keys) == 0 and made.batch_exists_v2(keys).kv_hit_pages == 0
    assert made.batch_get_v1(keys, at(host, [0, 1, 2])) == [True] * 3


def test_clear_forgets_all(hicache: SimpleNamespace, pool: raykv.KVPool) -> None:
    host, keys = hicache.kv_pool("page_first", PAGE), hashes(13, 2)
    made = storage(hicache, pool, host)
    put(made, host, keys, [0, 1])
    made.clear()
    assert made.batch_exists(keys) == 0


def all_methods(made: Any, hicache: SimpleNamespace, host: Any, state: Any, keys: list[str]) -> list[Any]:
    pages, last = list(range(len(keys))), keys[-1:]
    trailing = transfer(hicache, state, last, [0], "mamba", "TRAILING_PAGES")
    return [
        made.batch_exists(keys),
        any(made.batch_set_v1(keys, at(host, pages))),
        any(made.batch_get_v1(keys, at(host, pages))),
        any(made.batch_set_v1(keys[2:], at(host, pages[2:]), hicache.Info(prefix_keys=keys[:2]))),
        made.batch_exists_v2(keys, [trailing]).kv_hit_pages,
        any(made.batch_set_v2([trailing])["mamba"]),
        any(made.batch_get_v2([trailing])["mamba"]),
        made.exists(keys[0]),
        made.get(keys[0], host.get_dummy_flat_data_page()) is not None,
        made.set(keys[0], host.get_dummy_flat_data_page()),
        any(page is not None for page in made.batch_get(keys, [host.get_dummy_flat_data_page() for _ in keys])),
        made.batch_set(keys, [host.get_dummy_flat_data_page() for _ in keys]),
    ]


@pytest.mark.parametrize("extra", [{"interface_v1": 1}, {}], ids=["zero_copy", "flat"])
def test_a_stopped_pool_is_all_misses(hicache: SimpleNamespace, own_pool: raykv.KVPool, extra: dict[str, Any]) -> None:
    host, state, keys = hicache.kv_pool("page_first", PAGE), hicache.state_pool(), hashes(14, 4)
    made = storage(hicache, own_pool, host, extra_config={**extra, "pool": own_pool.name})
    made.register_mem_host_pool_v2(state, "mamba")
    all_methods(made, hicache, host, state, keys)
    assert made.batch_exists(keys) == 4
    own_pool.stop()
    eventually(lambda: not made.batch_exists(keys))
    assert not any(all_methods(made, hicache, host, state, keys))
    made.clear()
    made.close()
    assert not any(all_methods(made, hicache, host, state, keys))


@pytest.mark.parametrize("what", ["store", "directory"])
def test_killed_actors_cost_hits_and_never_a_wrong_byte(
    hicache: SimpleNamespace, own_pool: raykv.KVPool, what: str
) -> None:
    """Two threads store and read while an actor is killed, twice. Afterwards all is found again."""
    part = own_pool.node_id if what == "store" else what
    end, counts = threading.Event(), {"read": 0, "missed": 0}
    wrong: list[str] = []
    raised: list[Exception] = []

    def churn(first: int) -> None:
        host = hicache.kv_pool("layer_first", PAGE)
        made, step = storage(hicache, own_pool, host), 0
        try:
            while not end.is_set():
                keys = hashes(first + step % 5, 6)
                put(made, host, keys, list(range(6)))
                read = made.batch_get_v1(keys, at(host, list(range(8, 14))))
                counts["read"] += sum(read)
                counts["missed"] += len(read) - sum(read)
                wrong.extend(
                    key for number, key in enumerate(keys) if read[number] and not is_right(host, 8 + number, key)
                )
                step += 1
        except Exception as error:
            raised.append(error)

    def reads_more() -> None:
        before = counts["read"]
        eventually(lambda: counts["read"] > before + 12)

    threads = [threading.Thread(target=churn, args=(first,)) for first in (100, 103)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            reads_more()
            kill(own_pool, part)
        reads_more()
    finally:
        end.set()
        for thread in threads:
            thread.join(60)
    assert not raised and not wrong and not any(thread.is_alive() for thread in threads)
    host, keys = hicache.kv_pool("layer_first", PAGE), hashes(110, 4)
    made = storage(hicache, own_pool, host)
    eventually(lambda: all(put(made, host, keys, [0, 1, 2, 3])) and made.batch_exists(keys) == 4)
    assert all(made.batch_get_v1(keys, at(host, [4, 5, 6, 7])))


@pytest.mark.parametrize("hicache", ["sources"], indirect=True)  # the stand-in has no factory
def test_sglang_makes_it_by_the_configuration_of_the_docs(hicache: SimpleNamespace, pool: raykv.KVPool) -> None:
    extra = documented() | {"pool": pool.name}
    config = hicache.Config(0, 1, 0, 1, 0, 1, False, False, True, "m", extra_config=extra)
    host = hicache.kv_pool("page_first", PAGE)
    made = hicache.factory.create_backend("dynamic", config, host)
    made.register_mem_pool_host(host)
    made.on_host_pools_registered()
    keys = hashes(15, 3)
    assert put(made, host, keys, [0, 1, 2]) == [True] * 3 and made.batch_exists(keys) == 3


def test_mistakes_are_said_before_sglang_starts(hicache: SimpleNamespace, pool: raykv.KVPool) -> None:
    host = hicache.kv_pool("page_first", PAGE)
    with pytest.raises(ValueError, match="--served-model-name"):
        storage(hicache, pool, host, model_name=None)
    with pytest.raises(raykv.PoolNotFound):
        storage(hicache, pool, host, extra_config={"pool": "nobody's"})
