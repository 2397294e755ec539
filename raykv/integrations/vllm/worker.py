"""The worker's side of vLLM on a pool: one copy between the engine's KV tensors and an arena of the node.

Chunks of other nodes stream through the arena's staging window, by the lease that the scheduler's process has.

On a GPU a job waits for what its stream was given before the job was submitted. Then all of its pages are one batched
copy, and vLLM is told when that is done.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from raykv.arena.buffers import Rows, rows_of
from raykv.client.cache import KVCache
from raykv.client.lease import Lease
from raykv.client.pool import KVPool
from raykv.client.request_record import RequestRecord, lease_name
from raykv.client.reservation import Reservation
from raykv.integrations.vllm.manager import ChunksToLoad, ChunksToStore, PartToLoad
from raykv.keys import Keys, tenant_of
from raykv.metrics.span import under
from raykv.protocol import KEY_BYTES

log = logging.getLogger("raykv")

STREAMS = 4  # loads from other nodes at a time; those from this node wait for none of them
PAUSE_S = 0.002  # of an engine that has nothing to compute
GRACE_S = 0.02  # that an engine waits for the directory when it wants back a block that is still to be stored


@dataclass
class Job:
    """A transfer. state: "queued" -> "copying" -> "done"; a job that is done before it copies must not copy at all."""

    id: int
    state: str
    ready: Any = None  # event on a GPU, after which its pages may be touched
    begin: float = field(default_factory=time.perf_counter)
    future: Future[None] | None = None

    def wait(self) -> None:
        """Wait until the GPU is done with the pages: it may have been given work on them just before."""
        if self.ready is not None:
            self.ready.synchronize()


class RayKVWorker(OffloadingWorker):  # type: ignore[misc]
    """Loads and stores chunks in threads of its own. Reports success of every job: `take_failed` names the others."""

    def __init__(self, pool: KVPool, cache: KVCache, part: int, kv_caches: Any, blocks_per_chunk: int) -> None:
        """cache: of this worker's part, of a block size that `kv_caches` must add up to. part: its rank.

        ValueError if they don't. ImportError where the tensors are on a GPU and CuPy is not installed.
        """
        tensors = [piece.tensor.view(torch.uint8) for piece in kv_caches.tensors]
        self._pages = replace(rows_of(tensors), stream=None)  # jobs wait for what was submitted before them
        chunk_bytes = self._pages.bytes * blocks_per_chunk
        if chunk_bytes != cache.block_bytes:
            raise ValueError(
                f"a chunk has {chunk_bytes} bytes of KV tensors, but vLLM said {cache.block_bytes}: a layout of the "
                f"KV cache that raykv does not know; leave kv_transfer_config out"
            )
        self._pool, self._cache, self._part, self._per_chunk = pool, cache, part, blocks_per_chunk
        length = int(self._pages.lengths.max())
        self._spare = torch.empty(length, dtype=torch.uint8, device=tensors[0].device)  # for what is not wanted
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="raykv-load")
        self._streams = ThreadPoolExecutor(STREAMS, thread_name_prefix="raykv-stream")
        self._stores = ThreadPoolExecutor(1, thread_name_prefix="raykv-store")
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="raykv-commit")
        if pool.session.local is not None:
            self._loads.submit(pool.session.local.arena.populate, self._pages.device)
        self._jobs: dict[int, Job] = {}
        self._mutex = threading.Lock()  # guards the state of every job
        self._done: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()
        self._some_done = threading.Event()
        self._failed: set[int] = set()
        self._reported: set[int] = set()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: ChunksToStore) -> bool:
        job = self._jobs[job_id] = Job(job_id, "queued", self._mark())
        job.future = self._stores.submit(self._store, job, src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: ChunksToLoad, dst_spec: Any) -> bool:
        job = self._jobs[job_id] = Job(job_id, "copying", self._mark())
        threads = self._streams if src_spec.parts[self._part].away else self._loads
        job.future = threads.submit(self._load, job, src_spec, dst_spec)
        return True

    def pause(self) -> None:
        """Wait a moment, in steps that compute nothing: scheduler and worker that poll would take the copy's cores."""
        self._some_done.wait(PAUSE_S)

    def get_finished(self) -> list[TransferResult]:
        results = []
        self._some_done.clear()
        while not self._done.empty():
            result = self._done.get_nowait()
            del self._jobs[result.job_id]
            if result.job_id in self._failed:
                self._failed.remove(result.job_id)
                self._reported.add(result.job_id)
            results.append(result)
        return results

    def take_failed(self) -> set[int]:
        """Loads among those that `get_finished` gave last whose blocks did not arrive."""
        failed, self._reported = self._reported, set()
        return failed

    def wait(self, job_ids: set[int]) -> None:
        """Wait until none of these jobs touches the engine's blocks. A store that has no slots yet is given up."""
        jobs = [self._jobs[job] for job in job_ids if job in self._jobs]
        wait([job.future for job in jobs if job.future], timeout=GRACE_S)
        for job in jobs:
            self._finish(job, "queued", 0)
        wait([job.future for job in jobs if job.future and job.state == "copying"])

    def shutdown(self) -> None:
        for threads in (self._loads, self._streams, self._stores, self._commits):
            threads.shutdown(cancel_futures=True)
        self._pool.close()

    def _store(self, job: Job, source: Any, target: ChunksToStore) -> None:
        """Copy chunks into slots. They are committed after vLLM has its blocks back."""
        size = 0
        if job.state == "done":
            return
        try:
            keys = Keys(_rows_of_keys(target.keys[self._part]), self._cache.id)  # made in the scheduler's process
            if len(source.block_ids) != len(keys) * self._per_chunk:
                raise ValueError(f"{len(source.block_ids)} blocks for {len(keys)} chunks of {self._per_chunk}")
            reservation = self._cache.reserve(keys, target.position)
            if len(reservation) and self._begin(job):
                job.wait()
                reservation.copy_in(self._rows(source, len(keys)))
                size = len(reservation) * self._cache.block_bytes
                self._commits.submit(self._commit, reservation)
            else:
                reservation.release()
        except Exception:  # the engine goes on: its blocks are not in the pool, that is all
            log.exception("pool %s: a store failed", self._pool.name)
        self._finish(job, job.state, size)

    def _commit(self, reservation: Reservation) -> None:
        try:
            reservation.commit()
        except Exception:
            log.exception("pool %s: a commit failed", self._pool.name)
            reservation.release()

    def _load(self, job: Job, source: ChunksToLoad, target: Any) -> None:
        """Copy chunks into the engine's blocks. If one does not come the request is computed."""
        size = 0
        try:
            job.wait()
            with under(source.parts[self._part].origin.headers):
                size = self._read(source, target)
        except Exception:
            log.exception("pool %s: a load failed", self._pool.name)
        if not size:
            self._failed.add(job.id)
        self._finish(job, "copying", size)

    def _read(self, source: ChunksToLoad, target: Any) -> int:
        """Bytes read: of all chunks, or 0 if one of them does not come."""
        part, session = source.parts[self._part], self._pool.session
        if session.local is None or session.local.arena.nonce != part.nonce:  # not by index: a new directory has others
            session.refresh()
            session.directory.fault("load", "the blocks are in another arena than the one that this worker knows")
            return 0
        leases = [Lease.borrowed(session, self._cache.block_bytes, part.node, leased) for leased in part.leased]
        rows, done = self._rows(target, sum(map(len, leases))), 0
        record = self._record(part, leases)
        for lease in leases:
            lease.record = record
            count = lease.read(rows[done : done + len(lease)], verify=False)
            done += count
            if count < len(lease):
                break
        if record is not None:
            record.read = done * self._cache.block_tokens
            session.directory.report(record.line(session.node_id))
        return rows.bytes * len(rows) if done == len(rows) else 0

    def _record(self, part: PartToLoad, leases: list[Lease]) -> RequestRecord | None:
        """Of a read, if somebody follows requests."""
        if not any(leased.followed for leased in part.leased):
            return None
        found: Counter[str] = Counter()
        for lease in leases:
            found.update({source: blocks * self._cache.block_tokens for source, blocks in lease.found.items()})
        cache, asked = self._cache.id._replace(tenant=tenant_of(part.origin.salt)), sum(found.values())
        name = lease_name(part.leased[0].owner, part.leased[0].lease)
        return RequestRecord("read", cache, asked, id=name, request=part.origin.id, found=dict(found))

    def _rows(self, spec: Any, chunks: int) -> Rows:
        """The engine's blocks as rows of chunks. A load may want only a part of the first and the last chunk."""
        ids: NDArray[np.int64] = spec.block_ids.astype(np.int64)
        skipped = spec.block_indices[0] % self._per_chunk
        wanted = np.full((chunks * self._per_chunk, self._pages.addresses.shape[1]), self._spare.data_ptr())
        wanted[skipped : skipped + len(ids)] = self._pages.addresses[ids]
        lengths = np.tile(self._pages.lengths, self._per_chunk)
        memory = (self._pages, self._spare)
        return Rows(wanted.reshape(chunks, -1), lengths, memory, writable=True, device=self._pages.device)

    def _mark(self) -> Any:
        """A CUDA event after the work that this thread's stream has now. None where the pages are in host memory."""
        if self._pages.device is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _begin(self, job: Job) -> bool:
        """Whether a store may copy: the engine has not taken its blocks back. It is "copying" then."""
        with self._mutex:
            if job.state == "queued":
                job.state = "copying"
            return job.state == "copying"

    def _finish(self, job: Job, state: str, size: int) -> bool:
        """Report a job to vLLM, once, if it is in this state."""
        with self._mutex:
            if job.state != state or state == "done":
                return False
            job.state = "done"
        self._done.put(TransferResult(job.id, True, size, time.perf_counter() - job.begin))
        self._some_done.set()
        return True


def _rows_of_keys(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8).reshape(-1, KEY_BYTES)
