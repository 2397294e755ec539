"""The vLLM worker with KV tensors on a GPU, tested without a GPU on a stand-in for CuPy."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.arena.kv_tensor import Tensor
from helpers.pools import eventually, tokens
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import GPULoadStoreSpec

import raykv
from raykv.arena.gpu import device as devices
from raykv.client.leases.joint_match import JointMatch, Part
from raykv.integrations.vllm.chunks.chunks import ChunksOfLayers, ChunksToLoad, ChunksToStore, Origin, PartToLoad
from raykv.integrations.vllm.worker.pages import pages_of
from raykv.integrations.vllm.worker.worker import RayKVWorker

LAYERS, PAGES, PAGE, PER_CHUNK = 3, 32, 8 << 10, 4
CHUNK = LAYERS * PAGE * PER_CHUNK


@pytest.fixture
def pool(start: Callable[..., raykv.KVPool], on_host: Any) -> Iterator[raykv.KVPool]:
    yield start()


def finished(worker: RayKVWorker, job: int) -> None:
    results = eventually(worker.get_finished)
    assert [result.job_id for result in results] == [job]
    assert not worker.take_failed()


def test_pages_of_a_gpu_are_stored_and_loaded(
    pool: raykv.KVPool, on_host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies come after the engine's kernels, go into pinned memory, and take one launch a job."""
    content = np.random.default_rng(0).integers(0, 256, (LAYERS, PAGES, PAGE), np.uint8)
    tensors = [Tensor(np.zeros((PAGES, PAGE), np.uint8)) for _ in range(LAYERS)]
    canonical = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor) for tensor in tensors],
        group_data_refs=[[SimpleNamespace(tensor_idx=i, page_size_bytes=PAGE) for i in range(LAYERS)]],
    )
    cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=CHUNK)
    worker = RayKVWorker(pool, [{0: cache}], 0, pages_of(canonical), PER_CHUNK)
    for thread in threading.enumerate():
        if thread.name == "raykv-populate":
            thread.join()  # so the slab is page-locked, and the first job does not go through the bounce buffer
    launches: list[int] = []
    copy = devices.Device.copy

    def counted(self: devices.Device, table: NDArray[np.int64], *how: Any) -> None:
        launches.append(table.size // 3)
        copy(self, table, *how)

    monkeypatch.setattr(devices.Device, "copy", counted)

    computed = [on_host.asarray(pages) for pages in content]
    for tensor, made in zip(tensors, computed, strict=True):  # the stream does this only when somebody waits for it
        on_host.cuda.runtime.memcpyAsync(tensor.array.data.ptr, made.data.ptr, made.nbytes, 4, 0)
    keys = cache.keys(tokens(1, 4))
    ids = np.random.default_rng(1).permutation(PAGES)[: 4 * PER_CHUNK]
    worker.submit_store(
        1, GPULoadStoreSpec(ids.tolist(), [len(ids)], [0]), ChunksToStore({0: ChunksOfLayers({0: keys.tobytes()}, 0)})
    )
    finished(worker, 1)
    wanted = content[:, ids].reshape(LAYERS, 4, PER_CHUNK, PAGE).transpose(1, 2, 0, 3).reshape(4, CHUNK)
    out = np.zeros_like(wanted)

    def stored() -> bool:
        with cache.match(keys) as match:
            return match.num_blocks == 4 and match.read(out, verify=True) == 4

    eventually(stored)
    assert (out == wanted).all()
    other = np.setdiff1d(np.arange(PAGES), ids)[: 4 * PER_CHUNK]
    match = JointMatch(pool.session, [Part(worker.rank.memory, keys)], 1e4).ask()
    load = ChunksToLoad([[PartToLoad(0, 0, False, match.leased(0, 0, 4))]], Origin("r"))
    worker.submit_load(2, load, GPULoadStoreSpec(other.tolist(), [len(other)], [0]))
    finished(worker, 2)
    match.release()
    for tensor, pages in zip(tensors, content, strict=True):
        assert (tensor.array.get()[other] == pages[ids]).all()
    assert launches == [len(ids) * LAYERS] * 2, "pinned memory, and all pages of a job at once"
    worker.shutdown()
