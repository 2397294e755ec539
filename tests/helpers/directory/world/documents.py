"""The chains of keys that clients ask for and store. Many chains share a prefix."""

import struct
from hashlib import blake2b

SIZES = (4096, 8000, 12288)  # block_bytes: slots of 1, 2 and 3 pages
LONGEST = 12


def _key(parent: bytes, token: int) -> bytes:
    return blake2b(parent + bytes([token]), digest_size=16).digest()


def _document(size: int, doc: int) -> list[bytes]:
    """A chain of keys. Documents whose numbers have equal leading bits share a prefix."""
    keys = [_key(struct.pack("<I", size), doc >> 3)]
    for position in range(1, LONGEST):
        keys.append(_key(keys[-1], doc >> max(0, 3 - position // 2)))
    return keys


DOCUMENTS = {size: [_document(size, doc) for doc in range(16)] for size in SIZES}
DEPTH = {key: depth for docs in DOCUMENTS.values() for doc in docs for depth, key in enumerate(doc)}
SIZE_OF = {key: size for size, docs in DOCUMENTS.items() for doc in docs for key in doc}
