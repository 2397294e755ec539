"""A sweep tells written slots from free slots. A slab's new format ends all its blocks."""

from helpers.arena.worker import GEN, SLAB, get, locations, put

from raykv.arena.arena import Arena


def test_a_sweep_tells_written_from_freed_slots(arena: Arena) -> None:
    assert put(arena, 0, 2) and put(arena, 1, 3)
    where = locations([0, 1, 2], [2, 9, 4])  # written; granted again but not begun; never begun
    assert arena.sweep(where).tolist() == [2, 1, 1]
    assert get(arena, 0, 2) and not get(arena, 1, 3)
    assert not put(arena, 1, 9) and not put(arena, 2, 4), "late writers"
    assert put(arena, 1, 10) and put(arena, 2, 11)
    assert arena.sweep(locations([1], [9])).tolist() == [2] and get(arena, 1, 10), "swept twice: what came since stays"


def test_blocks_cleared_during_their_write_are_swept(arena: Arena, client: Arena) -> None:
    assert put(client, 0, 2) and put(client, 1, 4)
    arena.raise_floor(GEN + 3)
    assert arena.sweep(locations([0, 1], [2, 4])).tolist() == [1, 2]
    assert not get(client, 0, 2) and get(client, 1, 4)


def test_a_reformat_forgets_the_blocks_of_the_slab(arena: Arena, client: Arena) -> None:
    small, big = {"size": 8 << 10, "slab_gen": GEN + 10}, {"size": 1 << 20, "slab_gen": GEN + 400}
    assert all(put(client, slot, 2 + slot) for slot in range(SLAB // (64 << 10)))
    assert all(put(client, slot, 100 + slot, **small) for slot in (0, 1, 9, 511))
    assert not any(get(arena, slot, 2 + slot) for slot in range(SLAB // (64 << 10)))
    assert not put(client, 2, 300), "of the format before"
    assert put(client, 3, 401, **big)
    assert not any(get(arena, slot, 100 + slot, **small) for slot in (0, 1, 9, 511))
    assert put(client, 511, 900, size=8 << 10, slab_gen=GEN + 899), "and back: no header of the first time is left"
    assert arena.inventory().ready["slot"].tolist() == [511]
    assert not put(client, 1, 901, size=8 << 10, slab_gen=GEN + 10), "of an older format of the same stride"
    assert not put(client, 1, 901, slab_gen=GEN + 899), "a place of another stride than its slab's"


def test_sweep_of_a_slab_that_is_not_formatted_yet(arena: Arena) -> None:
    assert put(arena, 0, 2)
    assert arena.sweep(locations([0], [20], size=8 << 10, slab_gen=GEN + 10)).tolist() == [1]
    assert get(arena, 0, 2), "headers of the old format are not touched"


def test_sweep_of_a_slab_of_another_format(arena: Arena) -> None:
    old = locations([5], [20])
    assert put(arena, 5, 21, size=8 << 10, slab_gen=GEN + 10)
    assert arena.sweep(old).tolist() == [1], "the block there is none of this grant's"
    assert get(arena, 5, 21, size=8 << 10, slab_gen=GEN + 10)
