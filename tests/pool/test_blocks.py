"""What users see of a pool on two nodes."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import ray
from helpers.pools import (
    BLOCK,
    eventually,
    node_store,
    other_node,
    payload,
    read,
    settled,
    store,
    tokens,
    totals,
    worker,
)
from helpers.project.torch_or_skip import torch_or_skip
from numpy.typing import NDArray

import raykv


@pytest.fixture(scope="module")
def pool(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    """Nodes of 64 MiB: 16 slabs of 4 MiB, with a staging window of 8 MiB."""
    return start_for_module()


@pytest.fixture(scope="module")
def there(pool: raykv.KVPool) -> Any:
    return worker(pool, other_node(pool))


@pytest.fixture
def cache(pool: raykv.KVPool, request: pytest.FixtureRequest) -> raykv.KVCache:
    pool.clear()
    return pool.cache(model=request.node.name, dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def test_stored_blocks_are_read_on_the_same_node(pool: raykv.KVPool, cache: raykv.KVCache) -> None:
    keys = cache.keys(tokens(1, 12))
    blocks = payload(keys, BLOCK)
    assert cache.store(keys[:8], blocks[:8]) == 8
    assert cache.store(keys, blocks[4:], start=4) == 4  # four of the blocks from number 4 on are new
    assert cache.store(keys, blocks) == 0
    with cache.match(cache.keys(np.r_[tokens(1, 12), tokens(2, 1)])) as match:
        assert (match.num_blocks, match.num_tokens, match.nodes) == (12, 192, [pool.node_id])
        out = np.zeros((13, BLOCK), np.uint8)
        assert match.read(out) == 12
        assert (out[:12] == blocks).all() and not out[12].any()
        verified = np.zeros((12, BLOCK), np.uint8)
        assert match.read(verified, verify=True) == 12
        assert (verified == blocks).all()
    with cache.match(cache.keys(tokens(2, 3))) as match:
        assert (match.num_blocks, match.num_tokens, match.nodes) == (0, 0, [])
        assert match.read(np.zeros((0, BLOCK), np.uint8)) == 0
    eventually(lambda: settled(pool))


def test_blocks_are_read_into_a_tensor(cache: raykv.KVCache) -> None:
    torch = torch_or_skip()
    keys = cache.keys(tokens(1, 12))
    assert store(cache, keys) == 12
    with cache.match(keys) as match:
        tensor = torch.zeros((12, BLOCK), dtype=torch.uint8)
        assert match.read(tensor, verify=True) == 12
        assert (tensor.numpy() == payload(keys, BLOCK)).all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_blocks_are_stored_from_and_read_into_paged_memory_of_several_layers(
    cache: raykv.KVCache, there: Any, model: str, library: str
) -> None:
    of = np if library == "numpy" else torch_or_skip()
    pages, sizes, ids = 20, (BLOCK // 2, BLOCK // 4, BLOCK // 4), [7, 0, 19, 3, 11]
    keys = cache.keys(tokens(1, 5))
    blocks = payload(keys, BLOCK)
    layers = [of.zeros((pages, size), dtype=of.uint8) for size in sizes]
    for row, block in zip(ids, blocks, strict=True):
        for layer, part in zip(layers, np.split(block, np.cumsum(sizes)[:-1]), strict=True):
            np.asarray(layer)[row] = part
    assert cache.store_from(keys, layers, ids) == 5
    assert ray.get(there.read.remote(keys, model=model))[:3] == (5, 5, 0)
    found = [of.zeros((pages, size), dtype=of.uint8) for size in sizes]
    with cache.match(keys) as match:
        assert match.read_into(found, np.array(ids[::-1]).tolist()) == 5
    for layer, same in zip(layers, found, strict=True):
        assert (np.asarray(same)[ids[::-1]] == np.asarray(layer)[ids]).all()
        assert not np.asarray(same)[[i for i in range(pages) if i not in ids]].any()


def test_async_methods_leave_the_loop_running(cache: raykv.KVCache) -> None:
    keys = cache.keys(tokens(1, 48))
    blocks, out = payload(keys, BLOCK), np.zeros((48, BLOCK), np.uint8)
    ticks: list[int] = []

    async def counted(step: Any) -> Any:
        """Count the loop's turns while a step runs. If the step blocks the loop, the count is one."""
        running, turns = asyncio.ensure_future(step), 0
        while not running.done():
            await asyncio.sleep(0)
            turns += 1
        ticks.append(turns)
        return running.result()

    async def main() -> None:
        assert await counted(cache.astore(keys[:24], blocks[:24])) == 24
        assert await counted(cache.astore_from(keys, blocks, list(range(24, 48)), start=24)) == 24
        asked = cache.amatch(keys)
        match = await counted(asked.__aenter__())
        assert match.num_blocks == 48
        assert await counted(match.aread(out)) == 48 and (out == blocks).all()
        out[:] = 0
        assert await counted(match.aread_into(out, list(range(48)))) == 48 and (out == blocks).all()
        await counted(asked.__aexit__(None, None, None))

    asyncio.run(main())
    assert len(ticks) == 6 and min(ticks[:5]) > 1, ticks  # the last step sends nothing, so it waits for nothing


