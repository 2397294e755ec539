"""raykv.integrations.data without Ray: which rows go into a block of Ray Data, and which engine gets the block."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("pyarrow", reason="Ray Data is not installed: pip install 'raykv[data]'")

from raykv.integrations.data import BLOCKS, ROWS, dealt
from raykv.keys import chain

ENGINES, HEADERS, CACHED = 2, 40, 5  # CACHED: how many headers an engine's own cache holds


def keys(path: list[int]) -> NDArray[np.uint8]:
    return chain(bytes(32), path, 1)


def batch(prompts: int) -> list[NDArray[np.uint8]]:
    """Prompts in random order, each of a header's 10 blocks and 2 blocks of its own."""
    random = np.random.default_rng(0)
    headers = random.integers(HEADERS, size=prompts)
    return [keys([100 + int(header)] * 10 + [1000 + i] * 2) for i, header in enumerate(headers)]


def computed(prompts: list[NDArray[np.uint8]], blocks: list[list[int]]) -> list[int]:
    """How many blocks each engine computes. Engines take blocks of rows in turn, and have an LRU cache each."""
    done = []
    for engine in range(ENGINES):
        cache, lacking = OrderedDict[bytes, None](), 0
        for block in blocks[engine::ENGINES]:
            for i in block:
                names = [key.tobytes() for key in prompts[i]]
                lacking += sum(name not in cache for name in names)
                for name in reversed(names):
                    cache[name] = None
                    cache.move_to_end(name)
                while len(cache) > CACHED * 10:
                    cache.popitem(last=False)
        done.append(lacking)
    return done


@given(st.lists(st.lists(st.integers(0, 2), max_size=5).map(keys), max_size=60), st.integers(1, 4))
def test_every_row_is_in_one_block_beside_those_that_share_its_prefix(
    prompts: list[NDArray[np.uint8]], engines: int
) -> None:
    blocks = dealt(prompts, engines)
    assert sorted(i for block in blocks for i in block) == list(range(len(prompts)))
    assert all(blocks) and len(blocks) <= engines * BLOCKS
    for block in blocks:
        for depth in range(1, 6):
            named = [prompts[i][:depth].tobytes() for i in block if len(prompts[i]) >= depth]
            runs = [name for i, name in enumerate(named) if i == 0 or named[i - 1] != name]
            assert len(runs) == len(set(runs))


def test_engines_that_take_turns_compute_little_twice_and_as_much_as_each_other() -> None:
    prompts = batch(800)
    different = len({key.tobytes() for prompt in prompts for key in prompt})
    loads = computed(prompts, dealt(prompts, ENGINES))
    assert sum(loads) <= 1.1 * different
    assert max(loads) <= 1.1 * np.mean(loads)
    as_given = [run.tolist() for run in np.array_split(np.arange(len(prompts)), ENGINES * BLOCKS)]
    assert sum(computed(prompts, as_given)) > 3 * different


def test_a_large_batch_has_more_blocks_and_not_larger_ones() -> None:
    prompts = [keys([i % 7, i]) for i in range(3 * BLOCKS * ROWS)]
    blocks = dealt(prompts, 1)
    assert len(blocks) == 3 * BLOCKS
    assert max(map(len, blocks)) <= 1.3 * ROWS
