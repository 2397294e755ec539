"""How a tier is named: URLs, schemes, and what is refused."""

import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from helpers.tiers.dictionary import DictTier
from helpers.tiers.refusal import refusal

from raykv.tiers import Tier, TierUrl, open_tier, parse, register_tier, tier_for

MIB = 1 << 20
LENGTHS = (1, 4095, 4096, 4097, 2 * MIB)


@pytest.mark.parametrize(
    ("text", "capacity"),
    [
        ("123", 123),
        ("1KiB", 1 << 10),
        ("1.5MiB", 3 << 19),
        ("200GiB", 200 << 30),
        ("2TiB", 2 << 40),
        ("1KB", 10**3),
        ("7MB", 7 * 10**6),
        ("1GB", 10**9),
        ("1TB", 10**12),
    ],
)
def test_capacities(text: str, capacity: int) -> None:
    assert parse(f"file:///data?capacity={text}").capacity == capacity


@pytest.mark.parametrize(("url", "says"), [("file:///x", "append how much"), ("foo://x", "unknown scheme 'foo'")])
def test_a_url_without_a_capacity(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(url)


def test_the_parts_of_a_url() -> None:
    url = parse("redis://kv:pass%40word@host:7000/2?capacity=1GiB&shared=0")
    assert (url.scheme, url.text, url.shared, url.pool) == ("redis", "redis://host:7000/2", False, "default")
    assert (url.parts.hostname, url.parts.port, url.parts.path) == ("host", 7000, "/2")
    assert parse("file:///data/kv?capacity=1KiB").shared is None


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/mnt/nvme?capacity=1GiB",
        "redis:kv:s3cret@host?capacity=1GiB",
        "kv:s3cret@host?capacity=1GiB",
        "redis://kv:s3cret@host:port?capacity=1GiB",
        "redis://kv:s3cret/s3cret@host?capacity=1GiB",
        "redis://kv:1/s3cret@host?capacity=1GiB",
        "redis://kv:s3cret?s3cret@host?capacity=1GiB",
        "redis://kv:1?s3cret@host?capacity=1GiB",
        "redis://kv:1?s3cret=@host&capacity=1GiB",
        "redis://kv:1#s3cret@host?capacity=1GiB",
        "redis://kv:[s3cret@host?capacity=1GiB",
        "redis:///kv:s3cret@host?capacity=1GiB",
        "redis:kv:s3cret@host://?capacity=1GiB",
        "redis://kv:s3cret@host",
        "redis://kv:s3cret@host?capacity=",
        "redis://kv:s3cret@host?capacity=0",
        "redis://kv:s3cret@host?capacity=-1GiB",
        "redis://kv:s3cret@host?capacity=many",
        "redis://kv:s3cret@host?capacity=1",
        "redis://kv:s3cret@host?capacity=0.3",
        "redis://kv:s3cret@host?capacity=1GiX",
        "redis://kv:s3cret@host?capacity=1GiB&capacity=2GiB",
        "redis://kv:s3cret@host?capacity=1GiB&shared=yes",
        "redis://kv:s3cret@host?capacity=1GiB&timeout=3",
        "s3://bucket/prefix?capacity=1GiB&key=s3cret",
    ],
)
def test_refused_urls_say_why_and_no_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"^external=") as raised:
        parse(url)
    assert "s3cret" not in "".join(traceback.format_exception(raised.value))


def test_a_repr_has_no_password() -> None:
    assert "s3cret" not in f"{parse('redis://kv:s3cret@host?capacity=1GiB')!r}"


def test_unknown_schemes_are_refused() -> None:
    message = refusal("gopher://host/path?capacity=1GiB")
    assert all(word in message for word in ("'gopher'", "register_tier", "file", "redis", "valkeys", "s3"))


@pytest.mark.parametrize("url", ["file://host/path?capacity=1GiB", "file://?capacity=1GiB", "file:///?capacity=1GiB"])
def test_file_urls_have_three_slashes(url: str) -> None:
    assert "file:///mnt" in refusal(url)


def test_fsspec_takes_no_password() -> None:
    pytest.importorskip("fsspec")
    assert "s3cret" not in refusal("ftp://kv:s3cret@host/path?capacity=1GiB")


def test_which_tiers_are_shared() -> None:
    pytest.importorskip("fsspec")
    assert not open_tier(parse("memory://x?capacity=1GiB")).shared
    assert open_tier(parse("memory://x?capacity=1GiB&shared=1")).shared


@pytest.mark.parametrize(("module", "url"), [("redis", "redis://host"), ("fsspec", "s3://bucket")])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, module: str, url: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"raykv.tiers.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"external=.*pip install '{module}>="):
        tier_for(parse(f"{url}?capacity=1GiB"))


def test_importing_tiers_imports_no_library_of_theirs() -> None:
    code = "import sys, raykv.tiers; print(*{'redis', 'fsspec', 's3fs'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.strip() == b""


def test_a_registered_tier_gets_parameters_of_its_own() -> None:
    opened: list[TierUrl] = []

    def make(url: TierUrl) -> Tier:
        opened.append(url)
        return DictTier(url)

    register_tier("mine", make)
    open_tier(parse("mine://host/path?capacity=1GiB&color=blue"))
    assert opened[0].params == (("color", "blue"),)


def test_an_entry_point_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[raykv.tiers]\ntheirs = theirs:make\n")
    (tmp_path / "theirs.py").write_text("def make(url): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    make = tier_for(parse("theirs://host?capacity=1GiB&color=blue"))
    assert (make.__module__, make.__name__) == ("theirs", "make")