def test_a_cancelled_read_is_over_when_its_caller_goes_on(pool: raykv.KVPool, cache: raykv.KVCache) -> None:
    keys = cache.keys(tokens(1, 100))
    assert store(cache, keys) == 100
    out = np.zeros((100, BLOCK), np.uint8)

    async def main() -> None:
        async with cache.amatch(keys) as match:
            task = asyncio.create_task(match.aread(out))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            before = out.copy()
            assert await asyncio.create_task(match.aread(np.zeros_like(out))) == 100
            assert (out == before).all()

    asyncio.run(main())
    eventually(lambda: settled(pool))


def test_salt_and_adapter_separate(pool: raykv.KVPool, cache: raykv.KVCache, model: str) -> None:
    ids = tokens(1, 4)
    tenant = pool.cache(model=model, dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK, salt="tenant")
    plain = cache.keys(ids)
    variants = [
        (cache, cache.keys(ids, salt="a")),
        (cache, cache.keys(ids, lora="a")),
        (cache, cache.keys(ids, extra={1: b"image"})),
        (tenant, tenant.keys(ids)),
        (pool.cache(model=model, dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK, part=1), None),
    ]
    assert store(cache, plain) == 4
    for of, keys in variants:
        with of.match(of.keys(ids) if keys is None else keys) as match:
            assert match.num_blocks == (1 if of is cache and keys is variants[2][1] else 0)
    assert store(tenant, tenant.keys(ids)) == 4
    assert read(tenant, tenant.keys(ids))[:3] == read(cache, plain)[:3] == (4, 4, 0)


def test_caches_of_two_block_sizes_share_the_memory(pool: raykv.KVPool, cache: raykv.KVCache, model: str) -> None:
    small = pool.cache(model=model, dtype="uint8", layout="rows", block_tokens=16, block_bytes=24 << 10)
    large = cache.keys(tokens(1, 600))  # more than the pool has room for
    assert store(cache, large) > 0
    keys = small.keys(tokens(2, 300))
    assert store(small, keys) == 300
    assert read(small, keys)[:3] == (300, 300, 0)
    assert store(cache, cache.keys(tokens(3, 20))) == 20
    assert read(cache, cache.keys(tokens(3, 20)))[:3] == (20, 20, 0)
    eventually(lambda: settled(pool))


def test_a_match_longer_than_the_window_streams_through_it(
    pool: raykv.KVPool, cache: raykv.KVCache, there: Any, model: str
) -> None:
    keys = cache.keys(tokens(1, 150))  # 37.5 MiB through a window of 8 MiB
    assert store(cache, keys) == 150
    assert ray.get(there.read.remote(keys, model=model)) == (150, 150, 0, [pool.node_id])
    assert ray.get(there.faults.remote()) == {}
    eventually(lambda: settled(pool))


def test_equal_keys_stored_at_once_are_written_once(
    pool: raykv.KVPool, cache: raykv.KVCache, there: Any, model: str
) -> None:
    keys = cache.keys(tokens(1, 32))
    before = pool.stats()["stored"]
    barrier = threading.Barrier(4)

    def both() -> int:
        barrier.wait()
        return store(cache, keys)

    with ThreadPoolExecutor(4) as threads:
        mine = [threads.submit(both) for _ in range(4)]
        theirs = [there.store.remote(keys, model=model) for _ in range(2)]
        stored = sum(future.result() for future in mine) + sum(ray.get(theirs))
    assert stored == pool.stats()["stored"] - before == 32
    assert totals(pool)["ready"] == 32
    assert read(cache, keys)[:3] == (32, 32, 0)


