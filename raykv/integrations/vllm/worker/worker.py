"""Loads and stores chunks of a vLLM worker, by one copy between the engine's KV tensors and an arena of the node.

Chunks of other nodes stream through the arena's staging window, under the lease of the scheduler's process.

On a GPU, all pages of a job are copied by one batched copy. The copy waits for the work that the engine's stream had
when the job was submitted. The job is reported to vLLM when the copy is done.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from raykv.arena.buffers import Rows
from raykv.arena.gpu import cuda
from raykv.client.cache import KVCache
from raykv.client.leases.hits import found_tokens
from raykv.client.leases.lease import Lease
from raykv.client.pool import KVPool
from raykv.client.request_record import RequestRecord, lease_name
from raykv.client.reservation import Reservation
from raykv.cluster import internal_kv
from raykv.integrations.vllm.chunks.chunks import ChunksToLoad, ChunksToStore, Origin, PartToLoad
from raykv.integrations.vllm.chunks.contents import DIGEST_BYTES, mixed
from raykv.integrations.vllm.identity.adapters import Adapter
from raykv.integrations.vllm.worker.loads import LoadedAdapters
from raykv.integrations.vllm.worker.pages import Pages
from raykv.integrations.vllm.worker.ranks import Rank
from raykv.keys import Keys
from raykv.metrics.span import under
from raykv.protocol.location import KEY_BYTES

log = logging.getLogger("raykv")

STREAMS = 4  # maximum number of concurrent loads from other nodes; loads from this node do not wait for them
PAUSES_S = (0.0005, 0.005)  # first and longest pause of an engine that has nothing to compute
GRACE_S = 0.02  # seconds that a store waits for slots after vLLM wants its blocks back; longer for a kv_producer


@dataclass
class Job:
    """A transfer. state: "queued" -> "copying" -> "done"; a job that became "done" while queued must not copy.

    blocks: ids of the engine's blocks. adapter: adapter of the KV to load. weights: digest of its weights, or b"".
    """

    id: int
    state: str
    blocks: NDArray[np.integer[Any]]
    after: tuple[Any, ...] = ()  # CUDA events that must precede any access to the job's pages
    begin: float = field(default_factory=time.perf_counter)
    future: Future[None] | None = None
    adapter: Adapter | None = None
    weights: bytes = b""


class Run(NamedTuple):
    """A job's engine blocks for the Layers at `place`. skipped: number of the first chunk's blocks before the run."""

    place: int
    ids: NDArray[np.int64]
    skipped: int
    per_chunk: int

    @property
    def chunks(self) -> int:
        """Number of chunks that the blocks fill or begin."""
        return -(-(self.skipped + len(self.ids)) // self.per_chunk)

    def whole(self) -> Run:
        """Return the run without its first chunk, which is incomplete."""
        return self._replace(ids=self.ids[self.per_chunk - self.skipped :], skipped=0)


class Offer(NamedTuple):
    """Reserved slots for one part of a run's chunks.

    number: index of the part among the rank's parts. digests: digests of the chunks.
    """

    run: Run
    number: int
    reservation: Reservation
    digests: torch.Tensor | None


class RayKVWorker(OffloadingWorker):  # type: ignore[misc]
    """Loads and stores chunks in its own threads. Reports every job as a success; `take_failed` names failed loads.

    rank: this rank, for the scheduler's side. adapters: the LoRA adapters that this worker has loaded; None without
    LoRA.
    """

    def __init__(
        self,
        pool: KVPool,
        caches: list[dict[int, KVCache]],
        rank: int,
        pages: list[Pages],
        blocks_per_chunk: int,
        stores: bool = True,
        verifies: bool = False,
        produces: bool = False,
    ) -> None:
        """pages: the engine's blocks by place, see `pages_of`. caches: by place and part, the caches of this
        rank's parts. The parts of a chunk are equal pieces of every page, in order.

        stores: whether this rank stores its parts; if not, another rank stores the same bytes. verifies: whether each
        chunk ends with a digest of its content (see `contents`). produces: whether the engine is a `kv_producer`. Other
        engines wait for its chunks, so a store waits for slots up to the pool's deadline.
        """
        self._pool, self._caches, self._number, self._per_chunk = pool, caches, rank, blocks_per_chunk
        self._layers, self._pages = [of.layers for of in pages], [of.rows for of in pages]
        self._writes, self._device = stores, self._pages[0].device
        self._verifies, self._other_tokens = verifies, 0
        self._grace_s = pool.session.directory.deadline if produces else GRACE_S
        self.adapters: LoadedAdapters | None = None
        self._gpu = cuda.ordinal_at(int(self._pages[0].addresses[0, 0])) if self._device else -1  # number of the GPU
        sizes = tuple(next(iter(parts.values())).block_bytes for parts in caches)
        self.rank = Rank(pool.session.memory_name, tuple(caches[0]), sizes, tuple(self._layers))
        tensors: Any = self._pages[0].memory
        longest = max(int(rows.lengths.max()) for rows in self._pages)
        self._spare = torch.empty(longest, dtype=torch.uint8, device=tensors[0].device)  # receives unwanted bytes
        self._nothing = torch.zeros_like(self._spare)  # replaces the tokens that a prompt's tail lacks
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="raykv-load")
        self._streams = ThreadPoolExecutor(STREAMS, thread_name_prefix="raykv-stream")
        self._stores = ThreadPoolExecutor(1, thread_name_prefix="raykv-store")
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="raykv-commit")
        if pool.session.local is not None:  # in a thread, as hundreds of GiB take seconds, and loads should not wait
            populate, about = pool.session.local.arena.populate, (self._device,)
            threading.Thread(target=populate, args=about, name="raykv-populate", daemon=True).start()
        self._jobs: dict[int, Job] = {}
        self._mutex = threading.Lock()  # guards the state of every job
        self._done: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()
        self._some_done = threading.Event()
        self._pause_s = PAUSES_S[0]
        self._failed: set[int] = set()
        self._reported: dict[int, set[int]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: ChunksToStore) -> bool:
        job = self._jobs[job_id] = Job(job_id, "queued", src_spec.block_ids, self._mark())
        if not self._writes or not self._has(dst_spec.adapter):
            self._finish(job, "queued", 0)
            return True
        if self.adapters and dst_spec.adapter:
            job.weights = self.adapters.weights_of(dst_spec.adapter.id)
        job.future = self._stores.submit(self._store, job, src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: ChunksToLoad, dst_spec: Any, expedited: bool = False) -> bool:
        job = self._jobs[job_id] = Job(job_id, "copying", dst_spec.block_ids, self._mark())
        job.adapter = src_spec.origin.adapter
        job.weights = src_spec.origin.weights
        away = any(part.away for part in src_spec.ranks[self._number])
        threads = self._streams if away else self._loads
        job.future = threads.submit(self._load, job, src_spec, dst_spec)
        self._pause_s = PAUSES_S[1]  # the pause ends when the load ends
        return True

    def _has(self, adapter: Adapter | None) -> bool:
        """Whether this worker still has the weights that a request's keys name."""
        return self.adapters is None or self.adapters.has(adapter)

    def pause(self) -> None:
        """Wait a moment, in a step that computes nothing.

        Otherwise scheduler and worker would poll, and take the cores that the copies need. The first pause is short, as
        most look-ups have their answer by the next step.
        """
        self._some_done.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, PAUSES_S[1])

    def computes(self) -> None:
        """Note that the engine computes, so the next idle period begins with a short pause."""
        self._pause_s = PAUSES_S[0]

    def get_finished(self) -> list[TransferResult]:
        results = []
        self._some_done.clear()
        while not self._done.empty():
            result = self._done.get_nowait()
            job = self._jobs.pop(result.job_id)
            if job.id in self._failed or not self._has(job.adapter):
                self._failed.discard(job.id)
                self._reported[job.id] = set(job.blocks.tolist())
            results.append(result)
        return results

    def take_failed(self) -> dict[int, set[int]]:
        """Return the engine's blocks that did not arrive, by load.

        Covers loads that `get_finished` returned since the last call.
        """
        failed, self._reported = self._reported, {}
        return failed

    def wait(self, job_ids: set[int]) -> None:
        """Wait until none of these jobs touches the engine's blocks. Ends stores that do not get slots in time."""
        jobs = [self._jobs[job] for job in job_ids if job in self._jobs]
        wait([job.future for job in jobs if job.future], timeout=self._grace_s)
        for job in jobs:
            self._finish(job, "queued", 0)
        wait([job.future for job in jobs if job.future and job.state == "copying"])

    def shutdown(self) -> None:
        for threads in (self._loads, self._streams, self._stores, self._commits):
            threads.shutdown(cancel_futures=True)
        self._pool.close()

    def _store(self, job: Job, source: Any, target: ChunksToStore) -> None:
        """Copy chunks into slots. The commit comes later, when vLLM has its blocks back."""
        size, offers = 0, list[Offer]()
        if job.state == "done":
            return
        try:
            for run in self._runs(source):
                offers += self._offers(run, target, job.weights)
            if any(len(offer.reservation) for offer in offers) and self._begin(job):
                while offers:
                    size += self._copy(offers[0], job)
                    offers.pop(0)
        except Exception:  # the engine continues; only the pool lacks these blocks
            log.exception("pool %s: a store failed", self._pool.name)
        for offer in offers:
            offer.reservation.release()
        self._finish(job, job.state, size)

    def _copy(self, offer: Offer, job: Job) -> int:
        """Copy a part of chunks into its slots, and let a thread commit it. Returns the number of bytes."""
        if not len(offer.reservation):
            return 0
        rows = self._rows(offer.run, offer.run.chunks, offer.number, self._nothing, job.after, offer.digests)
        offer.reservation.copy_in(rows)
        self._commits.submit(self._commit, offer.reservation)
        return len(offer.reservation) * self.rank.part_bytes[offer.run.place]

    def _runs(self, spec: Any) -> list[Run]:
        """Return the engine's blocks of a job, by place."""
        pieces = np.split(spec.block_ids.astype(np.int64), np.cumsum(spec.group_sizes)[:-1])
        return [
            Run(place, pieces[of.group], spec.block_indices[of.group] % self._per_chunk, self._per_chunk)
            for place, of in enumerate(self._layers)
            if len(pieces[of.group])
        ]

    def _offers(self, run: Run, target: ChunksToStore, weights: bytes) -> list[Offer]:
        """Reserve slots for the parts of a place's chunks. Returns no offers for a place with a gap.

        vLLM has freed the blocks before a window, so a chunk that begins with freed blocks is left out.
        """
        chunks, group, left_out = target.places[run.place], self._layers[run.place].group, 0
        if run.skipped:
            run, left_out = run.whole(), 1
        if not len(run.ids):
            return []
        caches, blocks = self._caches[run.place], chunks.tail or run.chunks * run.per_chunk
        keys = {part: np.frombuffer(chunks.keys[part], np.uint8).reshape(-1, KEY_BYTES)[left_out:] for part in caches}
        if blocks != len(run.ids) or any(len(of_part) != run.chunks for of_part in keys.values()):
            return []
        if self._verifies and group not in target.digests:
            return []
        digests = self._digests(target.digests.get(group, b"")[left_out * DIGEST_BYTES :], weights)
        reserved = [
            cache.reserve(Keys(keys[part], cache.id_for(target.salt)), chunks.position + left_out)
            for part, cache in caches.items()
        ]
        return [Offer(run, number, reservation, digests) for number, reservation in enumerate(reserved)]

    def _commit(self, reservation: Reservation) -> None:
        try:
            reservation.commit()
        except Exception:
            log.exception("pool %s: a commit failed", self._pool.name)
            reservation.release()

    def _load(self, job: Job, source: ChunksToLoad, target: Any) -> None:
        """Copy chunks into the engine's blocks. If a chunk does not arrive, the request is computed."""
        size = 0
        try:
            with under(source.origin.headers):
                size = self._read(source, target, job)
        except Exception:
            log.exception("pool %s: a load failed", self._pool.name)
        if not size:
            self._failed.add(job.id)
        self._finish(job, "copying", size)

    def _read(self, source: ChunksToLoad, target: Any, job: Job) -> int:
        """Read all chunks. Returns the number of bytes, or 0 if a chunk does not arrive."""
        size, runs = 0, {run.place: run for run in self._runs(target)}
        for part in source.ranks[self._number]:
            expected = mixed(source.digests.get(self._layers[part.place].group, b""), job.weights)
            read = self._read_part(part, runs[part.place], source.origin, job.after, expected)
            if not read:
                return 0
            size += read
        return size

    def _read_part(self, part: PartToLoad, run: Run, origin: Origin, after: tuple[Any, ...], expected: bytes) -> int:
        """Read one part of chunks. Returns the number of bytes, or 0 if a chunk does not arrive.

        expected: the digests that the chunks must have.
        """
        session, done, leased = self._pool.session, 0, part.leased
        chunks = sum(len(blocks.keys) // KEY_BYTES for blocks in leased)
        digests = self._digests(bytes(chunks * DIGEST_BYTES), b"")
        rows = self._rows(run, chunks, part.number, self._spare, after, digests)
        # compare arenas by nonce: a new directory gives them other indices
        if not session.maps(blocks.name.nonce for blocks in leased):
            session.directory.fault("load", "the blocks are in another arena than the one that this worker knows")
            return 0
        leases = [Lease.borrowed(session, self.rank.part_bytes[part.place], blocks) for blocks in leased]
        record = self._record(part, leases, origin)
        for lease in leases:
            lease.blocks.record = record
            count = lease.read(rows[done : done + len(lease)], verify=False)
            done += count
            if count < len(lease):
                break
            if lease is not leases[-1]:
                lease.blocks.give_back_slots()
        if record is not None:
            record.read = done * record.cache.block_tokens
            session.directory.report(record.line(session.node_id))
        if done < len(rows) or (digests is not None and not self._are(digests, expected, leases)):
            return 0
        return rows.bytes * done

    def _digests(self, digests: bytes, weights: bytes) -> torch.Tensor | None:
        """Copy digests of chunks to the device of the engine's pages. Returns None if nothing is verified."""
        if not self._verifies:
            return None
        found = torch.frombuffer(bytearray(mixed(digests, weights)), dtype=torch.uint8).reshape(-1, DIGEST_BYTES)
        with self._beside_captures():
            return found.to(self._spare.device)

    def _beside_captures(self) -> AbstractContextManager[Any]:
        """Return a context in which torch may allocate and copy on the GPU while the engine captures CUDA graphs."""
        return cuda.on(self._gpu) if self._device else nullcontext()

    def _are(self, digests: torch.Tensor, expected: bytes, leases: list[Lease]) -> bool:
        """Whether all chunks have the expected digests. Counts wrong chunks, and drops them from the pool."""
        with self._beside_captures():
            arrived = digests.cpu()
        other = np.frombuffer(arrived.numpy().tobytes(), "V8") != np.frombuffer(expected, "V8")
        if not other.any():
            return True
        directory, first = self._pool.session.directory, 0
        directory.fault("tokens", f"{int(other.sum())} chunks hold other tokens than their keys stand for")
        for lease in leases:
            directory.forget_later(lease.blocks.keys[other[first : first + len(lease)]].tobytes())  # replicas too
            first += len(lease)
        self._commits.submit(self._count_other_tokens, int(other.sum()))  # in a thread, as Ray may take long
        return False

    def _count_other_tokens(self, chunks: int) -> None:
        """Add to this process's count of chunks, or parts of chunks, that hold other tokens than their keys name."""
        session, self._other_tokens = self._pool.session, self._other_tokens + chunks
        internal_kv.put_other_tokens(self._pool.name, session.node_id, session.directory.client, self._other_tokens)

    def _record(self, part: PartToLoad, leases: list[Lease], origin: Origin) -> RequestRecord | None:
        """Return the record of a read if requests are followed, else None."""
        if not any(blocks.followed for blocks in part.leased):
            return None
        cache = next(iter(self._caches[part.place].values())).id_for(origin.salt)
        found = found_tokens(leases, cache)
        name = lease_name(part.leased[0].name.owner, part.leased[0].name.lease)
        return RequestRecord("read", cache, sum(found.values()), id=name, request=origin.id, found=found)

    def _rows(
        self,
        run: Run,
        chunks: int,
        number: int,
        other: torch.Tensor,
        after: tuple[Any, ...],
        digests: torch.Tensor | None,
    ) -> Rows:
        """Return the engine's blocks as rows of a part of chunks. after: CUDA events that must precede any access.

        other: a page that replaces blocks which the engine lacks. A load may need only some blocks of the first and
        last chunk, and a prompt's tail does not fill a chunk. digests: (chunks, 8) uint8, at the chunks' ends, or None.
        """
        pages, per_chunk = self._pages[run.place], self._per_chunk
        lengths = pages.lengths // len(self._caches[run.place])
        wanted = np.full((chunks * per_chunk, pages.addresses.shape[1]), other.data_ptr())
        wanted[run.skipped : run.skipped + len(run.ids)] = pages.addresses[run.ids] + number * lengths
        addresses, lengths = wanted.reshape(chunks, -1), np.tile(lengths, per_chunk)
        if digests is not None:
            ends = digests.data_ptr() + DIGEST_BYTES * np.arange(chunks)
            addresses, lengths = np.column_stack([addresses, ends]), np.append(lengths, DIGEST_BYTES)
        return Rows(addresses, lengths, (pages, other, digests), writable=True, device=self._device, after=after)

    def _mark(self) -> tuple[Any, ...]:
        """Return CUDA events after the current work of this thread's stream, which may use a job's pages."""
        if self._device is None:
            return ()
        tensors: Any = self._pages[0].memory
        return cuda.events_after(self._gpu, {cuda.stream_of(tensors[0])})

    def _begin(self, job: Job) -> bool:
        """Set a store to "copying" if vLLM has not taken its blocks back. Returns whether the store may copy."""
        with self._mutex:
            if job.state == "queued":
                job.state = "copying"
            return job.state == "copying"

    def _finish(self, job: Job, state: str, size: int) -> None:
        """Report a job to vLLM, only once, if its state is `state`."""
        with self._mutex:
            if job.state != state or state == "done":
                return
            job.state = "done"
        self._done.put(TransferResult(job.id, True, size, time.perf_counter() - job.begin))
        self._some_done.set()
