"""Sizes mean the same in Python, in a shell and in a tier's URL. Impossible settings are refused."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.config import MIN_MEMORY, PoolConfig, capacity_bytes, memory_size, parse_size
from raykv.protocol.location import Address
from raykv.start import _check_same, _comparable
from raykv.tiers import parse

GIB = 1 << 30


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (0.3, 0.3),
        ("0.3", 0.3),
        (1, 1.0),
        (1.0, 1.0),
        ("1", 1.0),
        ("1.0", 1.0),
        (2, 2),
        (GIB, GIB),
        ("1073741824", GIB),
        ("1073741824B", GIB),
        ("4GiB", 4 * GIB),
        ("4 GiB", 4 * GIB),
        (" 4Gi ", 4 * GIB),
        ("4gib", 4 * GIB),
        ("1.5MiB", 3 << 19),
        ("500MB", 500 * 10**6),
        ("500M", 500 * 10**6),
        ("64m", 64 * 10**6),
        ("7kB", 7000),
        ("7KB", 7000),
        ("7KiB", 7 << 10),
        ("1TB", 10**12),
        ("2TiB", 2 << 40),
        ("1.1GB", 11 * 10**8),
    ],
)
def test_a_size_is_a_fraction_or_bytes(given: Any, meant: float) -> None:
    size = parse_size("size", given)
    assert size == meant and type(size) is type(meant)


@pytest.mark.parametrize(
    "given",
    ["inf", "nan", "1e999", "much", "", "0", "-1", "0.0", "1.5", "1B", "0.3B", "1iB", "0GiB", "1 Gi B", "1PiB"],
)
def test_text_that_is_no_size_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"size=.*: give a fraction such as 0\.3, or bytes"):
        parse_size("size", given)


@pytest.mark.parametrize("given", [0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), True, None, b"1GiB"])
def test_what_is_no_size_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"size=.*: give a fraction such as 0\.3, or bytes"):
        parse_size("size", given)


UNITS = {f"{unit}{end}": 1000 ** (i + 1) for i, unit in enumerate("kMGT") for end in ("", "B")}
UNITS |= {f"{unit}i{end}": 1024 ** (i + 1) for i, unit in enumerate("KMGT") for end in ("", "B")}


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)))
def test_units_are_powers_of_1000_and_with_an_i_of_1024(number: int, unit: str) -> None:
    assert parse_size("size", f"{number}{unit}") == number * UNITS[unit]
    assert parse_size("size", f"{number / 4}{unit}") == number * UNITS[unit] // 4


@given(st.one_of(st.integers(2, 1 << 60), st.integers(1, 10**6).map(lambda n: n / 10**6)))
def test_a_size_and_its_text_mean_the_same(size: float) -> None:
    text = str(size) if isinstance(size, int) else f"{size:.6f}"
    assert parse_size("size", size) == parse_size("size", text) == parse_size("size", parse_size("size", text))


@given(st.integers(MIN_MEMORY, 1 << 50))
def test_a_size_means_the_same_everywhere(size: int) -> None:
    text = f"{size}"
    config = PoolConfig(cpu_memory=text, gpu_memory=text)
    assert config == PoolConfig(cpu_memory=size, gpu_memory=size)
    assert (config.cpu_memory, config.gpu_memory) == (size, size)
    assert parse(f"file:///data?capacity={text}").capacity == memory_size("cpu_memory", text) == size


def test_a_config_holds_numbers() -> None:
    config = PoolConfig(cpu_memory="20GiB", gpu_memory="0.5")
    assert (config.cpu_memory, config.gpu_memory) == (20 * GIB, 0.5)
    assert type(PoolConfig(cpu_memory=1).cpu_memory) is float
    assert PoolConfig(gpu_memory="0").gpu_memory == PoolConfig().gpu_memory == 0


@pytest.mark.parametrize("given", ["much", 1 << 20, "1MiB", 1.5, True])
def test_memory_that_is_not_possible_is_refused(given: Any) -> None:
    for name in ("cpu_memory", "gpu_memory"):
        with pytest.raises(ValueError, match=f"^{name}={re.escape(repr(given))}"):
            PoolConfig(**{name: given})


def test_the_bytes_of_a_memory() -> None:
    assert capacity_bytes(0.25, 64 * GIB) == 16 * GIB
    assert capacity_bytes(1, 64 * GIB) == 64 * GIB, "the whole, not one byte"
    assert capacity_bytes("2GB", 64 * GIB) == 2 * 10**9


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"name": "a/b"}, "pool name 'a/b'"),
        ({"name": "-x"}, "pool name '-x'"),  # commands would take it for an option
        ({"locality": 0.5}, "locality=0.5"),
        ({"transport": "pigeon"}, "transport='pigeon'"),
        ({"write": "twice"}, "write='twice'"),
        ({"min_hits": -1}, "min_hits=-1"),
        ({"deadline": 0}, "deadline=0: give seconds above 0, and at most 10"),
        ({"deadline": 10.5}, "deadline=10.5"),
        ({"deadline": float("inf")}, "deadline=inf"),
        ({"deadline": True}, "deadline=True"),
        ({"deadline": "5"}, "deadline='5'"),
        ({"deadline": None}, "deadline=None"),
        ({"deadline": float("nan")}, "deadline=nan"),
        ({"external": "/mnt/nvme"}, "external= is not a URL"),
    ],
)
def test_other_settings_that_are_not_possible_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolConfig(**setting)


def test_what_is_secret_is_in_no_repr_and_no_message() -> None:
    config = PoolConfig(secret="hunter2", external="redis://user:hunter2@host:6379?capacity=1GiB")
    assert "hunter2" not in repr(config)
    with pytest.raises(ValueError, match="names no file") as refused:
        config.explicit_secret()
    assert "hunter2" not in str(refused.value)
    running = {"secret": "", **_comparable(config)}
    others = r"external='redis://host:6379\?…' \(given: 'redis://other\?…'\)"
    with pytest.raises(ValueError, match=others) as refused:
        _check_same(replace(config, external="redis://:hunter2@other?capacity=1GiB"), None, running, False)
    assert "hunter2" not in str(refused.value)
    assert repr(Address("host", 80, b"hunter2")) == "host:80"