def test_a_block_is_pulled_to_a_node_once(pool: raykv.KVPool, cache: raykv.KVCache, there: Any, model: str) -> None:
    keys = cache.keys(tokens(1, 20))
    assert ray.get(there.store.remote(keys, model=model)) == 20
    here = node_store(pool, pool.node_id)
    before = ray.get(here.stats.remote())["pulled"]
    barrier = threading.Barrier(6)

    def both() -> Any:
        barrier.wait()
        return read(cache, keys)[:3]

    with ThreadPoolExecutor(6) as threads:
        assert [future.result() for future in [threads.submit(both) for _ in range(6)]] == [(20, 20, 0)] * 6
    assert ray.get(here.stats.remote())["pulled"] - before == 20
    eventually(lambda: totals(pool)["replica"] == 20)


def test_a_prompt_may_have_equal_keys_twice(pool: raykv.KVPool, cache: raykv.KVCache, there: Any, model: str) -> None:
    keys = cache.keys(tokens(1, 6))
    assert ray.get(there.store.remote(keys, model=model)) == 6
    twice: Any = np.concatenate([keys, keys])
    for _ in range(2):
        assert read(cache, twice)[:3] == (12, 12, 0)
    assert store(cache, np.concatenate([twice, cache.keys(tokens(2, 2))]), start=12) == 2
    eventually(lambda: settled(pool))


def test_an_engines_own_hashes_are_used_as_keys(cache: raykv.KVCache) -> None:
    hashes = [bytes([i]) * 32 for i in range(6)]
    keys = cache.rekey(hashes)
    assert store(cache, keys) == 6
    assert read(cache, cache.rekey(np.array([list(h) for h in hashes[:4]], np.uint8)))[:3] == (4, 4, 0)
    assert read(cache, cache.rekey(hashes[::-1])).matched == 6  # the engine decides the order of its hashes
    assert read(cache, cache.rekey([b"x" * 32])).matched == 0


BAD_INPUT: dict[str, tuple[Callable[[raykv.KVCache, Any, NDArray[np.uint8]], object], str]] = {
    "a block too small": (lambda c, k, b: c.store(k, b[:, :-1].copy()), rf"\(4, {BLOCK - 1}\).*\(4, {BLOCK}\)"),
    "blocks of floats": (lambda c, k, b: c.store(k, b.view(np.float32)), r"float32.*uint8"),
    "blocks of bfloat16": (lambda c, k, b: c.store(k, bfloat16()), r"bfloat16.*uint8"),
    "too few blocks": (lambda c, k, b: c.store(k, b[:3]), rf"\(3, {BLOCK}\).*\(4, {BLOCK}\)"),
    "too many blocks": (lambda c, k, b: c.store(k, b, start=1), rf"\(4, {BLOCK}\).*\(3, {BLOCK}\)"),
    "blocks apart": (lambda c, k, b: c.store(k[:2], b[::2]), r"not contiguous"),
    "one number": (lambda c, k, b: c.store(k, np.uint8(3)), r"uint8"),
    "a scalar array": (lambda c, k, b: c.store(k, np.array(3, np.uint8)), r"shape \(\).*\(4, "),
    "a list": (lambda c, k, b: c.store(k, [b]), r"list.*numpy"),
    "start beyond": (lambda c, k, b: c.store(k, b, start=5), r"start=5.*4 keys"),
    "start below": (lambda c, k, b: c.store(k, b, start=-1), r"start=-1.*4 keys"),
    "keys of 15 bytes": (lambda c, k, b: c.store(k[:, :15], b), r"\(4, 15\).*\(n, 16\)"),
    "one key": (lambda c, k, b: c.match(k[0]), r"\(16,\).*\(n, 16\)"),
    "keys of ints": (lambda c, k, b: c.match(k.view(np.int64)), r"int64.*uint8"),
    "short out": (lambda c, k, b: c.match(k).read(b[:3].copy()), rf"\(3, {BLOCK}\).*\(4, {BLOCK}\)"),
    "narrow out": (lambda c, k, b: c.match(k).read(b[:, 1:].copy()), rf"{BLOCK - 1}.*{BLOCK}"),
    "out of ints": (lambda c, k, b: c.match(k).read(b.view(np.int32)), r"int32.*uint8"),
    "out apart": (lambda c, k, b: c.match(k).read(np.zeros((8, BLOCK), np.uint8)[::2]), r"not contiguous"),
    "read-only out": (lambda c, k, b: c.match(k).read(np.broadcast_to(np.uint8(0), b.shape)), r"contiguous|read-only"),
    "frozen out": (lambda c, k, b: c.match(k).read(frozen(b)), r"read-only"),
    "too few ids": (lambda c, k, b: c.match(k).read_into(b.copy(), [0, 1]), r"2 block_ids.*4 blocks"),
    "a page twice": (lambda c, k, b: c.match(k).read_into(b.copy(), [0, 1, 2, 1]), r"page 1 2 times"),
    "a released match": (lambda c, k, b: released(c.match(k)).read(b.copy()), r"released.*read before"),
    "pages of a released match": (lambda c, k, b: released(c.match(k)).read_into(b.copy(), range(4)), r"released"),
    "a released match's tier": (lambda c, k, b: released(c.match(k)).fetch(), r"released"),
    "ids beyond": (lambda c, k, b: c.match(k).read_into(b.copy(), [0, 1, 2, 4]), r"0 to 4.*4 pages"),
    "ids below": (lambda c, k, b: c.store_from(k, b, [0, 1, 2, -1]), r"-1 to 2.*4 pages"),
    "ids of floats": (lambda c, k, b: c.store_from(k, b, [0, 1, 2, 0.5]), r"float64"),  # type: ignore[list-item]
    "narrow pages": (lambda c, k, b: c.store_from(k, [b[:, :100]], range(4)), rf"100 bytes.*{BLOCK}"),
    "pages of ints": (lambda c, k, b: c.store_from(k, b.view(np.int64), range(4)), r"int64.*uint8"),
    "frozen pages": (lambda c, k, b: c.match(k).read_into(frozen(b), range(4)), r"read-only"),
}


