"""What a client's next call tells the directory about its leases and reservations."""

import numpy as np

from raykv.client.held import Held
from raykv.config import KEYS_PER_CALL
from raykv.protocol.location import LOCATION


def test_a_call_tells_a_part_of_many_blocks_and_the_next_calls_the_rest() -> None:
    held = Held(7)
    some = np.zeros(2 * KEYS_PER_CALL + 1, LOCATION)
    some["node"] = np.arange(len(some))
    held.pulled(some[:5])
    held.pulled(some[5:])
    told = b""
    for left in (KEYS_PER_CALL + 1, 1, 0):
        assert held.news
        told += held.next_call(()).pulled
        assert held.news == (left > 0) and len(told) == (len(some) - left) * LOCATION.itemsize
    assert told == some.tobytes()


def test_calls_list_what_is_held_and_are_numbered() -> None:
    held = Held(7)
    first, second = held.next_call((1, 2)), held.next_call((3,))
    held.release((1, 3, 9))
    third = held.next_call(())
    assert [set(np.frombuffer(call.held, np.uint64)) for call in (first, second, third)] == [{1, 2}, {1, 2, 3}, {2}]
    assert [(call.client, call.seq) for call in (first, second, third)] == [(7, 1), (7, 2), (7, 3)]
