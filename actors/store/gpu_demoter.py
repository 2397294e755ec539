"""Demotes the oldest blocks of a GPU to the memory of its node.

The directory decides which blocks are demoted. The GpuDemoter asks for these blocks, copies them, and reports the
outcome, in its own thread.
"""

import logging

import numpy as np
from numpy.typing import NDArray

from raykv.actors.store.node_memory import NodeMemory
from raykv.arena.arena import Arena
from raykv.arena.gpu_arena import copy_between
from raykv.config import METADATA_DEADLINE_S
from raykv.errors import DeviceError
from raykv.line.directory_line import DirectoryLine
from raykv.line.directory_loop import DirectoryLoop
from raykv.protocol.location import KEY_BYTES, LOCATION, Locations
from raykv.protocol.tiers import GpuDemotionReport, GpuDemotions
from raykv.protocol.transfers import PULLED

log = logging.getLogger("raykv")
POLL_S = 0.25  # pause after the first answer without blocks to demote
IDLE_POLL_S = 1.0  # maximum pause, after several answers without blocks to demote
NOTHING_DONE = GpuDemotionReport(locations=b"", stored=b"")


class GpuDemoter:
    """Asks the directory which blocks of a GPU to demote, copies them to the node's memory, and reports the outcome."""

    def __init__(self, pool: str, gpu: NodeMemory, memory: NodeMemory) -> None:
        self._gpu, self._memory = gpu, memory
        self._report = NOTHING_DONE  # which blocks of the directory's last answer arrived
        self._pause = 0.0
        self._loop = DirectoryLoop(pool, "raykv-gpu-demoter", self._demote, lambda _: POLL_S)
        self._loop.start()

    def stop(self) -> None:
        """Stop demoting blocks."""
        self._loop.stop()

    def _demote(self, directory: DirectoryLine) -> float:
        """Demote one batch. Returns the pause until the next batch: 0 if a block was copied."""
        report = tuple(self._report)
        demotions = GpuDemotions(*directory.call("demote_gpu", self._gpu.name, report, seconds=4 * METADATA_DEADLINE_S))
        source, target = np.frombuffer(demotions.source, LOCATION), np.frombuffer(demotions.target, LOCATION)
        keys = np.frombuffer(demotions.keys, np.uint8).reshape(-1, KEY_BYTES)
        stored = _copy(self._gpu, source, keys, self._memory.arena, target)
        self._report = GpuDemotionReport(demotions.target, stored.astype(np.uint8).tobytes())
        self._pause = 0.0 if stored.any() else min(max(POLL_S, 2 * self._pause), IDLE_POLL_S)
        return self._pause


def _copy(
    gpu: NodeMemory, source: Locations, keys: NDArray[np.uint8], arena: Arena, target: Locations
) -> NDArray[np.bool_]:
    """Copy blocks from a GPU (`source`: n LOCATIONs) into slots of an arena (`target`: n LOCATIONs).

    Returns (n,) bool: which blocks arrived.
    """
    source, target = gpu.arena.with_lengths(source), target.copy()
    target["bytes"] = source["bytes"]
    stored = np.zeros(len(source), np.bool_)
    for size in np.unique(source["bytes"]):
        same = source["bytes"] == size
        try:
            verdicts = copy_between(gpu.arena, source[same], keys[same], arena, target[same], used=False)
            stored[same] = verdicts == PULLED
        except DeviceError as error:
            log.warning("%s: %s", gpu.name, error)
    return stored
