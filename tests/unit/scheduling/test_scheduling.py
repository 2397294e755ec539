"""Properties of `plan`, `order` and `split`, on engines without a model."""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from helpers.project.pages import ROOT, run
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.scheduling.routes import Setup
from benchmarks.scheduling.routes import run as run_routes
from benchmarks.scheduling.schedule import first_come, read
from benchmarks.scheduling.simulated_engine import Job, Policy, SimulatedEngine, Speed
from raykv.scheduling import Budget, Request, order, plan, split

BLOCK_TOKENS, PATIENCE_S = 4, 5.0
SPEED = Speed(step_s=0.1, token_s=0.01, tokens=16)


def keys(path: list[int]) -> NDArray[np.uint8]:
    """Keys of a prompt. A key depends on its block and all blocks before it."""
    rows = [b"".join(block.to_bytes(1, "big") for block in path[: i + 1]).ljust(16, b"\xff") for i in range(len(path))]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(path), 16)


prompts = st.lists(st.integers(0, 2), max_size=6).map(keys)  # few different blocks, so that many are shared


@st.composite
def requests(draw: st.DrawFn, running: bool) -> Request:
    found = draw(prompts)
    tokens = max(1, len(found) * BLOCK_TOKENS + draw(st.integers(0, BLOCK_TOKENS - 1)))
    blocks = draw(st.integers(0, len(found)))
    computed = draw(st.integers(0, tokens - 1)) if running else blocks * BLOCK_TOKENS
    held = 0 if running else draw(st.integers(0, computed // BLOCK_TOKENS))
    return Request(found, tokens, draw(st.integers(0, 20)), computed, held)


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    made = []
    for found in draw(st.lists(prompts, min_size=1, max_size=12)):
        tokens = max(1, len(found) * BLOCK_TOKENS + draw(st.integers(0, BLOCK_TOKENS - 1)))
        made.append(Job(found, tokens, draw(st.integers(0, 10)), draw(st.integers(1, 6))))
    return sorted(made, key=lambda job: job.arrival)


def served(asked: list[Job], blocks: int, policy: Policy) -> SimulatedEngine:
    engine = SimulatedEngine(asked, blocks, BLOCK_TOKENS, policy, SPEED)
    engine.run()
    return engine


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@given(
    st.lists(requests(running=False), max_size=8),
    st.lists(requests(running=True), max_size=4),
    st.integers(0, 40),
    st.integers(0, 12),
)
def test_a_step_is_within_its_budget_and_nobody_is_passed_over_for_long(
    waiting: list[Request], running: list[Request], tokens: int, blocks: int
) -> None:
    now = 10.0
    scheduled = plan(waiting, running, Budget(tokens, blocks, BLOCK_TOKENS), now, PATIENCE_S)
    assert sum(new for _, new in scheduled) <= tokens
    assert all(0 < new <= max(1, request.num_tokens - request.num_computed_tokens) for request, new in scheduled)
    started = [request for request, _ in scheduled if request not in running]
    taken = sum(blocks_of(request.num_tokens) - request.num_held_blocks for request in started)
    for request, new in scheduled:
        if request in running:
            taken += blocks_of(request.num_computed_tokens + new) - blocks_of(request.num_computed_tokens)
    assert taken <= blocks
    assert len({id(request) for request, _ in scheduled}) == len(scheduled)
    computing = {
        key.tobytes() for each, _ in scheduled for key in each.keys[each.num_computed_tokens // BLOCK_TOKENS :]
    }
    computing |= {key.tobytes() for each in running for key in each.keys[each.num_computed_tokens // BLOCK_TOKENS :]}
    for late in waiting:
        first = late.num_computed_tokens // BLOCK_TOKENS
        waits_for_another = first < len(late.keys) and late.keys[first].tobytes() in computing
        if late.arrival <= now - PATIENCE_S and late not in started and not waits_for_another:
            assert not any(each.arrival > late.arrival for each in started)


@given(jobs(), st.integers(9, 40))  # the longest job takes 9 blocks
def test_every_request_is_served_once_however_few_blocks_there_are(asked: list[Job], blocks: int) -> None:
    for patience in (0.0, PATIENCE_S, 1e9):
        engine = served(asked, blocks, partial(plan, patience=patience))
        assert not np.isnan(engine.waits).any()


@given(jobs())
def test_no_block_is_computed_twice_while_the_cache_keeps_it(asked: list[Job]) -> None:
    """So no plan computes less. Prompts that are cached as a whole still compute their last token."""
    engine = served(asked, 1000, partial(plan, patience=PATIENCE_S))
    known: set[bytes] = set()
    least = 0
    for job in asked:
        names = {key.tobytes() for key in job.keys}
        least += max(1, job.tokens - BLOCK_TOKENS * len(names & known))
        known |= names
    whole = sum(job.tokens == len(job.keys) * BLOCK_TOKENS for job in asked)
    assert least - whole <= engine.computed <= least + whole, "who of equal prompts computes the last token may differ"
    assert engine.computed <= served(asked, 1000, first_come).computed


@given(jobs())
def test_steps_that_only_generate_are_the_same_one_by_one_and_at_once(asked: list[Job]) -> None:
    at_once = served(asked, 40, partial(plan, patience=PATIENCE_S))
    with patch.object(SimulatedEngine, "_generate", lambda *_: False):
        one_by_one = served(asked, 40, partial(plan, patience=PATIENCE_S))
    assert at_once.waits == pytest.approx(one_by_one.waits)
    assert (at_once.computed, at_once.done) == (one_by_one.computed, one_by_one.done)


@given(jobs(), st.lists(st.floats(0, 30), max_size=10).map(sorted))
def test_an_engine_that_is_run_bit_by_bit_while_jobs_come_runs_as_ever(asked: list[Job], times: list[float]) -> None:
    engine, coming = SimulatedEngine([], 40, BLOCK_TOKENS, partial(plan, patience=PATIENCE_S), SPEED), list(asked)
    for until in [*times, np.inf]:
        while coming and coming[0].arrival <= until:
            engine.run(coming[0].arrival)
            engine.add(coming.pop(0))
        engine.run(until)
    assert engine.waits == pytest.approx(served(asked, 40, partial(plan, patience=PATIENCE_S)).waits)


@given(jobs(), st.data())
def test_blocks_from_a_pool_are_not_computed(asked: list[Job], data: st.DataObject) -> None:
    loaded = [job._replace(loaded=data.draw(st.integers(0, len(job.keys)))) for job in asked]
    engine = served(loaded, 1000, partial(plan, patience=PATIENCE_S))
    assert not np.isnan(engine.waits).any()
    assert engine.computed <= sum(max(1, job.tokens - BLOCK_TOKENS * job.loaded) for job in loaded)


def test_a_prompt_that_is_cached_costs_one_token_and_no_block_that_another_holds() -> None:
    cached = Request(keys([0, 1]), 8, 0.0, 8, num_held_blocks=2)
    ((request, new),) = plan([cached], [], Budget(5, 0, BLOCK_TOKENS), 1.0, PATIENCE_S)
    assert request is cached and new == 1
    rests = Request(keys([0, 1]), 8, 0.0, 8, num_held_blocks=1)
    assert plan([rests], [], Budget(5, 0, BLOCK_TOKENS), 1.0, PATIENCE_S) == [], "its last block is a free one"
    assert len(plan([rests], [], Budget(5, 1, BLOCK_TOKENS), 1.0, PATIENCE_S)) == 1


def test_what_another_request_computes_is_waited_for() -> None:
    budget = Budget(100, 100, BLOCK_TOKENS)
    one, two, other = (Request(keys(path), 12, 0.0) for path in ([0, 1, 2], [0, 1, 1], [2, 1, 0]))
    assert [each.request for each in plan([one, two, other], [], budget, 1.0, PATIENCE_S)] == [one, other]
    begun = Request(one.keys, 12, 0.0, 4)
    two = Request(two.keys, 12, 0.0, 4)
    assert [each.request for each in plan([two], [begun], budget, 1.0, PATIENCE_S)] == [begun]
    two = Request(two.keys, 12, 0.0, 8)
    assert len(plan([two], [Request(one.keys, 12, 0.0, 8)], budget, 1.0, PATIENCE_S)) == 2, "they share no more"


def test_the_least_to_compute_goes_first_until_one_has_waited_too_long() -> None:
    long, short = Request(keys([0, 1, 2]), 12, 0.0), Request(keys([1]), 5, 1.0)
    budget = Budget(100, 3, BLOCK_TOKENS)
    assert [each.request for each in plan([long, short], [], budget, 2.0, PATIENCE_S)] == [short]
    assert [each.request for each in plan([long, short], [], budget, 5.0, PATIENCE_S)] == [long]
    assert plan([long, short], [], budget._replace(blocks=2), 5.0, PATIENCE_S) == [], "it holds up the others"


def computed(found: list[NDArray[np.uint8]], ranked: list[int], blocks: int) -> int:
    """How many blocks of the prompts, in this order, miss a plain LRU cache of `blocks` blocks."""
    cache: list[bytes] = []
    lacking = 0
    for i in ranked:
        names = [key.tobytes() for key in found[i]]
        lacking += sum(name not in cache for name in names)
        cache = [name for name in cache if name not in names] + names[::-1]
        cache = cache[-blocks:] if blocks else []
    return lacking


@given(st.lists(prompts, max_size=20))
def test_in_prefix_order_a_small_cache_computes_each_shared_block_once(found: list[NDArray[np.uint8]]) -> None:
    ranked = order(found)
    assert sorted(ranked) == list(range(len(found)))
    different = {key.tobytes() for each in found for key in each}
    assert computed(found, ranked, max(map(len, found), default=0)) == len(different)
    for one, other in pairwise(ranked):
        assert one < other or not np.array_equal(found[one], found[other]), "equal prompts stay in their order"


def test_what_shares_most_comes_first() -> None:
    found = [keys(path) for path in ([0], [1, 1], [2, 2, 0], [2, 2, 1], [1, 2])]
    assert [found[i].tobytes() for i in order(found)] == [found[i].tobytes() for i in (2, 3, 1, 4, 0)]


def test_of_a_batch_that_is_too_large_the_first_blocks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raykv.scheduling.batches.BLOCKS_MAX", 8)
    found = [keys(path) for path in ([1, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0])]
    assert order(found) in ([0, 2, 1, 3], [1, 3, 0, 2])


@given(st.lists(prompts, max_size=40), st.integers(1, 5))
def test_engines_have_as_much_to_do_and_compute_little_twice(found: list[NDArray[np.uint8]], engines: int) -> None:
    parts = split(found, engines)
    assert len(parts) == engines and sorted(i for part in parts for i in part) == list(range(len(found)))
    different = len({key.tobytes() for each in found for key in each})
    loads = [len({key.tobytes() for i in part for key in found[i]}) for part in parts]
    assert sum(loads) <= different + (engines - 1) * 6, "at a cut a prefix is computed twice"
    share = (different + len(found)) / engines
    assert max(loads) <= 1.2 * share + 2 * 7, "two prompts more than the share, and the slack"


def test_a_cut_lies_where_neighbours_share_least() -> None:
    subtrees = [[keys([root, i % 3, i]) for i in range(20 + root)] for root in range(2)]
    found = subtrees[0] + subtrees[1]
    assert sorted(map(sorted, split(found, 2))) == [list(range(20)), list(range(20, 41))]
    with pytest.raises(ValueError, match="engines=0"):
        split(found, 0)


def test_routers_are_compared_on_a_trace_of_sessions(tmp_path: Path) -> None:
    """Four sessions whose prompts grow by 10 blocks of 512 tokens, and share 20. The pool keeps all of them."""
    lines: list[str] = []
    for turn in range(4):
        for session in range(4):
            own = range(1000 * (session + 1), 1000 * (session + 1) + 100 + 10 * turn)
            asked = {"timestamp": 60_000 * len(lines), "input_length": 512 * (20 + len(own)), "output_length": 10}
            lines.append(json.dumps({**asked, "hash_ids": [*range(20), *own], "session": session, "turn": turn}))
    (trace := tmp_path / "trace.jsonl").write_text("\n".join(lines))
    setup = Setup(engines=2, blocks=1000, memory=2000, routers=1, tokens_per_s=5000.0, load=0.05, pull=0.2)
    rows = {row["rule"]: row for row in run_routes(trace, setup)["results"]}
    least = 512 * (20 + 4 * (100 + 3 * 10)) / 1e6
    for name, row in rows.items():
        assert row["computed_m"] == pytest.approx(least, abs=0.01), f"{name}: the pool has all that was computed"
    assert rows["by_chance"]["crossed_m"] > 0.05 > rows["routes"]["crossed_m"], "sessions stay at their engines"


def test_the_page_is_true(tmp_path: Path) -> None:
    run(ROOT / "docs" / "scheduling.md", {}, {}, tmp_path)


def test_a_job_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="more than the 1 blocks"):
        SimulatedEngine([Job(keys([0]), 4, 0.0, 1)], 1, BLOCK_TOKENS, first_come, SPEED)


@pytest.mark.parametrize(("left_out", "error"), [("timestamp", "all would come at once"), ("output_length", "lengths")])
def test_a_trace_that_says_too_little_to_schedule_by_is_refused(tmp_path: Path, left_out: str, error: str) -> None:
    request = {"timestamp": 7, "input_length": 512, "output_length": 3, "hash_ids": [1]}
    path = tmp_path / "trace.jsonl"
    path.write_text(2 * f"{json.dumps(request)}\n")
    assert len(read(path)) == 2
    del request[left_out]
    path.write_text(2 * f"{json.dumps(request)}\n")
    with pytest.raises(ValueError, match=error):
        read(path)
