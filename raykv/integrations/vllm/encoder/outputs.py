"""Outputs of an encoder in a pool: a safetensors file each, behind its length and checksum, in pieces of one size."""

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

PIECE_BYTES = 256 << 10  # an image of 576 tokens and 4,096 values of 2 bytes has 19 pieces
HEADER = struct.Struct("<QI")  # bytes of the file; CRC-32 of the file, since two writers may mix their pieces


class Outputs:
    """The outputs of equal encoders. Reads and stores block. A name stands for an output and its encoder's weights.

    session: this process's part in the pool.
    """

    def __init__(self, cache: KVCache) -> None:
        """cache: of `outputs_in`."""
        self._cache, self.session = cache, cache.session

    def read(self, name: str, tokens: int) -> bytes | None:
        """The file of an output; None unless the pool has all of it, and it is an output of so many tokens.

        None after an error too.
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
        """Offer an output to the cluster. output: (tokens, values) of any dtype, in host memory.

        wait: return only after all processes can find the output.
        """
        file = safetensors.torch.save({"output": output.contiguous()})
        content = HEADER.pack(len(file), zlib.crc32(file)) + file
        pieces = np.zeros((_pieces_of(len(file)), PIECE_BYTES), np.uint8)
        pieces.reshape(-1)[: len(content)] = np.frombuffer(content, np.uint8)
        self._cache.store(self._keys(name, 0, len(pieces)), pieces, wait=wait)

    def _keys(self, name: str, start: int, stop: int) -> Keys:
        return self._cache.rekey([f"{piece}/{name}".encode() for piece in range(start, stop)])

    def _fill(self, pieces: NDArray[np.uint8], keys: Keys) -> bool:
        """Read pieces. Returns whether the pool had all of them."""
        with self._cache.match(keys) as match:
            return match.num_blocks == len(keys) and match.read(pieces) == len(keys)


def loaded(file: bytes, device: Any) -> torch.Tensor:
    """The output in a file, on a device."""
    return safetensors.torch.load(file)["output"].to(device)


def _pieces_of(length: int) -> int:
    return -(-(HEADER.size + length) // PIECE_BYTES)


def outputs_in(pool: KVPool, names: dict[str, Any], token_bytes: int) -> Outputs:
    """The outputs that a pool has of an encoder.

    names: of `encoder_identity`. token_bytes: about how long the output of a token is. Metrics count tokens by it.
    """
    cache = pool.cache(**names, block_tokens=max(1, PIECE_BYTES // token_bytes), block_bytes=PIECE_BYTES)
    return Outputs(cache)
