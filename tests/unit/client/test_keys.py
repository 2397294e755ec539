"""Equal prefixes have equal keys, and other prefixes do not, in whatever form the tokens come."""

import copy
import hashlib
import hmac
import marshal
import pickle
import struct
import sys
from collections.abc import Callable
from itertools import takewhile
from types import FrameType
from typing import Any

import numpy as np
import pytest
from helpers.project.torch_or_skip import torch_or_skip
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle

from raykv import keys as keys_module
from raykv.keys import CacheId, Keys, chain, check, digest, rekey, root
from raykv.system import sha256

ROOT = root(b"secret", model="m", block_tokens=4)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
SIZES = st.integers(1, 6)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    sha256.load()  # otherwise the first example may take a second


def first_change(one: Any, other: Any) -> int:
    """How many leading keys are equal. AssertionError if a later key is equal."""
    same = [bool((a == b).all()) for a, b in zip(one, other, strict=True)]
    leading = len(list(takewhile(bool, same)))
    assert not any(same[leading:])
    return leading


def reference(secret: bytes, tokens: list[int], block_tokens: int, **more: bytes) -> list[bytes]:
    """Keys by an implementation independent of raykv.keys, written from the description alone."""

    def pack(*parts: bytes) -> bytes:
        return b"".join(struct.pack("<Q", len(part)) + part for part in parts)

    base = hmac.new(secret, pack(b"layers", b"i32", b"model", b"sllama"), hashlib.sha256).digest()
    named = [part for name in sorted(more) for part in (name.encode(), more[name])]
    parent = hashlib.sha256(base + pack(b"tokens", b"block_tokens", str(block_tokens).encode(), *named)).digest()
    out = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = hashlib.sha256(
            parent + struct.pack(f"<{block_tokens}i", *tokens[start : start + block_tokens])
        ).digest()
        out.append(parent[:16])
    return out


def test_keys_of_a_release_never_change() -> None:
    base = root(b"a secret", model="llama", layers=32)
    tokens = [1, 2, 2**31 - 1, 0, 5, 6, 7]
    assert [key.tobytes() for key in chain(base, tokens, 3)] == reference(b"a secret", tokens, 3)
    named = chain(base, tokens, 2, lora="ü", salt=b"s")
    assert [key.tobytes() for key in named] == reference(b"a secret", tokens, 2, lora="ü".encode(), salt=b"s")
    # Durable tiers keep keys across releases of raykv, Python and numpy: these must not change
    held = "91e347f836f56079f9832a05d289058e", "e8e332ba7fb549f2ea601824a6c9b8e4"
    for same in (tokens, tuple(tokens), np.array(tokens), np.array(tokens, np.uint32), [np.int64(t) for t in tokens]):
        made = [key.tobytes().hex() for key in chain(base, same, 3)]
        assert made == list(held)
    assert (
        chain(base, tokens, 2, lora="ü", salt=b"s", extra={1: "image"})[2].tobytes().hex()
        == "a50e2d3301e2190daff8c0d7a286e9c9"
    )
    assert rekey(base, [b"one", b"other"])[1].tobytes().hex() == "adffae27468a9326e6c476f7b3399096"
    assert digest(base).hex() == "b6ffa766a605b6c21e598243dc3e83fd"


def test_what_marshal_writes_of_plain_ints_is_read_as_it_is() -> None:
    """If it were not, keys would still be equal, but each token would take a step in Python."""
    assert marshal.dumps([1, -2], 2) == b"[\2\0\0\0i\1\0\0\0i\xfe\xff\xff\xff"
    read = keys_module._from_plain_ints([1, -2, 2**31 - 1])
    assert read is not None and read.tolist() == [1, -2, 2**31 - 1] and keys_module._from_plain_ints([1, 2**31]) is None


