"""raykv.integrations.data on Ray Data: all rows come, in order, and an actor gets blocks whole."""

from __future__ import annotations

import itertools
import os
import random
import zlib
from typing import Any

import numpy as np
import pytest
import ray
from ray.data import ActorPoolStrategy, Dataset

from raykv.integrations.data import BLOCK_TOKENS, BLOCKS, prefix_ordered

ENGINES, HEADERS = 2, 5
Row = dict[str, Any]


def tokens(messages: list[dict[str, str]]) -> list[int]:
    """Tokens of messages. Each word is a token."""
    return [zlib.crc32(word.encode()) & 0xFFFF for message in messages for word in message["content"].split()]


class Taker:
    """Adds to each row which actor took the row."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {"taker": np.full(len(batch["id"]), os.getpid())}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Rows in random order. Rows share headers, and every second row of a header shares more."""
    made = []
    for i in range(200):
        header = " ".join([f"h{i % HEADERS}"] * 2 * BLOCK_TOKENS + [f"d{i % 2}"] * BLOCK_TOKENS)
        messages = [{"role": "system", "content": header}, {"role": "user", "content": f"q{i} " * BLOCK_TOKENS}]
        made.append({"messages": messages, "id": i})
    random.Random(0).shuffle(made)
    return made


@pytest.fixture(scope="module")
def ordered(cluster: Any, rows: list[Row]) -> Dataset:
    return prefix_ordered(ray.data.from_items(rows, override_num_blocks=3), tokens, ENGINES, column="messages")


def blocks(dataset: Dataset) -> list[list[Row]]:
    return [ray.get(table).to_pylist() for table in dataset.to_arrow_refs()]


def by_id(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row["id"])


def runs(names: list[Any]) -> int:
    return len(list(itertools.groupby(names)))


def test_every_row_is_there_as_it_was_beside_those_that_share_its_prefix(ordered: Dataset, rows: list[Row]) -> None:
    found = blocks(ordered)
    assert by_id([row for block in found for row in block]) == by_id(rows)
    assert len(found) == ENGINES * BLOCKS
    assert max(map(len, found)) <= 1.5 * len(rows) / len(found)
    of_turn = [[row["id"] for block in found[turn::ENGINES] for row in block] for turn in range(ENGINES)]
    assert sum(runs([i % HEADERS for i in ids]) for ids in of_turn) <= HEADERS + ENGINES - 1
    assert sum(runs([(i % HEADERS, i % 2) for i in ids]) for ids in of_turn) <= 2 * HEADERS + ENGINES - 1


def test_blocks_reach_actors_whole_and_in_order_behind_another_stage(ordered: Dataset) -> None:
    assert ordered.context.execution_options.preserve_order
    staged = ordered.map(lambda row: row | {"staged": True}, num_cpus=0.1)
    taken = staged.map_batches(Taker, compute=ActorPoolStrategy(size=ENGINES), num_cpus=0.1)
    asked, answered = blocks(ordered), blocks(taken)
    assert [[row["id"] for row in block] for block in answered] == [[row["id"] for row in block] for block in asked]
    assert all(len({row["taker"] for row in block}) == 1 for block in answered)


def test_what_can_not_be_ordered_is_refused(cluster: Any, rows: list[Row]) -> None:
    some = ray.data.from_items(rows[:4], override_num_blocks=1)
    with pytest.raises(ValueError, match="engines=0"):
        prefix_ordered(some, tokens, 0, column="messages")
    with pytest.raises(KeyError, match="prompt"):
        prefix_ordered(some, tokens, 1)
    with pytest.raises(ValueError, match="token ids"):
        prefix_ordered(some, lambda messages: ["no", "numbers"], 1, column="messages")
    assert prefix_ordered(some.filter(lambda row: False), tokens, 2, column="messages").take_all() == []
