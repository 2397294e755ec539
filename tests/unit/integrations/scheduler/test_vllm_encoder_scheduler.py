"""The scheduler's and the worker's side of vLLM's encoder cache, without an engine. Reads end when a test says so."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

import torch
import vllm
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import SchedulerOutput

from raykv.integrations.vllm.encoder import scheduler as module
from raykv.integrations.vllm.encoder.connector import check
from raykv.integrations.vllm.encoder.scheduler import EncoderScheduler
from raykv.integrations.vllm.encoder.worker import Storing, load
from raykv.integrations.vllm.identity.weights import Weights


def feature(identifier: str, offset: int = 0, modality: str = "image") -> MultiModalFeatureSpec:
    where = PlaceholderRange(offset=offset, length=30)
    return MultiModalFeatureSpec(data=None, modality=modality, identifier=identifier, mm_position=where)


class Reads(dict[str, Future[bytes | None]]):
    """Reads that have begun, by name."""

    def begin(self, name: str, tokens: int) -> Future[bytes | None]:
        assert tokens == 30
        assert name not in self or self[name].done(), "it is being read already"
        self[name] = Future()
        return self[name]


@pytest.fixture
def reads() -> Reads:
    return Reads()


@pytest.fixture
def scheduler(reads: Reads) -> EncoderScheduler:
    return EncoderScheduler(reads.begin, Weights(None))


def scheduled(freed: tuple[str, ...] = (), tokens: int = 1) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.free_encoder_mm_hashes, output.total_num_scheduled_tokens = list(freed), tokens
    return output


def test_a_request_waits_until_all_its_reads_have_ended(scheduler: EncoderScheduler, reads: Reads) -> None:
    features = [feature("a"), feature("b", 40), feature("c", 80)]
    assert not scheduler.is_settled(features, 0) and set(reads) == {"a", "b", "c"}, "it begins all reads at once"
    reads["a"].set_result(b"A")
    reads["b"].set_result(None)
    assert not scheduler.is_settled(features, 0)
    assert scheduler.has("a") and not scheduler.has("b") and not scheduler.has("c")
    reads["c"].set_result(None)
    assert scheduler.is_settled(features, 0)
    assert [scheduler.has(name) for name in "abc"] == [True, False, False]


def test_outputs_of_computed_tokens_are_not_read(scheduler: EncoderScheduler, reads: Reads) -> None:
    assert not scheduler.is_settled([feature("a"), feature("b", 40)], 30) and set(reads) == {"b"}
    assert scheduler.is_settled([feature("b", 40)], 70)


def test_a_step_brings_the_workers_what_was_found_once(scheduler: EncoderScheduler, reads: Reads) -> None:
    features = [feature("a"), feature("b", 40)]
    scheduler.is_settled(features, 0)
    reads["a"].set_result(b"A")
    reads["b"].set_result(None)
    for of in features:
        scheduler.allocate(of)
    assert scheduler.step(scheduled(tokens=0)).files == {}, "workers do not load in such a step"
    step = scheduler.step(scheduled())
    assert step.files == {"a": b"A"} and step.names == {"b": "b"}
    step = scheduler.step(scheduled())
    assert not step.files and not step.names
    reads.clear()
    assert scheduler.is_settled(features, 0) and not reads, "the engine's own cache has both"
    scheduler.step(scheduled(freed=("a",)))
    assert not scheduler.is_settled(features, 0) and set(reads) == {"a"}


def test_a_promised_output_stays_until_it_is_loaded(scheduler: EncoderScheduler, reads: Reads) -> None:
    """vLLM asks again in later steps if it has no room for the request's KV."""
    scheduler.is_settled([feature("a")], 0)
    reads["a"].set_result(b"A")
    for _ in range(3):
        assert scheduler.is_settled([feature("a")], 0) and scheduler.has("a")
        assert scheduler.step(scheduled()).files == {}
    scheduler.allocate(feature("a"))
    assert scheduler.step(scheduled()).files == {"a": b"A"}


