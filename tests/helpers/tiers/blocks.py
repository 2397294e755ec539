"""Blocks of random bytes for tiers, and which of them a tier has."""

import mmap
import random
from collections.abc import Sequence
from itertools import chain

from raykv.tiers import Block, Tier


def key_at(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def memory(length: int, offset: int = 0) -> memoryview:
    """Memory of `length` bytes that begins `offset` bytes after the start of a page."""
    return memoryview(mmap.mmap(-1, max(1, offset + length)))[offset : offset + length]


def block(key: bytes, length: int, offset: int = 0) -> Block:
    body = memory(length, offset)
    body[:] = random.Random(key).randbytes(length)
    return Block(key, key * 4, body)


def there(tier: Tier, blocks: Sequence[Block], offset: int = 0) -> list[bool]:
    """Load blocks. Returns which of them came back unchanged."""
    out = [memory(len(block.body), offset) for block in blocks]
    heads = tier.get_many([block.key for block in blocks], out)
    assert all(head is None or type(head) is bytes for head in heads)
    return [head == block.head and view == block.body for head, view, block in zip(heads, out, blocks, strict=True)]


def listed(tier: Tier) -> list[tuple[bytes, int]]:
    return list(chain(*tier.scan()))
