"""Traces in three formats, and the exact caches that a pool is compared with."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raykv.bench.trace import caches, trace
from raykv.bench.trace.formats import SESSION_IDS, Request, Trace, read


def written(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_of_mooncake_with_sessions_or_without(tmp_path: Path) -> None:
    plain = {"timestamp": 27482, "input_length": 1000, "output_length": 52, "hash_ids": [46, 47]}
    assert read(written(tmp_path, plain)) == Trace([Request([46, 47], 1000, 27.482, 52)], 512)
    of_session = plain | {"session": 3, "turn": 0, "last": True}
    assert read(written(tmp_path, of_session)).requests == [Request([46, 47], 1000, 27.482, 52, 3, True)]
    assert read(written(tmp_path, {"input_length": 512, "hash_ids": [1]})).requests == [Request([1], 512)]


def test_a_trace_of_bailian_has_a_session_a_chain_of_chats(tmp_path: Path) -> None:
    def chat(chat_id: int, parent: int, timestamp: float) -> dict[str, Any]:
        more = {"input_length": 17, "output_length": 5, "type": "text", "turn": 1, "hash_ids": [chat_id, 9]}
        return {"chat_id": chat_id, "parent_chat_id": parent, "timestamp": timestamp} | more

    found = read(written(tmp_path, chat(7, -1, 0.5), chat(8, -1, 1.0), chat(9, 7, 2.5), chat(11, 9, 3.0)))
    assert found.block_tokens == 16
    assert [(request.ids[0], request.at, request.session) for request in found.requests] == [
        *((7, 0.5, 7), (8, 1.0, 8)),
        *((9, 2.5, 7), (11, 3.0, 7)),
    ]


def test_a_trace_of_agentx_has_the_requests_of_sub_agents_and_ids_of_a_session(tmp_path: Path) -> None:
    def request(t: float, *ids: int) -> dict[str, Any]:
        return {"t": t, "type": "n", "in": 64 * len(ids), "out": 3, "hash_ids": list(ids)}

    sub_agent = {"t": 1.0, "type": "subagent", "agent_id": "a", "requests": [request(1.0, 1, 5), request(4.0, 1, 5, 6)]}
    sessions = [
        {
            "id": "one",
            "block_size": 64,
            "hash_id_scope": "local",
            "requests": [request(0, 1), sub_agent, request(2, 1, 2)],
        },
        {"id": "two", "block_size": 64, "hash_id_scope": "local", "requests": [request(1.5, 1)]},
    ]
    found = read(written(tmp_path, *sessions))
    first, second = SESSION_IDS, 2 * SESSION_IDS
    assert found.block_tokens == 64
    assert [(one.at, one.ids, one.session, one.last) for one in found.requests] == [
        (0.0, [first + 1], 1, False),
        (1.0, [first + 1, first + 5], 1, False),
        (1.5, [second + 1], 2, True),
        (2.0, [first + 1, first + 2], 1, False),
        (4.0, [first + 1, first + 5, first + 6], 1, True),
    ]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"hash_ids": [1, 2], "input_length": 100}], "line 1: 2 hash_ids for a prompt of 100 tokens: one per 512"),
        ([{"hash_ids": [1], "input_length": 100}, {"input_length": 3}], r"line 2: not a request of a trace \(KeyError"),
        ([{"requests": [{"t": 0}]}], r"line 1: not a request of a trace \(KeyError\('hash_ids'\)\)"),
        ([], "requests of one format, and this file has 0"),
        (
            [
                {"hash_ids": [1], "input_length": 100},
                {"requests": [{"t": 0, "in": 64, "out": 1, "hash_ids": [1]}]},
            ],
            "requests of one format, and this file has 2",
        ),
    ],
)
def test_a_malformed_trace_is_refused(tmp_path: Path, lines: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(written(tmp_path, *lines))


def test_a_session_stays_on_a_node() -> None:
    requests = [Request([1], 512, session=session) for session in (5, 9, 5, 2, 9)]
    assert trace.sticky(Trace(requests, 512), 2) == [0, 1, 0, 0, 1]
    assert trace.sticky(Trace([*requests, Request([1], 512)], 512), 2) == []


def test_no_cache_serves_more_than_the_optimum() -> None:
    """Tries all ways to evict, on prompts of one block."""
    random = np.random.default_rng(4)
    for _ in range(30):
        requests = [Request([int(block)], 512) for block in random.integers(0, 4, 7)]
        best = max(map(sum, every_way(requests, 2)))
        assert sum(caches.optimum(requests, 2)) == best
        assert sum(caches.lru(requests, [2], [0] * 7)) <= best <= sum(caches.endless(requests))


def every_way(requests: list[Request], capacity: int) -> list[list[int]]:
    """The hits of every cache that evicts some block whenever there is no room."""
    ways: list[tuple[frozenset[int], list[int]]] = [(frozenset(), [])]
    for request in requests:
        (block,) = request.ids
        after = []
        for cached, hits in ways:
            found = [*hits, int(block in cached)]
            kept = [cached | {block}]
            if len(kept[0]) > capacity:
                kept = [frozenset(some) for some in itertools.combinations(kept[0], capacity)]
            after += [(some, found) for some in kept]
        ways = after
    return [hits for _, hits in ways]


def test_the_optimum_keeps_a_prompts_beginning() -> None:
    requests = [Request([1, 2, 3], 1536), Request([4], 512), Request([1, 2, 3], 1536)]
    assert caches.optimum(requests, 2) == [0, 0, 2]
    assert caches.lru(requests, [2], [0, 0, 0]) == [0, 0, 1]


def test_a_pool_says_where_tokens_were_read(tmp_path: Path) -> None:
    """Two sessions take turns on two nodes. If requests go round, a session's next turn is on the other node."""
    lines = []
    for turn, session in ((0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1)):
        ids = list(range(100 * session, 100 * session + 4 * turn + 4))
        lines.append(
            {"hash_ids": ids, "input_length": 512 * len(ids), "session": session, "turn": turn, "last": turn == 2}
        )
    found = trace.run(written(tmp_path, *lines), nodes=2, capacities=[100])
    (row,) = found["results"]
    assert (found["sessions"], found["ceiling"]) == (2, row["pool"]) == (2, row["sticky"])
    assert row["told"] == row["pool"], "nobody waits long"
    assert row["sticky_here"] == row["sticky"] and row["sticky_crossed"] == row["sticky_crossed_bytes"] == 0
    assert row["pool_crossed"] > 0 and row["pool_here"] + row["pool_crossed"] == pytest.approx(row["pool"], abs=0.02)


def test_a_pool_that_is_told_what_ends_and_what_waits_keeps_the_rest(tmp_path: Path) -> None:
    """There is room for one and a half prompts. Session 0 ends, 1 waits long, and 2 goes on at once, twice."""
    lines = []
    for at, session, last in ((0, 2, 0), (1, 0, 1), (2, 1, 0), (3, 2, 0), (4, 2, 1), (100, 1, 1)):
        ids = list(range(100 * session, 100 * session + 8))
        lines.append(
            {
                **{"timestamp": 1000 * at, "hash_ids": ids, "input_length": 512 * len(ids)},
                **{"session": session, "turn": at, "last": bool(last)},
            }
        )
    path = written(tmp_path, *lines)
    assert trace.waits(read(path)) == [3.0, math.inf, 98.0, 1.0, math.inf, math.inf]
    (row,) = trace.run(path, nodes=1, capacities=[12])["results"]
    assert row["told"] > row["pool"]
