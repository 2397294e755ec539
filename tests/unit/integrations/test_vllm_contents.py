"""A chunk's digest tells the tokens that were computed into its blocks, however vLLM scheduled them."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, TransferJob
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.request import Request

from raykv.integrations.vllm.chunks.chunks import ChunksOfLayers, ChunksToLoad, ChunksToStore, Origin
from raykv.integrations.vllm.chunks.contents import Contents, mixed

BLOCK, PER_CHUNK = 4, 2  # tokens of a block, and blocks of a chunk
CHUNK = BLOCK * PER_CHUNK


def a_request(name: str, tokens: list[int], **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=100)
    sampling.update_from_generation_config({}, 0)
    return Request(name, tokens, sampling, None, **fields)


@dataclass
class Engine:
    """vLLM's side of a few requests: the blocks of each, and how many tokens are computed."""

    requests: dict[str, Request] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    allocated: int = 0

    def __post_init__(self) -> None:
        self.contents = Contents({0: BLOCK}, PER_CHUNK, self.requests.__getitem__)

    def begin(self, request: Request, found: list[int], tokens: int) -> None:
        """Schedule the first tokens of a request, or of a session's next turn, after those in blocks that it has.

        found: the blocks that it has.
        """
        self.requests[request.request_id] = request
        self.blocks[request.request_id] = list(found)
        self._schedule(request, tokens, new=True)

    def go_on(self, request: Request, tokens: int) -> None:
        self._schedule(request, tokens, new=False)

    def resume(self, request: Request, tokens: int) -> None:
        """Schedule a request from its start again, after a preemption."""
        request.num_computed_tokens, self.blocks[request.request_id] = 0, []
        self._schedule(request, tokens, new=False, resumed=True)

    def _schedule(self, request: Request, tokens: int, new: bool, resumed: bool = False) -> None:
        name, computed = request.request_id, request.num_computed_tokens
        lacks = -(-(computed + tokens) // BLOCK) - len(self.blocks[name])
        got = list(range(self.allocated + 1, self.allocated + 1 + lacks))
        self.allocated += max(0, lacks)
        self.blocks[name] += got
        output = SchedulerOutput.make_empty()
        if new:
            request.num_computed_tokens = computed
            output.scheduled_new_reqs = [NewRequestData.from_request(request, (list(self.blocks[name]),))]
        else:
            output.scheduled_cached_reqs = replace(
                CachedRequestData.make_empty(),
                req_ids=[name],
                resumed_req_ids={name} if resumed else set(),
                new_block_ids=[(list(self.blocks[name]) if resumed else got,)],
                num_computed_tokens=[computed],
            )
        output.num_scheduled_tokens = {name: tokens}
        self.contents.follow(output)
        request.num_computed_tokens += tokens

    def finish(self, request: Request) -> None:
        self.contents.finish(request)

    def stored(self, request: Request, blocks: list[int], first: int = 0, tail: int = 0) -> bytes | None:
        """Digests of the chunks that a job stores from these blocks. first: number of the first block."""
        groups = {0: ChunksOfLayers({}, first // PER_CHUNK, tail)}
        job = TransferJob(request.request_id, _spec(blocks, first), ChunksToStore(groups))
        self.contents.note(OffloadingConnectorMetadata({}, {1: job}))
        return job.dst_spec.digests.get(0)  # type: ignore[no-any-return]

    def asked(self, request: Request, blocks: list[int], first: int = 0) -> bytes:
        """Digests that a job expects when it loads into these blocks."""
        self.requests[request.request_id] = request
        job = TransferJob(request.request_id, ChunksToLoad([], Origin("")), _spec(blocks, first))
        self.contents.note(OffloadingConnectorMetadata({1: job}, {}))
        return job.src_spec.digests[0]  # type: ignore[no-any-return]


def _spec(blocks: list[int], first: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[first])


def expected(tokens: list[int], **fields: Any) -> bytes:
    """Digests of the whole chunks of a prompt, by an engine that has nothing."""
    return Engine().asked(a_request("reader", tokens, **fields), list(range(1, len(tokens) // CHUNK * PER_CHUNK + 1)))


TOKENS = st.lists(st.integers(0, 9), min_size=CHUNK, max_size=6 * CHUNK)


@given(TOKENS, st.lists(st.integers(1, 11)), st.booleans())
def test_a_prompt_is_the_same_however_it_is_cut(tokens: list[int], steps: list[int], preempted: bool) -> None:
    engine, request, whole = Engine(), a_request("writer", tokens), len(tokens) // CHUNK * PER_CHUNK
    engine.begin(request, [], min(len(tokens), steps[0] if steps else len(tokens)))
    if preempted:
        engine.resume(request, 1)
    for step in [*steps[1:], len(tokens)]:
        if left := len(tokens) - request.num_computed_tokens:
            engine.go_on(request, min(left, step))
    assert engine.stored(request, engine.blocks["writer"][:whole]) == expected(tokens)


@given(TOKENS, st.lists(st.integers(0, 9), min_size=1, max_size=2 * CHUNK))
def test_tokens_that_are_guessed_count_once_they_are_known(tokens: list[int], sampled: list[int]) -> None:
    """With asynchronous scheduling a token is scheduled before it is sampled."""
    engine, request = Engine(), a_request("writer", tokens)
    engine.begin(request, [], len(tokens))
    for token in sampled:
        engine.go_on(request, 1)
        request.append_output_token_ids(token)
    engine.finish(request)
    said = [*tokens, *sampled]
    blocks = engine.blocks["writer"][: len(said) // CHUNK * PER_CHUNK]
    assert engine.stored(request, blocks) == expected(said)


@given(TOKENS, st.lists(st.integers(0, 9), min_size=CHUNK, max_size=2 * CHUNK))
def test_a_finished_request_has_what_it_held(tokens: list[int], later: list[int]) -> None:
    engine, request = Engine(), a_request("writer", tokens)
    engine.begin(request, [], len(tokens))
    engine.finish(request)
    blocks = engine.blocks["writer"][: len(tokens) // CHUNK * PER_CHUNK]
    other = a_request("other", later)
    other.num_computed_tokens = 0
    engine.begin(other, blocks, len(later))
    assert engine.stored(request, blocks) == expected(tokens)


@given(TOKENS, st.lists(st.integers(0, 9), min_size=1, max_size=2 * CHUNK))
def test_who_goes_on_from_blocks_of_others_says_the_same(tokens: list[int], more: list[int]) -> None:
    """The blocks come from vLLM's own prefix cache, or were loaded."""
    engine, first = Engine(), a_request("first", tokens)
    engine.begin(first, [], len(tokens))
    shared = engine.blocks["first"][: len(tokens) // BLOCK]
    engine.finish(first)
    reader = Engine()
    whole = len(tokens) // CHUNK * PER_CHUNK
    loaded = [100 + i for i in range(whole)]
    for of, found in ((engine, shared), (reader, loaded)):
        said = [*tokens[: len(found) * BLOCK], *more]
        second = a_request("second", said)
        if of is reader:
            reader.asked(second, loaded)
        second.num_computed_tokens = len(found) * BLOCK
        of.begin(second, found, len(more))
        blocks = of.blocks["second"][: len(said) // CHUNK * PER_CHUNK]
        assert of.stored(second, blocks) == expected(said)


@given(TOKENS, st.integers(1, CHUNK - 1), st.lists(st.integers(0, 9), min_size=CHUNK, max_size=2 * CHUNK))
def test_a_session_says_what_it_kept(tokens: list[int], dropped: int, turn: list[int]) -> None:
    engine, request = Engine(), a_request("session", tokens)
    engine.begin(request, [], len(tokens))
    kept = tokens[: len(tokens) - dropped]
    grown = a_request("session", [*kept, *turn])
    grown.num_computed_tokens = len(kept)
    engine.begin(grown, engine.blocks["session"], len(turn))
    said = [*kept, *turn]
    blocks = engine.blocks["session"][: len(said) // CHUNK * PER_CHUNK]
    assert engine.stored(grown, blocks) == expected(said)
    twice = [*engine.blocks["session"][: len(kept) // BLOCK], *blocks][: len(blocks)]  # vLLM 0.32 may take these
    if twice != blocks:
        assert engine.stored(grown, twice) != expected(said)


@given(TOKENS, st.data())
def test_other_blocks_are_told(tokens: list[int], data: st.DataObject) -> None:
    engine, request = Engine(), a_request("writer", tokens)
    engine.begin(request, [], len(tokens))
    blocks = engine.blocks["writer"][: len(tokens) // CHUNK * PER_CHUNK]
    wrong = data.draw(st.permutations(blocks))
    assert (engine.stored(request, list(wrong)) == expected(tokens)) == (list(wrong) == blocks)


@pytest.mark.parametrize("ours", [True, False])
def test_blocks_that_another_connector_filled_are_not_known(ours: bool) -> None:
    """The blocks held other tokens before."""
    tokens = list(range(3 * CHUNK))
    engine, before, request = Engine(), a_request("before", tokens[::-1]), a_request("request", tokens)
    engine.begin(before, [], len(tokens))
    blocks = engine.blocks["before"][: 2 * PER_CHUNK]
    engine.finish(before)
    engine.contents.ask("request", 0)  # the engine's own cache has nothing of the request
    if ours:
        engine.asked(request, blocks)
    request.num_computed_tokens = 2 * CHUNK
    engine.begin(request, blocks, CHUNK)
    assert engine.stored(request, engine.blocks["request"]) == (expected(tokens) if ours else None)
    assert (engine.stored(request, engine.blocks["request"][2 * PER_CHUNK :], 2 * PER_CHUNK) is None) is not ours


def test_blocks_that_vllm_has_let_go_of_are_not_missed() -> None:
    """Such blocks lie before a window, or before a state."""
    tokens = list(range(4 * CHUNK))
    engine, request = Engine(), a_request("request", tokens)
    request.num_computed_tokens = 2 * CHUNK
    engine.begin(request, [0] * 2 * PER_CHUNK, 2 * CHUNK)
    assert engine.stored(request, engine.blocks["request"][2 * PER_CHUNK :], 2 * PER_CHUNK) == expected(tokens)[16:]
    assert engine.stored(request, [0, *engine.blocks["request"][2 * PER_CHUNK :]], 2 * PER_CHUNK - 1) is not None
    assert (
        engine.stored(request, engine.blocks["request"][2 * PER_CHUNK : 2 * PER_CHUNK + 1], 2 * PER_CHUNK + 1) is None
    )


def test_a_preempted_request_has_no_blocks_any_more() -> None:
    engine, request, other = Engine(), a_request("request", [1] * 2 * CHUNK), a_request("other", [2] * 2 * CHUNK)
    engine.begin(request, [], CHUNK)
    output = SchedulerOutput.make_empty()
    output.preempted_req_ids = {"request"}
    engine.contents.follow(output)
    blocks = engine.blocks["request"]
    engine.begin(other, blocks, CHUNK)
    request.num_computed_tokens = 2 * CHUNK  # the request was loading
    engine.finish(request)
    assert engine.stored(other, blocks) == expected([2] * CHUNK)


def test_what_is_not_known_is_not_stored() -> None:
    engine, request = Engine(), a_request("writer", [1] * CHUNK)
    engine.begin(request, [], CHUNK - 1)
    assert engine.stored(request, engine.blocks["writer"]) is None
    assert engine.stored(request, [77, 78]) is None


@given(st.lists(st.integers(0, 9), min_size=2, max_size=4 * CHUNK))
def test_a_tail_is_told_from_others(tokens: list[int]) -> None:
    engine, request = Engine(), a_request("writer", tokens)
    number = len(tokens) // CHUNK
    if not len(tokens) % CHUNK:
        return
    engine.begin(request, [], len(tokens))
    first = number * PER_CHUNK
    blocks = engine.blocks["writer"][first:]
    reader = Engine()
    told = engine.stored(request, blocks, first, tail=len(blocks))
    assert told == reader.asked(a_request("reader", tokens), [100 + i for i in range(len(blocks))], first)
    other = a_request("reader", [*tokens[:-1], 10])
    assert told != Engine().asked(other, [100 + i for i in range(len(blocks))], first)


def test_a_chunk_that_begins_before_the_blocks_is_left_out() -> None:
    tokens = list(range(4 * CHUNK))
    engine, request = Engine(), a_request("writer", tokens)
    engine.begin(request, [], len(tokens))
    blocks = engine.blocks["writer"]
    found = engine.stored(request, blocks[1:], first=1)
    assert found is not None and found[8:] == expected(tokens)[8:] and found[:8] == bytes(8)
    assert Engine().asked(a_request("reader", tokens), [100 + i for i in range(7)], 1) == expected(tokens)


def test_what_stands_before_the_tokens_counts() -> None:
    tokens = [1] * CHUNK
    assert len({expected(tokens), expected(tokens, cache_salt="a"), expected(tokens, cache_salt="b")}) == 3
    assert mixed(expected(tokens), b"") == expected(tokens)
    assert len({mixed(expected(tokens), weights) for weights in (b"", b"1", b"2")}) == 3
