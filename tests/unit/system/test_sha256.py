"""libcrypto's kernel and hashlib give the same digests, so keys do not depend on which is used."""

import hashlib
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.keys import chain, rekey, root
from raykv.system import sha256

ROOT = root(b"secret", model="m")
PIECES = st.lists(st.binary(max_size=200), max_size=12)
PARENT = st.binary(min_size=32, max_size=32)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    sha256.load()  # otherwise the first example may take a second


def test_libcrypto_is_found_here() -> None:
    assert sha256._FUNCTIONS is not None


@given(PARENT, PIECES, st.booleans())
def test_libcrypto_and_hashlib_agree(parent: bytes, pieces: list[bytes], chained: bool) -> None:
    data, ends = np.frombuffer(b"".join(pieces), np.uint8), np.array([*accumulate(map(len, pieces))], np.int64)
    found = sha256.digests(parent, data, ends, chained)
    assert found.shape == (len(pieces), 32) and found.dtype == np.uint8
    assert (found == sha256.by_hashlib(parent, data, ends, chained)).all()
    for piece, digest in zip(pieces, found, strict=True):
        expected = hashlib.sha256(parent + piece).digest()
        assert digest.tobytes() == expected
        parent = expected if chained else parent


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 6), st.binary(max_size=4))
def test_keys_are_the_same_without_libcrypto(tokens: list[int], size: int, value: bytes) -> None:
    def keys() -> list[bytes]:
        extra = {0: value} if tokens else None
        hashes = [b"%d" % token for token in tokens]
        made = chain(ROOT, tokens, size), chain(ROOT, tokens, size, extra=extra), rekey(ROOT, hashes)
        return [some.tobytes() for some in made]

    with pytest.MonkeyPatch.context() as patch:
        by_libcrypto = keys()
        patch.setattr(sha256, "_FUNCTIONS", None)
        assert keys() == by_libcrypto


def test_strided_and_read_only_tokens_are_hashed_as_they_are_seen() -> None:
    tokens = np.arange(80, dtype=np.int32)[::2]
    frozen = tokens.copy()
    frozen.flags.writeable = False
    assert (chain(ROOT, tokens, 4) == chain(ROOT, tokens.tolist(), 4)).all()
    assert (chain(ROOT, frozen, 4) == chain(ROOT, tokens.tolist(), 4)).all()
