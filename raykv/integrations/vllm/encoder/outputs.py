"""Outputs of an encoder in a pool.

Each output is a safetensors file, preceded by its length and checksum, and cut into pieces of equal size.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray

from raykv.client.cache import KVCache
from raykv.client.pool import KVPool
from raykv.keys import Keys

PIECE_BYTES = 256 << 10  # 576 tokens of an image, each of 4,096 values of 2 bytes, make 19 pieces
HEADER = struct.Struct("<QI")  # length of the file in bytes; CRC-32 of the file, as the pieces of two writers may mix


class Outputs:
    """The outputs of equal encoders. `read` and `store` block. A name identifies an output and its encoder's weights.

    session: this process's connection to the pool.
    """

    def __init__(self, cache: KVCache) -> None:
        """cache: from `outputs_in`."""
        self._cache, self.session = cache, cache.session

    def read(self, name: str, tokens: int) -> bytes | None:
        """Return the file of an output.

        None if the pool lacks a piece of the file, if the output's number of tokens is not `tokens`, or after an error.
        """
        try:
            file = self._file(name)
            return file if file is not None and len(loaded(file, "cpu")) == tokens else None
        except Exception as error:
            self.session.directory.fault("encoder", f"an output could not be read: {error!r}")
            return None

    def _file(self, name: str) -> bytes | None:
        first = np.empty((1, PIECE_BYTES), np.uint8)
        if not self._fill(first, self._keys(name, 0, 1)):
            return None
        length, checksum = HEADER.unpack(first[0, : HEADER.size].tobytes())
        pieces = np.empty((_pieces_of(length), PIECE_BYTES), np.uint8)
        pieces[0] = first
        if not self._fill(pieces[1:], self._keys(name, 1, len(pieces))):
            return None
        file = pieces.reshape(-1)[HEADER.size : HEADER.size + length].tobytes()
        return file if zlib.crc32(file) == checksum else None

    def store(self, name: str, output: torch.Tensor, wait: bool = False) -> None:
        """Store an output in the pool. output: (tokens, values) of any dtype, in host memory.

        wait: whether to return only after all processes can find the output.
        """
        file = safetensors.torch.save({"output": output.contiguous()})
        content = HEADER.pack(len(file), zlib.crc32(file)) + file
        pieces = np.zeros((_pieces_of(len(file)), PIECE_BYTES), np.uint8)
        pieces.reshape(-1)[: len(content)] = np.frombuffer(content, np.uint8)
        self._cache.store(self._keys(name, 0, len(pieces)), pieces, wait=wait)

    def _keys(self, name: str, start: int, stop: int) -> Keys:
        return self._cache.rekey([f"{piece}/{name}".encode() for piece in range(start, stop)])

    def _fill(self, pieces: NDArray[np.uint8], keys: Keys) -> bool:
        """Read pieces. Returns whether the pool had all of these pieces."""
        with self._cache.match(keys) as match:
            return match.num_blocks == len(keys) and match.read(pieces) == len(keys)


def loaded(file: bytes, device: Any) -> torch.Tensor:
    """Load the output in a file onto a device."""
    return safetensors.torch.load(file)["output"].to(device)


def _pieces_of(length: int) -> int:
    return -(-(HEADER.size + length) // PIECE_BYTES)


def outputs_in(pool: KVPool, names: dict[str, Any], token_bytes: int) -> Outputs:
    """Return the outputs of an encoder in a pool.

    names: from `encoder_identity`. token_bytes: approximate size of a token's output, for metrics that count tokens.
    """
    cache = pool.cache(**names, block_tokens=max(1, PIECE_BYTES // token_bytes), block_bytes=PIECE_BYTES)
    return Outputs(cache)
