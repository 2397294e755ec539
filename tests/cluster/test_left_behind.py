"""What the end of a pool leaves in shared memory, where a raylet died before and its machine has others."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers.pools import actor_names, eventually, node_store, pid, served, shm_files, suspend

import raykv
from raykv.arena import files


@pytest.mark.parametrize("graceful", [False, True], ids=["killed", "removed"])
def test_a_store_that_dies_after_the_others_have_stopped_leaves_nothing(
    start: Callable[..., raykv.KVPool], third_node: Callable[[], Any], cluster: Any, graceful: bool
) -> None:
    pool = start()
    node = third_node()
    eventually(lambda: served(pool, 3))
    suspend(pid(node_store(pool, node.node_id)))  # its answer would tell that it has removed what is its own
    dying = files.create(f"{files.SHM}/raykv-{pool.name}-{os.getuid()}-99", bytes(16), 4 << 20, 1)
    cluster.remove_node(node, allow_graceful=graceful)
    stopping = threading.Thread(target=pool.stop)
    stopping.start()
    eventually(lambda: not actor_names(pool.name))
    assert dying.path in files.arenas_of(pool.name)
    os.close(dying.fd)  # as its owner's death does
    stopping.join(60)
    assert not stopping.is_alive() and not shm_files(pool.name)
