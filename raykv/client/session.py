"""The node store beside a client: its arena, or that of a GPU, mapped here, and what it is asked to fetch."""

import weakref
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from raykv import registry
from raykv.arena.arena import Arena
from raykv.arena.gpu.gpu_arena import GpuArena
from raykv.client.directory_client import DirectoryClient
from raykv.protocol import PULLED, StoreDescription, Transfer, data_deadline

HELLO_DEADLINE_S = 60.0

Locations = NDArray[np.void]


class LocalStore:
    """The store of this node. Where it is down its memory still serves; only what crosses nodes is missed."""

    def __init__(self, pool: str, node_id: str, gpu: str | None = None) -> None:
        """gpu: whose memory is meant, where it has a tier; else the node's.

        ValueError where the node has no store; RayError where it does not answer; ArenaMismatch (rule 12).
        """
        self.store = registry.find(registry.node_store_name(pool, node_id))
        described = StoreDescription(*ray.get(self.store.describe_arena.remote(gpu), timeout=HELLO_DEADLINE_S))
        self.name = described.name  # as the directory has it
        self.index = described.node
        if gpu and described.handle:
            self.arena: Arena = GpuArena.map(described.path, described.nonce, gpu, described.handle)
        else:
            self.arena = Arena.attach(described.path, described.nonce)
        weakref.finalize(self, self.arena.close).atexit = False

    def pull(self, source: Locations, keys: NDArray[np.uint8], target: Locations, external: bool = False) -> Any:
        """Begin to fetch blocks of other nodes, or what is `external`; `verdicts` waits for it."""
        pull = self.store.pull.options(concurrency_group="promote") if external else self.store.pull
        return pull.remote(tuple(Transfer(source.tobytes(), keys.tobytes(), target.tobytes())))

    def first(self, answers: list[Any], seconds: float) -> Any | None:
        """The first to be done of several pulls. None if none is in time."""
        ready, _ = ray.wait(answers, timeout=seconds)
        return ready[0] if ready else None

    def push(
        self, source: Locations, keys: NDArray[np.uint8], target: Locations, link: DirectoryClient
    ) -> NDArray[np.uint8]:
        """Have other nodes fetch blocks from staging slots here; a verdict for each."""
        answer = self.store.push.remote(tuple(Transfer(source.tobytes(), keys.tobytes(), target.tobytes())))
        return self.verdicts(answer, target, link)

    def verdicts(self, answer: Any, locations: Locations, link: DirectoryClient) -> NDArray[np.uint8]:
        """What became of blocks that cross nodes. A store that does not answer in time has fetched nothing."""
        try:
            data = ray.get(answer, timeout=data_deadline(int(locations["bytes"].sum())))
        except RayError as error:
            link.fault("pull", type(error).__name__)
            return np.zeros(len(locations), np.uint8)
        verdicts = np.frombuffer(data, np.uint8)
        if (verdicts != PULLED).any():
            link.fault("pull", f"{int((verdicts != PULLED).sum())} blocks did not arrive")
        return verdicts
