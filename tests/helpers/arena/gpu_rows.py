"""Rows on a GPU, and blocks of an arena that are read into such rows."""

from typing import Any

import numpy as np

from helpers.arena.gpu_arenas import Locations
from helpers.arena.gpus import Bytes
from raykv.arena.arena import Arena
from raykv.arena.buffers import Rows, rows_of


def on_gpu(cupy: Any, blocks: Bytes) -> Rows:
    return rows_of([cupy.asarray(blocks)])


def read_to_gpu(cupy: Any, arena: Arena, at: Locations, keys: Bytes, verify: bool = False) -> tuple[Any, Bytes]:
    out = cupy.zeros((len(at), int(at["bytes"][0])), np.uint8)
    return arena.read(at, keys, rows_of([out]), verify), out.get()
