"""The tail of a prompt: its tokens and its key."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

from raykv.integrations.vllm.chunks.tail import Tail, as_chunk, tail_of

HASH = get_hash_fn_by_name("sha256")
BLOCK, CHUNK = 4, 12  # tokens
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=40)
salts = st.sampled_from([None, "a", "b"])
adapters = st.sampled_from([None, LoRARequest("x", 1, "/x"), LoRARequest("y", 2, "/y")])
TAILED = [tokens for tokens in range(BLOCK, 41) if tokens % CHUNK > 1]  # lengths of prompts that have a tail
tailed = st.sampled_from(TAILED).flatmap(lambda tokens: st.lists(st.integers(0, 2), min_size=tokens, max_size=tokens))
Asked = tuple[list[int], str | None, LoRARequest | None]
asked = st.tuples(prompts, salts, adapters)


def request(prompt: list[int], salt: str | None = None, lora: LoRARequest | None = None, **params: Any) -> Request:
    init_none_hash(HASH)
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params} if params else None)
    hasher = get_request_block_hasher(BLOCK, HASH)
    return Request("r", prompt, sampling, None, cache_salt=salt, lora_request=lora, block_hasher=hasher)


def tail(*args: Any, **params: Any) -> Tail | None:
    return tail_of(request(*args, **params), CHUNK, BLOCK, HASH)


@given(asked)
def test_it_has_what_does_not_fill_a_chunk(it: Asked) -> None:
    prompt, salt, lora = it
    found, tokens = tail(prompt, salt, lora), len(prompt) % CHUNK
    assert (found is None) == (tokens < 2 or len(prompt) < BLOCK)
    if found:
        assert (found.number * CHUNK, found.stop - found.start) == (found.start, tokens)
        assert found.stop == len(prompt)


@given(st.tuples(tailed, salts, adapters), st.tuples(tailed, salts, adapters), st.booleans())
def test_equal_keys_mean_equal_prompts(one: Asked, two: Asked, same: bool) -> None:
    two = one if same else two
    first, second = tail(*one), tail(*two)
    assert first and second and (first.key == second.key) == (one == two)


@given(tailed, st.data())
def test_another_token_anywhere_is_another_key(prompt: list[int], data: Any) -> None:
    first = tail(prompt)
    at = data.draw(st.integers(0, len(prompt) - 1))
    other = tail([*prompt[:at], prompt[at] + 1, *prompt[at + 1 :]])
    assert first and other and first.key != other.key


@given(tailed)
def test_no_chunk_is_called_so(prompt: list[int]) -> None:
    found = tail(prompt)
    assert found and found.key not in {make_offload_key(value, 0) for value in request(prompt).block_hashes}


def test_an_answer_that_grows_leaves_it_as_it_is() -> None:
    grown = request([1] * 18)
    grown.append_output_token_ids([2] * 10)
    assert tail_of(grown, CHUNK, BLOCK, HASH) == tail([1] * 18)


def test_a_request_that_limits_its_transfers_has_none() -> None:
    assert tail([1] * 18, do_remote_decode=True)
    assert tail([1] * 18, max_load_tokens=12) is tail([1] * 18, max_offload_tokens=12) is None


@given(st.integers(0, 60), st.integers(0, 60), st.integers(14, 47))
def test_it_is_asked_for_where_it_spares_more_than_a_step(computed: int, found: int, tokens: int) -> None:
    it = Tail(b"", tokens // CHUNK, tokens // CHUNK * CHUNK, tokens)
    spared = it.stop - 1 - computed - found  # without the last token, which is always computed
    expected = spared > 0 and computed + found >= it.start and (found > 0 or it.stop - computed >= BLOCK)
    assert it.is_next(computed, found, BLOCK) == expected


@pytest.mark.parametrize(("stored", "then"), [(3, 2), (2, 2), (1, 1)])
def test_the_chunk_that_it_would_fill_is_still_to_be_stored(stored: int, then: int) -> None:
    state = SimpleNamespace(offload_keys=[b"one", b"two"], next_stored_chunk_idx=0)
    it = Tail(b"tail", 2, 24, 30)
    with as_chunk(it, SimpleNamespace(group_states=(state,))):
        assert state.offload_keys == [b"one", b"two", b"tail"]
        state.next_stored_chunk_idx = stored
    assert (state.offload_keys, state.next_stored_chunk_idx) == ([b"one", b"two"], then)