def bfloat16() -> Any:
    torch = torch_or_skip()
    return torch.zeros(4, 8, dtype=torch.bfloat16)


def released(match: raykv.Match) -> raykv.Match:
    match.release()
    return match


def frozen(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_is_refused_before_a_byte_moves(cache: raykv.KVCache, what: str) -> None:
    call, message = BAD_INPUT[what]
    keys = cache.keys(tokens(1, 4))
    blocks = payload(keys, BLOCK)
    if "match" in call.__code__.co_names:
        assert cache.store(keys, blocks) == 4
    with pytest.raises(ValueError, match=message):
        call(cache, keys, blocks)
    assert (blocks == payload(keys, BLOCK)).all()
    with cache.match(keys) as match:
        assert match.num_blocks == (4 if "match" in call.__code__.co_names else 0)


def test_a_block_that_no_slab_could_hold_is_refused(pool: raykv.KVPool) -> None:
    with pytest.raises(ValueError, match=r"block_bytes=8388608.*4194304.*more cpu_memory"):
        pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=8 << 20)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"model": ""}, "model='': give the name of the weights"),
        ({"dtype": ""}, "dtype='': give what the KV is kept in, such as 'bfloat16'"),
        ({"layout": ""}, "layout='': give the order of a block's bytes"),
        ({"block_tokens": 0}, "block_tokens=0: give an int of at least 1"),
        ({"block_bytes": -1}, "block_bytes=-1"),
        ({"block_tokens": "16"}, "block_tokens='16'"),
        ({"block_bytes": 4096.0}, "block_bytes=4096.0"),
        ({"part": None}, "part=None"),
    ],
)
def test_a_cache_that_does_not_say_what_it_holds_is_refused(pool: raykv.KVPool, wrong: Any, says: str) -> None:
    whole: Any = {"model": "m", "dtype": "uint8", "layout": "rows", "block_tokens": 16, "block_bytes": BLOCK}
    with pytest.raises(ValueError, match=says):
        pool.cache(**(whole | wrong))


def test_an_async_match_says_how_it_is_used(cache: raykv.KVCache) -> None:
    with pytest.raises(TypeError, match="use `async with"), cache.amatch(cache.keys(tokens(1, 4))):
        pass
