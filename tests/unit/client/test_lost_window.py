"""A reader streams by a lease, and its question for staging slots gets no answer."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from raykv.client.leases.lease import Lease
from raykv.client.leases.leased_blocks import LeasedBlocks, LeaseName
from raykv.protocol.clients import NextWindowRequest, Window
from raykv.protocol.location import LOCATION

HERE, THERE, BLOCKS = 4, 6, 4


def locations(node: int, count: int) -> np.ndarray[Any, Any]:
    found = np.zeros(count, LOCATION)
    found["node"], found["slab_gen"] = node, 1
    return found


def test_it_asks_for_what_the_lost_answer_said() -> None:
    asked: list[NextWindowRequest] = []
    moved, slots = locations(THERE, 1), locations(HERE, BLOCKS - 1)
    answers = [None, Window(1, b"", slots.tobytes(), moved.tobytes()), Window(1, b"", slots.tobytes())]

    def next_window(request: NextWindowRequest) -> Window | None:
        asked.append(request)
        return answers[len(asked) - 1]

    session: Any = SimpleNamespace(local=None, directory=SimpleNamespace(next_window=next_window))
    source = np.concatenate([locations(HERE, 1), locations(THERE, BLOCKS - 1)])
    name, keys = LeaseName(b"", HERE, 1, 1, 0), np.zeros((BLOCKS, 16), np.uint8)
    lease = Lease(session, None, LeasedBlocks(session.directory, 4096, name, source, keys))
    piece = np.arange(1, BLOCKS)
    assert lease.blocks.take_slots(piece, 1) is None and lease.blocks.source["node"][0] == HERE
    staged = lease.blocks.take_slots(piece, 1)
    assert staged is not None and len(staged) == BLOCKS - 1 and lease.blocks.source["node"][0] == THERE
    lease.blocks.staged["slab_gen"] = 0
    assert lease.blocks.take_slots(piece, 1) is not None
    assert [request.again for request in asked] == [False, True, False]