def test_no_request_waits_longer_than_the_limit(
    scheduler: EncoderScheduler, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    assert not scheduler.is_settled([feature("a")], 0)
    now += module.FETCH_S / 2
    assert not scheduler.is_settled([feature("a")], 0)
    reads["a"].set_running_or_notify_cancel()
    now += module.FETCH_S
    assert scheduler.is_settled([feature("a")], 0) and not scheduler.has("a")
    scheduler.allocate(feature("a"))
    reads["a"].set_result(b"A")
    assert scheduler.step(scheduled()).files == {}, "the engine computes it"


def test_what_an_ended_request_wanted_is_forgotten(scheduler: EncoderScheduler, reads: Reads) -> None:
    scheduler.is_settled([feature("a")], 0)
    reads["a"].set_result(b"A")
    scheduler.forget([feature("a")])
    assert not scheduler.has("a")


def test_outputs_of_other_weights_are_other_outputs(tmp_path: Path, reads: Reads) -> None:
    named = tmp_path / "weights"
    named.write_text("one")
    scheduler = EncoderScheduler(reads.begin, Weights(str(named)))
    scheduler.is_settled([feature("a")], 0)
    (one,) = reads
    reads[one].set_result(b"A")
    assert scheduler.has("a")
    scheduler.step(scheduled())
    named.write_text("two")
    assert not scheduler.is_settled([feature("a")], 0), "it was read for the old weights"
    (_, two) = reads
    assert two != one and not scheduler.has("a")
    scheduler.step(scheduled())
    scheduler.allocate(feature("a"))
    named.write_text("three")
    assert scheduler.step(scheduled()).names["a"] not in reads, "it is stored under the weights of its step"


def test_weights_that_lose_their_name_have_another_once(tmp_path: Path, reads: Reads) -> None:
    """A writer may empty the file for a moment."""
    named = tmp_path / "weights"
    named.write_text("one")
    scheduler = EncoderScheduler(reads.begin, Weights(str(named)))
    named.write_text("")
    assert not scheduler.is_settled([feature("a")], 0)
    (unnamed,) = reads
    reads[unnamed].set_result(None)
    scheduler.step(scheduled(tokens=0))
    assert scheduler.is_settled([feature("a")], 0) and set(reads) == {unnamed}
    named.write_text("two")
    scheduler.step(scheduled(tokens=0))
    assert not scheduler.is_settled([feature("a")], 0) and len(reads) == 2


def test_a_long_queue_fetches_a_bounded_number_of_outputs(scheduler: EncoderScheduler, reads: Reads) -> None:
    features = [feature(str(number)) for number in range(module.FETCHES + 5)]
    for of in features:
        scheduler.is_settled([of], 0)
    assert set(reads) == {of.identifier for of in features[: module.FETCHES]}
    assert scheduler.is_settled(features[-1:], 0) and not scheduler.has(features[-1].identifier)
    scheduler.forget(features[:1])
    assert reads["0"].cancelled()
    assert not scheduler.is_settled(features[-1:], 0)


def test_prompt_embeddings_are_no_outputs_of_an_encoder(scheduler: EncoderScheduler, reads: Reads) -> None:
    given = feature("a", modality=module.NOT_OF_ENCODERS)
    assert scheduler.is_settled([given], 0) and not reads
    scheduler.allocate(given)
    assert scheduler.step(scheduled()).names == {}


def test_an_output_that_vllms_cache_has_lost_is_read_again(scheduler: EncoderScheduler, reads: Reads) -> None:
    """After `reset_encoder_cache` vLLM tells nobody which outputs it has freed."""
    scheduler.allocate(feature("a"))
    scheduler.step(scheduled())
    assert scheduler.is_settled([feature("a")], 0)
    assert not scheduler.has("a")
    assert not scheduler.is_settled([feature("a")], 0) and set(reads) == {"a"}


def test_without_threads_the_engine_computes(scheduler: EncoderScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, tokens: int) -> Future[bytes | None]:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(scheduler, "_read", refuse)
    assert scheduler.is_settled([feature("a")], 0) and not scheduler.has("a")


def test_a_worker_keeps_what_the_engine_has_and_drops_what_it_cannot_store(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def store(self, name: str, output: torch.Tensor, wait: bool) -> None:
            raise MemoryError(name)

    storing = Storing(Broken(), at_once=False)  # type: ignore[arg-type]
    own = torch.zeros(2)
    cache = {"a": own}
    load(cache, {"a": b"no file"}, "cpu")
    assert cache["a"] is own
    for _ in range(100):
        storing.store("a", own)
    storing._thread.submit(int).result()
    storing.close()
    assert "was not stored" in caplog.text


def config(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(
        lora_config=SimpleNamespace(enable_tower_connector_lora=options.get("tower", False)),
        ec_transfer_config=SimpleNamespace(ec_connector_extra_config=options.get("extra", {})),
        model_config=SimpleNamespace(
            enable_sleep_mode=options.get("sleep", False),
            is_encoder_decoder=options.get("decodes", False),
            multimodal_config=SimpleNamespace(mm_processor_cache_gb=options.get("processed", 4)),
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=options.get("prefixes", False)),
        weight_transfer_config=options.get("transfer"),
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"decodes": True}, "encoder-decoder"),
        ({"processed": 0}, "set mm_processor_cache_gb above 0"),
        ({"tower": True}, "set enable_tower_connector_lora to False"),
        ({"sleep": True}, "enable_sleep_mode lets the encoder's weights change"),
        ({"transfer": object()}, "weight_transfer_config lets the encoder's weights change"),
    ],
)
def test_engines_whose_outputs_have_no_name_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(vllm.__version__, config(**options))


def test_changing_weights_with_a_name_are_taken() -> None:
    check(vllm.__version__, config(sleep=True, extra={"weights": "/name"}))
    check(vllm.__version__, config())
    check(vllm.__version__, config(processed=0, prefixes=True))
