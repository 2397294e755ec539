"""What workers tell of the LoRA adapters that they loaded, and from which files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from helpers.pools import eventually

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from raykv.integrations.vllm.adapters import REST_NS, Adapter, Loads, Told, ToldAdapters, digest_of, files_of


def write(folder: Path, weights: str, seconds_ago: int = 60) -> str:
    """An adapter's files, last written so long ago as far as its modification time says."""
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


def test_an_adapter_is_known_once_its_files_are_what_they_were_before(tmp_path: Path) -> None:
    loads, files = Loads(), files_of(write(tmp_path, "first"))
    loads.note(7, files, digest_of(files))
    assert eventually(lambda: loads.known({7})) == {7: Adapter(7, 1, digest_of(files) or b"")}
    assert not loads.known({8})


def test_files_that_change_while_they_are_loaded_name_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loads, files = Loads(), files_of(write(tmp_path, "first"))
    before = digest_of(files)
    write(tmp_path, "second")
    loads.note(7, files, before)
    eventually(lambda: "its KV is shared with no other engine" in caplog.text)
    assert not loads.known({7})


def test_only_the_last_load_of_an_adapter_counts() -> None:
    loads = Loads()
    first, second = loads._begin(7, b"first"), loads._begin(7, b"second")
    loads._take(Adapter(7, first, b"first"))
    assert not loads.known({7})
    loads._take(Adapter(7, second, b"second"))
    assert loads.known({7}) == {7: Adapter(7, second, b"second")}
    assert loads._begin(7, b"second") == second, "the same weights again"
    assert not loads.known({7}), "before its files were looked at again"
    assert loads._begin(7, b"first") > second


def test_files_at_rest_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(write(tmp_path, "first"))
    now = time.time_ns()
    monkeypatch.setattr("raykv.integrations.vllm.adapters.time.time_ns", lambda: now + 2 * REST_NS)
    assert files.at_rest and digest_of(files)
    (tmp_path / "adapter_model.safetensors").unlink()
    assert digest_of(files)


def test_all_ranks_tell_before_an_adapter_has_a_name() -> None:
    told, adapter = ToldAdapters(), Adapter(7, 1, b"weights")
    question = told.ask()
    told.tell({0: Told(question, {7: adapter})})
    assert not told.answered(question, 2) and told.answered(question, 1)
    told.tell({1: Told(question - 1, {})})
    assert not told.answered(question, 2) and told.loaded(7) is None
    told.tell({1: Told(question, {7: adapter._replace(weights=b"others")})})
    assert told.answered(question, 2) and told.loaded(7) is None
    told.tell({1: Told(question, {7: adapter})})
    assert told.loaded(7) == adapter and told.loaded(8) is None
