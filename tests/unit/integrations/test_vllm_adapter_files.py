"""Workers tell which LoRA adapters they loaded, and from which files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from helpers.pools import eventually

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from raykv.integrations.vllm.identity.adapters import Adapter, Load, Told, ToldAdapters
from raykv.integrations.vllm.worker.loads import REST_NS, Loads, digest_of, files_of


def write(folder: Path, weights: str, seconds_ago: int = 60) -> str:
    """Write an adapter's files, with modification times so many seconds ago."""
    folder.mkdir(exist_ok=True)
    for name, text in (("adapter_config.json", "{}"), ("adapter_model.safetensors", weights)):
        (folder / name).write_text(text)
        os.utime(folder / name, (time.time() - seconds_ago,) * 2)
    return str(folder)


def test_equal_files_have_one_digest_and_others_another(tmp_path: Path) -> None:
    one, same = (files_of(write(tmp_path / name, "weights")) for name in "ab")
    other = files_of(write(tmp_path / "c", "weighty"))
    assert digest_of(one) == digest_of(same) != digest_of(other)


@pytest.mark.parametrize("name", ["adapter_config.json", "weights.bin"])
def test_files_without_weights_have_no_digest(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    assert digest_of(files_of(str(tmp_path))) is None
    assert digest_of(files_of(str(tmp_path / "missing"))) is None


def test_a_modification_time_that_is_set_back_hides_no_write(tmp_path: Path) -> None:
    before = files_of(write(tmp_path, "first"))
    digest = digest_of(before)
    after = files_of(write(tmp_path, "other"))
    assert before != after and digest_of(after) != digest
    assert not after.at_rest, "it was written just now, whatever its modification time says"


def test_an_adapter_has_weights_once_its_files_are_what_they_were_before(tmp_path: Path) -> None:
    loads, files = Loads(), files_of(write(tmp_path, "first"))
    loads.note(7, "a", files, digest_of(files))
    assert eventually(lambda: weights(loads, 7)) == digest_of(files)
    assert loads.known({7})[7].number == 1 and not loads.known({8})


def test_files_that_change_while_they_are_loaded_name_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loads, files = Loads(), files_of(write(tmp_path, "first"))
    before = digest_of(files)
    write(tmp_path, "second")
    loads.note(7, "a", files, before)
    eventually(lambda: "its KV is shared with no other engine" in caplog.text)
    assert not weights(loads, 7)
    loads.note(7, "a", files_of(str(tmp_path)), digest_of(files_of(str(tmp_path))))
    assert eventually(lambda: weights(loads, 7))
    assert loads.known({7})[7].number == 2


def weights(loads: Loads, adapter: int) -> bytes:
    return loads.known({adapter})[adapter].weights


def test_other_weights_of_a_name_have_another_number_and_the_same_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's id does not matter: an adapter that is unloaded and loaded again gets a new id."""
    now = time.time_ns()
    monkeypatch.setattr("raykv.integrations.vllm.worker.loads.time.time_ns", lambda: now + 60 * REST_NS)
    one, other = (files_of(write(tmp_path / name, name)) for name in ("one", "other"))
    loads, numbers = Loads(), []
    for adapter, files in ((7, one), (7, one), (8, one), (8, other), (8, one)):
        loads.note(adapter, "a", files, digest_of(files))
        assert weights(loads, adapter) == digest_of(files)
        numbers.append(loads.known({adapter})[adapter].number)
    assert numbers == [1, 1, 1, 2, 3]


def test_only_the_last_load_of_an_adapter_counts() -> None:
    loads = Loads()
    first, second = (loads._begin(7, "a", digest, agree=False) for digest in (b"first", b"second"))
    loads._check(7, first, None, "")
    assert loads.known({7}) == {7: second} and first.number < second.number


def test_files_at_rest_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(write(tmp_path, "first"))
    now = time.time_ns()
    monkeypatch.setattr("raykv.integrations.vllm.worker.loads.time.time_ns", lambda: now + 2 * REST_NS)
    assert files.at_rest and digest_of(files)
    (tmp_path / "adapter_model.safetensors").unlink()
    assert digest_of(files)


def test_all_ranks_tell_before_an_adapter_has_a_name() -> None:
    """Each rank counts its own loads."""
    told, one, two = ToldAdapters(2), Load("a", 1, b"weights"), Load("a", 2, b"weights")
    question = told.ask()
    assert not told.tell({0: Told(question, {7: one})})
    assert not told.answered(question) and told.numbers(7) is None
    told.tell({1: Told(question - 1, {})})
    assert not told.answered(question) and told.numbers(7) is None
    told.tell({1: Told(question, {7: two._replace(weights=b"others")})})
    assert told.answered(question) and told.numbers(7) == {0: 1, 1: 2}
    assert told.named(7, {0: 1, 1: 2}) is None
    told.tell({1: Told(question, {7: two})})
    assert told.named(7, {0: 1, 1: 2}) == Adapter(7, b"weights", {0: 1, 1: 2})
    assert told.named(7, {0: 1, 1: 1}) is None and told.named(8, {0: 1, 1: 2}) is None


def test_a_name_has_other_weights_when_its_load_has_a_higher_number() -> None:
    told, load = ToldAdapters(1), Load("a", 3, b"weights")
    assert not told.tell({0: Told(0, {7: load})})
    assert not told.tell({0: Told(0, {})})
    assert not told.tell({0: Told(0, {8: load})})
    assert told.tell({0: Told(0, {8: load._replace(number=4, weights=b"")})}) == {"a"}
    assert not told.tell({0: Told(0, {7: load, 8: load._replace(number=4)})})
