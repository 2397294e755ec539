"""Outputs of an encoder in a pool: the bytes of a safetensors file each, behind their length, in pieces of one size."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import safetensors.torch
import torch

from raykv.client.cache import KVCache
from raykv.client.pool import KVPool
from raykv.keys import Keys

PIECE_BYTES = 256 << 10  # an image of 576 tokens and 4,096 values of 2 bytes has 19 pieces
LENGTH = struct.Struct("<Q")  # bytes of the file


class Outputs:
    """The outputs of equal encoders. Reads and stores block. A name stands for an output and its encoder's weights."""

    def __init__(self, cache: KVCache) -> None:
        """cache: of `outputs_in`."""
        self._cache = cache

    def read(self, name: str) -> bytes | None:
        """The file of an output; None if the pool lacks a piece of it."""
        first = self._pieces(self._keys(name, 0, 1))
        if first is None:
            return None
        (length,) = LENGTH.unpack_from(first)
        rest = self._pieces(self._keys(name, 1, _pieces_of(length)))
        return None if rest is None else (first + rest)[LENGTH.size : LENGTH.size + length]

    def store(self, name: str, output: torch.Tensor, wait: bool = False) -> None:
        """Offer an output to the cluster. output: of any shape and dtype, in host memory.

        wait: return only after all processes can find the output.
        """
        file = safetensors.torch.save({"output": output.contiguous()})
        pieces = np.zeros((_pieces_of(len(file)), PIECE_BYTES), np.uint8)
        content = LENGTH.pack(len(file)) + file
        pieces.reshape(-1)[: len(content)] = np.frombuffer(content, np.uint8)
        self._cache.store(self._keys(name, 0, len(pieces)), pieces, wait=wait)

    def _keys(self, name: str, start: int, stop: int) -> Keys:
        return self._cache.rekey([f"{piece}/{name}".encode() for piece in range(start, stop)])

    def _pieces(self, keys: Keys) -> bytes | None:
        """The bytes of all pieces with these keys; None if the pool lacks a piece."""
        pieces = np.empty((len(keys), PIECE_BYTES), np.uint8)
        with self._cache.match(keys) as match:
            return pieces.tobytes() if match.read(pieces) == len(keys) else None


def loaded(file: bytes, device: Any) -> torch.Tensor:
    """The output in a file of `Outputs.read`, on a device."""
    return safetensors.torch.load(file)["output"].to(device)


def _pieces_of(length: int) -> int:
    return -(-(LENGTH.size + length) // PIECE_BYTES)


def outputs_in(pool: KVPool, names: dict[str, Any], token_bytes: int) -> Outputs:
    """The outputs that a pool has of an encoder.

    names: of `encoder_identity`. token_bytes: about how long the output of a token is. Metrics count tokens by it.
    """
    cache = pool.cache(**names, block_tokens=max(1, PIECE_BYTES // token_bytes), block_bytes=PIECE_BYTES)
    return Outputs(cache)
