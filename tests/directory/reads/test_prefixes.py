"""The prefixes at which look-ups end, and how often they end there."""

import itertools
import os

from helpers.directory.pool import KEYS, PAGE, Pool

from raykv.directory.state.prefixes import KEPT, SEEN, Prefixes


def test_a_look_up_counts_where_it_ended() -> None:
    pool = Pool(16, nodes="ab")
    pool.store("a", KEYS[:6])
    pool.store("b", KEYS[6:8])
    for _ in range(3):
        pool.read("a", [*KEYS[:4], KEYS[20]])
    pool.read("a", KEYS[:6])
    pool.read("b", KEYS[6:8])
    assert not pool.read("b", KEYS[20:22]), "nothing was found, so it is no prefix"
    pool.now += 2.0
    found = pool.directory.largest_prefixes(9, pool.now)
    assert [(prefix["key"], prefix["blocks"], prefix["bytes"], prefix["hits"]) for prefix in found] == [
        (KEYS[3].hex(), 4, 4 * PAGE, 3),
        (KEYS[5].hex(), 6, 6 * PAGE, 1),
        (KEYS[7].hex(), 2, 2 * PAGE, 1),
    ]
    assert [prefix["nodes"] for prefix in found] == [["a"], ["a"], ["b"]] and {p["idle_s"] for p in found} == {2.0}
    assert len(pool.directory.largest_prefixes(2, pool.now)) == 2
    pool.directory.clear(pool.now)
    assert pool.directory.largest_prefixes(1, pool.now)[0]["nodes"] == [], "it is in no memory any more"


def test_what_is_used_much_outlasts_what_is_used_once() -> None:
    prefixes, often = Prefixes(), [os.urandom(16) for _ in range(20)]
    for turn, at in zip(range(5 * SEEN), itertools.cycle(range(20)), strict=False):
        prefixes.count(os.urandom(16 * 8), 8, PAGE, turn)
        prefixes.count(often[at], 1, PAGE, turn)
    largest = prefixes.largest(SEEN + 1)
    assert len(largest) <= SEEN and {prefix.key for prefix in largest[:20]} == set(often)
    assert {prefix.hits for prefix in largest[:20]} == {SEEN // 4}, "none was forgotten in between"
    assert len(largest) >= KEPT