@given(TOKENS, TOKENS, TOKENS, SIZES)
def test_equal_prefixes_have_equal_keys_and_no_others(
    prefix: list[int], one: list[int], other: list[int], size: int
) -> None:
    a, b = prefix + one, prefix + other
    blocks = min(len(a), len(b)) // size
    equal = sum(a[: (i + 1) * size] == b[: (i + 1) * size] for i in range(blocks))
    assert first_change(chain(ROOT, a, size)[:blocks], chain(ROOT, b, size)[:blocks]) == equal


@given(TOKENS, SIZES)
def test_one_key_a_full_block(tokens: list[int], size: int) -> None:
    result = chain(ROOT, tokens, size)
    assert result.shape == (len(tokens) // size, 16) and result.dtype == np.uint8
    assert result.flags.c_contiguous and result.flags.writeable
    assert len({key.tobytes() for key in result}) == len(result)


@given(TOKENS, SIZES)
def test_all_forms_of_tokens_are_equal(tokens: list[int], size: int) -> None:
    expected = chain(ROOT, tokens, size)
    wide = np.repeat(np.array(tokens, np.int64), 2)
    forms = [tuple(tokens), [np.int64(t) for t in tokens], wide[::2], wide[::2].astype(">i8")]
    forms += [np.array(tokens, kind) for kind in (np.int32, np.int64, np.uint32, np.uint64)]
    for form in forms:
        assert (chain(ROOT, form, size) == expected).all()


@given(TOKENS, SIZES)
def test_a_tensor_of_tokens_is_equal_to_their_list(tokens: list[int], size: int) -> None:
    torch = torch_or_skip()
    for kind in (torch.int32, torch.int64):
        assert (chain(ROOT, torch.tensor(tokens, dtype=kind), size) == chain(ROOT, tokens, size)).all()


@given(st.integers(0, 4), st.one_of(st.binary(max_size=4), st.text(max_size=4)))
def test_extra_changes_keys_from_its_block_on(block: int, value: bytes | str) -> None:
    tokens = list(range(19))  # four full blocks and a partial one
    plain, changed = chain(ROOT, tokens, 4), chain(ROOT, tokens, 4, extra={block: value})
    assert first_change(plain, changed) == block
    listed = [value if i == block else None for i in range(5)]
    assert (chain(ROOT, tokens, 4, extra=listed) == changed).all()
    other = chain(ROOT, tokens, 4, extra={block: b"another value"})
    assert first_change(changed, other) == block


def test_no_two_fields_collide() -> None:
    tokens = list(range(8))
    variants: list[dict[str, Any]] = [{}]
    for value in ("", "a", "ab", "b", "\0"):
        variants += [{"lora": value}, {"salt": value}, {"extra": {0: value}}, {"lora": value, "salt": value}]
    variants += [{"lora": "a", "salt": "b"}, {"lora": "b", "salt": "a"}, {"lora": "ab", "salt": ""}]
    roots = [root(b"secret", **fields) for fields in ({}, {"a": 1}, {"a": "1"}, {"a": "i1"}, {"b": 1}, {"a": 11})]
    roots += [root(b"secret", a="x", b="y"), root(b"secret", a="xby"), root(b"other", a=1)]
    seen = [
        chain(base, tokens, size, **variant).tobytes() for base in roots for size in (1, 2, 4) for variant in variants
    ]
    seen += [rekey(base, [b"a"]).tobytes() for base in roots]
    every = [raw[at : at + 16] for raw in seen for at in range(0, len(raw), 16)]
    assert len(set(every)) == len(every)


def test_a_later_block_of_a_smaller_size_never_equals_an_extra() -> None:
    longer = chain(ROOT, [1, 2], 2)
    posing = chain(ROOT, [1], 1, extra={0: struct.pack("<i", 2)})
    assert longer.tobytes() != posing.tobytes()


def test_root_does_not_depend_on_the_order_of_fields() -> None:
    assert root(b"s", a=1, b="2") == root(b"s", b="2", a=1) and len(root(b"s")) == 32


def test_str_is_its_utf8() -> None:
    tokens = [1, 2, 3, 4]
    for name in ("lora", "salt"):
        one: Any = {name: "é"}
        other: Any = {name: "é".encode()}
        assert (chain(ROOT, tokens, 4, **one) == chain(ROOT, tokens, 4, **other)).all()


@given(st.lists(st.binary(min_size=32, max_size=32), unique=True, max_size=8))
def test_rekey_is_one_to_one_in_every_form(hashes: list[bytes]) -> None:
    result = rekey(ROOT, hashes)
    assert result.shape == (len(hashes), 16) and len({key.tobytes() for key in result}) == len(hashes)
    array = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)
    assert (rekey(ROOT, array) == result).all()
    assert not hashes or rekey(root(b"other"), hashes).tobytes() != result.tobytes()


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([2**31], "2147483648 does not fit int32"),
        ([0, -(2**31) - 1], "-2147483649 does not fit int32"),
        ([5, -100, -1], "token id -100 is negative"),
        (np.array([5, -1]), "token id -1 is negative"),
        ([1, 2**70], f"{2**70} does not fit int32"),
        (np.array([2**63], np.uint64), f"{2**63} does not fit int32"),
        ([1, 2.0], "float"),
        ([1, True], "bool"),
        ([[1, 2]], "list"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        ("text", "integers in one dimension"),
        (7, "integers in one dimension"),
    ],
)
def test_bad_tokens_are_refused(tokens: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        chain(ROOT, tokens, 1)


def test_bad_tensors_are_refused() -> None:
    torch = torch_or_skip()
    bad: list[tuple[Any, str]] = [
        ([1, torch.tensor(2)], "hold a Tensor"),  # though it can be packed as one
        (torch.tensor([2**40]), f"{2**40} does not fit int32"),
        (torch.tensor([1.0]), "float32"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "Tensor"),
        (torch.tensor([[1, 2]]), r"int64\[1, 2\]"),
    ]
    for tokens, says in bad:
        with pytest.raises(ValueError, match=says):
            chain(ROOT, tokens, 1)


@pytest.mark.parametrize(
    "bad",
    [
        {"block_tokens": 0},
        {"block_tokens": True},
        {"block_tokens": 2.0},
        {"lora": 1},
        {"salt": 1.5},
        {"extra": "text"},
        {"extra": {-1: b"x"}},
        {"extra": {3: b"x"}},
        {"extra": {0: 1}},
        {"extra": [b"x"]},
        {"extra": [None] * 4},
        {"root": b"short"},
    ],
)
def test_bad_arguments_are_refused(bad: dict[str, Any]) -> None:
    good: dict[str, Any] = {"root": ROOT, "token_ids": [1, 2, 3, 4, 5], "block_tokens": 2}
    chain(**good, extra=[None, None, b"a partial block may have one"])
    with pytest.raises(ValueError):
        chain(**{**good, **bad})


def test_bad_roots_and_hashes() -> None:
    with pytest.raises(ValueError, match="secret"):
        root(b"")
    for value in (True, 1.0, b"bytes", None):
        with pytest.raises(ValueError, match="model="):
            root(b"secret", model=value)  # type: ignore[arg-type]
    for hashes in ([b""], ["text"], [1], np.zeros((2, 4), np.int8), np.zeros(4, np.uint8)):
        with pytest.raises(ValueError, match="hash"):
            rekey(ROOT, hashes)  # type: ignore[arg-type]


def test_a_million_tokens_take_no_python_step_each() -> None:
    lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = chain(ROOT, list(range(1_000_000)), 1000)
    finally:
        sys.settrace(before)
    assert len(result) == 1000 and lines < 20_000


# ---------------------------------------------------------------------- Keys know their cache


def cache_id(model: str = "m", block_tokens: int = 16, block_bytes: int = 4096) -> CacheId:
    fields: dict[str, Any] = {"model": model, "block_tokens": block_tokens, "block_bytes": block_bytes}
    return CacheId(model, block_tokens, block_bytes, digest(root(b"secret", **fields)))


def keys_of(cache: CacheId, blocks: int = 6) -> Keys:
    return Keys(chain(ROOT, range(4 * blocks), 4), cache)


KEEPING: dict[str, Callable[[Keys], Any]] = {
    "a slice": lambda keys: keys[2:5],
    "every second": lambda keys: keys[::2],
    "reversed": lambda keys: keys[::-1],
    "none of them": lambda keys: keys[:0],
    "by a mask": lambda keys: keys[np.arange(6) % 2 == 0],
    "by indices": lambda keys: keys[[4, 1]],
    "a copy": lambda keys: keys.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickled": lambda keys: pickle.loads(pickle.dumps(keys)),
    "pickled by protocol 2": lambda keys: pickle.loads(pickle.dumps(keys, protocol=2)),
    "pickled by Ray": lambda keys: cloudpickle.loads(cloudpickle.dumps(keys)),
    "a slice of what was pickled": lambda keys: pickle.loads(pickle.dumps(keys[1:]))[1:],
    "concatenated": lambda keys: np.concatenate([keys[:2], keys[2:]]),
}
LOSING: dict[str, Callable[[Keys], Any]] = {
    "a plain array": np.asarray,
    "a plain copy": np.array,
    "one key": lambda keys: keys[0],
    "a column": lambda keys: keys[:, 0],
    "some columns": lambda keys: keys[:, :15],
    "flat": lambda keys: keys.ravel(),
    "transposed": lambda keys: keys.T,
    "of ints": lambda keys: keys.view(np.uint64),
    "of a sum": lambda keys: keys + 1,
    "of a comparison": lambda keys: keys == keys,
    "like it": np.empty_like,
    "concatenated with plain keys": lambda keys: np.concatenate([keys, np.asarray(keys)]),
    "concatenated by columns": lambda keys: np.concatenate([keys, keys], axis=1),
    "a list": lambda keys: list(keys),
    "nothing": lambda keys: None,
}


@pytest.mark.parametrize("what", KEEPING)
def test_rows_of_keys_keep_their_cache(what: str) -> None:
    keys = keys_of(cache_id())
    made = KEEPING[what](keys)
    assert isinstance(made, Keys) and made.cache == cache_id() and check(made, cache_id()).flags.c_contiguous
    assert set(map(bytes, made)) <= set(map(bytes, keys))


@pytest.mark.parametrize("what", LOSING)
def test_what_is_no_rows_of_keys_is_refused_with_the_way_to_make_them(what: str) -> None:
    with pytest.raises(ValueError, match=r"uint8 Keys of cache\.keys\(token_ids\), or of cache\.rekey\(hashes\)"):
        check(LOSING[what](keys_of(cache_id())), cache_id())


@pytest.mark.parametrize("other", [{"model": "n"}, {"block_tokens": 32}, {"block_bytes": 8192}])
def test_keys_of_another_cache_are_refused_with_both_names(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as error:
        check(keys_of(cache_id(**other)), cache_id())
    assert str(cache_id()) in str(error.value) and str(cache_id(**other)) in str(error.value)
    with pytest.raises(ValueError, match="several caches"):
        np.concatenate([keys_of(cache_id()), keys_of(cache_id(**other))])


def test_caches_that_are_called_alike_are_told_apart() -> None:
    other = cache_id()._replace(digest=digest(root(b"secret", model="m", salt="s")))
    with pytest.raises(ValueError, match="revision, dtype, layout, parallel, part, salt or the pool differ"):
        check(keys_of(other), cache_id())
    assert str(other) != str(cache_id())


def test_the_digest_tells_neither_root_nor_keys() -> None:
    start = root(b"secret", model="m")
    assert digest(start) not in start and digest(start) != digest(root(b"secret", model="n"))


def test_arithmetic_on_keys_gives_plain_arrays() -> None:
    keys = keys_of(cache_id())
    for made in (keys + 1, keys == keys, np.sort(keys), np.zeros_like(keys)):
        assert type(made) is np.ndarray
    assert bool((keys == keys.copy()).all())
    with pytest.raises(ValueError, match="not rows of keys any more"):
        _ = keys[0].cache
