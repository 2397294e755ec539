"""How fast vLLM's worker stores and loads KV of torch's CUDA tensors: GB/s by tier and by size of an engine's page.

    pip install -e '.[gpu]' torch
    python benchmarks/gpu/worker.py

The benchmark needs one GPU with 10 GiB free, and 10 GiB of memory. vLLM need not be installed, since the worker uses
only a few plain classes of vLLM. Each job moves 1 GiB of scattered pages. The first store fills new slots. Loads are
repeated, and the loaded bytes are compared with the stored bytes. Returns 1 if bytes differ.
"""

import importlib.util
import sys
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import raykv
from raykv.bench.testbed import local_cluster, local_pool
from raykv.config import MIB
from raykv.keys import Keys

GIB = 1 << 30
LAYERS, TURNS, FINISHED_S = 32, 4, 60.0
PAGES = {"8 heads, 64 KiB": 64 << 10, "4 heads, 32 KiB": 32 << 10, "1 head, 8 KiB": 8 << 10}  # bytes of 16 tokens, bf16


class TransferResult(NamedTuple):
    """Stands in for vLLM's class of this name in vllm/v1/kv_offload/base.py."""

    job_id: int
    success: bool
    transfer_size: int = 0
    transfer_time: float = 0.0


class Figures(NamedTuple):
    tier: str
    page: str
    store_gbps: float
    load_gbps: list[float]
    right: bool


def run(make: Callable[[int, int], Any], same: Callable[[Any, Any, Any], bool], size: int = GIB) -> Iterator[Figures]:
    """Yield figures by tier and page size. make: takes (blocks, bytes of a page), and returns a layer's random tensor.

    same: takes (tensor, some rows, other rows), and returns whether these rows are equal. size: bytes of a job.
    """
    with local_cluster(1):
        for tier, more in {"memory": {}, "gpu": {"gpu_memory": 6 * size}}.items():
            with local_pool(f"worker-{tier}", 8 * size, **more):
                for name, page in PAGES.items():
                    yield Figures(tier, name, *_measured(f"worker-{tier}", page, size, make, same))


def _measured(
    pool: str, page: int, size: int, make: Callable[[int, int], Any], same: Callable[[Any, Any, Any], bool]
) -> tuple[float, list[float], bool]:
    from raykv.client.leases.joint_match import JointMatch, Part
    from raykv.integrations.vllm.chunks.chunks import (
        ChunksOfLayers,
        ChunksToLoad,
        ChunksToStore,
        Origin,
        PartToLoad,
    )
    from raykv.integrations.vllm.worker.pages import pages_of
    from raykv.integrations.vllm.worker.worker import RayKVWorker

    blocks, per_chunk = size // (LAYERS * page), max(1, MIB // (LAYERS * page))
    tensors = [make(2 * blocks, page) for _ in range(LAYERS)]
    ref = types.SimpleNamespace
    canonical = ref(
        tensors=[ref(tensor=tensor) for tensor in tensors],
        group_data_refs=[[ref(tensor_idx=layer, page_size_bytes=page) for layer in range(LAYERS)]],
    )
    mine = raykv.attach(pool, device=0)
    cache = mine.cache(
        model=f"pages of {page}",
        dtype="uint8",
        layout="rows",
        block_tokens=16 * per_chunk,
        block_bytes=LAYERS * page * per_chunk,
    )
    worker = RayKVWorker(mine, [{0: cache}], 0, pages_of(canonical), per_chunk)
    try:
        keys = cache.keys(np.random.default_rng(page).integers(0, 50_000, 16 * blocks))
        stored, other = np.random.default_rng(0).permutation(2 * blocks).reshape(2, blocks)

        def rate(job: int, submit: Callable[[], object]) -> float:
            begin = time.perf_counter()
            submit()
            while not (done := worker.get_finished()):
                if time.perf_counter() > begin + FINISHED_S:
                    raise TimeoutError(f"job {job} has not finished after {FINISHED_S:.0f} s")
                time.sleep(0.0002)
            taken = time.perf_counter() - begin
            assert [result.job_id for result in done] == [job] and not worker.take_failed(), done
            return blocks * LAYERS * page / taken / 1e9

        def spec(ids: Any) -> Any:
            return ref(block_ids=ids, group_sizes=[len(ids)], block_indices=[0])

        chunks = ChunksToStore({0: ChunksOfLayers({0: keys.tobytes()}, 0)})
        store = rate(1, partial(worker.submit_store, 1, spec(stored), chunks))
        match = JointMatch(mine.session, [Part(worker.rank.memory, _committed(cache, keys))], 1e4).ask()
        leased = match.leased(0, 0, len(keys))
        loads = []
        for job in range(2, 2 + TURNS):
            load = ChunksToLoad([[PartToLoad(0, 0, False, leased)]], Origin("r"))
            loads.append(rate(job, partial(worker.submit_load, job, load, spec(other))))
        match.release()
        return store, loads, all(same(tensor, stored, other) for tensor in tensors)
    finally:
        worker.shutdown()


def _committed(cache: raykv.KVCache, keys: Keys) -> Keys:
    """Wait until all blocks can be read, and return the keys. A worker reports a store before it commits the blocks."""
    end = time.monotonic() + FINISHED_S
    while True:
        with cache.match(keys) as match:
            if match.num_blocks == len(keys):
                return keys
            if time.monotonic() > end:
                raise TimeoutError(f"{match.num_blocks} of {len(keys)} blocks are stored after {FINISHED_S:.0f} s")
        time.sleep(0.05)


class _OfVllm(types.ModuleType):
    """Stands in for a module of vLLM. Its classes are empty, except TransferResult, which the worker returns."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return TransferResult if name == "TransferResult" else type(name, (), {})


class _Finder(MetaPathFinder, Loader):
    """Imports a stand-in for each vLLM module, and our package without its `__init__`, which imports the connector."""

    OURS = "raykv.integrations.vllm"

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.split(".")[0] == "vllm" or name == self.OURS else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        if spec.name != self.OURS:
            return _OfVllm(spec.name)
        package = types.ModuleType(spec.name)
        package.__path__ = [str(Path(raykv.__file__).parent / "integrations/vllm")]
        return package

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in_for_vllm() -> None:
    """Make the worker importable where vLLM is not installed, as on a machine with a GPU and without a network."""
    sys.meta_path.insert(0, _Finder())


def _tensor(blocks: int, page: int) -> torch.Tensor:
    return torch.randint(0, 255, (blocks, page), dtype=torch.uint8, device="cuda")


def _same(tensor: torch.Tensor, some: Any, others: Any) -> bool:
    of, to = (torch.from_numpy(which).cuda() for which in (some, others))
    return torch.equal(tensor[of], tensor[to])


def main() -> int:
    if importlib.util.find_spec("vllm") is None:
        stand_in_for_vllm()
    table, right = Table("tier", "page", "first store, GB/s", "loads, GB/s", "bytes"), True
    for figures in run(_tensor, _same):
        loads = ", ".join(f"{rate:.1f}" for rate in figures.load_gbps)
        verdict = "right" if figures.right else "WRONG"
        table.add_row(figures.tier, figures.page, f"{figures.store_gbps:.1f}", loads, verdict)
        right &= figures.right
        torch.cuda.empty_cache()
    Console().print(torch.cuda.get_device_name(), table)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
