"""Chunks that an engine stores once vLLM has offered them often enough."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from vllm.v1.kv_offload.base import make_offload_key

from raykv.integrations.vllm.scheduler.threshold import Threshold, threshold_of


def chunks(names: str, group: int = 0) -> list[bytes]:
    return [make_offload_key(name.encode(), group) for name in names]


def test_chunks_pass_at_the_offer_that_is_asked_for_and_at_later_offers() -> None:
    threshold = Threshold(3)
    for offered, passed in (("abc", ""), ("abd", ""), ("abcd", "ab"), ("abc", "abc"), ("e", "")):
        assert threshold.passed(chunks(offered)) == chunks(passed)


def test_each_group_is_counted_by_itself_and_passes_without_a_gap() -> None:
    threshold = Threshold(2)
    threshold.passed(chunks("ac") + chunks("xy", 1))
    assert threshold.passed(chunks("x", 1) + chunks("abc") + chunks("y", 1)) == [
        *chunks("x", 1),
        *chunks("a"),
        *chunks("y", 1),
    ]


def test_the_chunks_that_were_offered_longest_ago_are_forgotten() -> None:
    threshold = Threshold(2, tracked=3)
    threshold.passed(chunks("ab"))
    threshold.passed(chunks("cd"))
    assert threshold.passed(chunks("bcd")) == chunks("bcd")
    assert threshold.passed(chunks("a")) == []
    assert Threshold(1, tracked=1).passed(chunks("abcd")) == chunks("abcd"), "more at once than are counted"


def test_as_in_vllm_a_threshold_below_two_is_none() -> None:
    assert threshold_of({}) is threshold_of({"store_threshold": 0}) is threshold_of({"store_threshold": 1}) is None
    threshold = threshold_of({"store_threshold": 2, "max_tracker_size": 2})
    assert threshold and threshold.passed(chunks("a")) == [] and threshold.passed(chunks("a")) == chunks("a")


@pytest.mark.parametrize("name", ["store_threshold", "max_tracker_size"])
@pytest.mark.parametrize("wrong", [-1, 1.5, "2", True, None])
def test_a_threshold_that_is_no_number_is_refused(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={wrong!r}"):
        threshold_of({"store_threshold": 2, name: wrong})
