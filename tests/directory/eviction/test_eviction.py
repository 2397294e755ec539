"""The directory evicts the oldest blocks, children before parents, and no leased block."""

from collections import OrderedDict
from random import Random

from helpers.directory.pool import KEYS, Pool
from helpers.directory.world.documents import DOCUMENTS


def test_a_match_touches_its_blocks_last_to_first_so_children_go_before_parents() -> None:
    pool = Pool(slots=8, window=1)  # 7 blocks fit beside the window
    pool.store("a", KEYS[:7])
    pool.store("a", KEYS[100:102])
    assert pool.has(KEYS[:7]) == [True] * 5 + [False] * 2
    assert pool.read("a", KEYS[:7]) == 5
    pool.store("a", KEYS[102:106])
    assert pool.has(KEYS[:7]) == [True] * 3 + [False] * 4


def test_leased_blocks_are_not_evicted_and_released_ones_are() -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    lease, _ = pool.match("a", KEYS[:7])
    _, got = pool.reserve("a", KEYS[100:103])
    assert got.covered == 0 and not got.locations
    pool.release("a", lease)
    assert pool.store("a", KEYS[110:112]) == ["a", "a"]
    assert pool.has(KEYS[:7]) == [True] * 5 + [False] * 2


def test_with_locality_1_the_cluster_is_one_lru() -> None:
    for seed in range(5):
        rng = Random(seed)
        pool = Pool(slots=16, window=2, nodes="abc", locality=1.0)
        lru: OrderedDict[bytes, None] = OrderedDict()
        documents = [keys for size in DOCUMENTS for keys in DOCUMENTS[size]]
        for _ in range(400):
            keys = rng.choice(documents)[: rng.randint(1, 12)]
            node = rng.choice("abc")
            left = list(keys)  # a call gets no more slots than the window has
            while left:
                hold, got = pool.reserve(node, keys)
                pool.commit(node, hold, got, keys)
                left = keys[got.covered :]
                assert got.covered
            new = [key for key in keys if key not in lru]
            for key in reversed(keys):
                if key in lru:
                    lru.move_to_end(key)
            for _ in range(len(lru) + len(new) - 3 * 14):
                lru.popitem(last=False)
            for key in reversed(keys):
                lru[key] = None
                lru.move_to_end(key)
            assert pool.keys() == set(lru)


def test_no_parent_is_evicted_before_its_children() -> None:
    for nodes, locality in (("a", 1.5), ("abc", 1.0)):
        rng = Random(3)
        pool = Pool(slots=16, window=2, nodes=nodes, locality=locality)
        documents = [keys for size in DOCUMENTS for keys in DOCUMENTS[size]]
        for _ in range(400):
            keys, node = rng.choice(documents)[: rng.randint(1, 12)], rng.choice(nodes)
            if rng.random() < 0.5:
                pool.read(node, keys)
            else:
                pool.store(node, keys)
            there = pool.keys()
            for document in documents:
                found = [key in there for key in document]
                assert found == sorted(found, reverse=True)
