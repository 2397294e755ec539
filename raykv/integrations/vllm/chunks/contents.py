"""Computes digests for `verify_tokens`: of the actual content of an engine's blocks, and of the content that keys name.

A key says which tokens a chunk should hold. This module follows each step of vLLM's scheduler, and records which tokens
were computed into which block. Each stored chunk gets a digest of these tokens. A reader compares this digest with the
digest of its own tokens. If a bug stores a chunk under the key of another chunk, the digests differ, and the chunk is a
miss.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from raykv.integrations.vllm.chunks.chunks import ChunksToStore

DIGEST_BYTES = 8


@dataclass
class Table:
    """A request's blocks, by group. told: number of leading tokens that are computed and are not guesses.

    last: by group, the number of blocks that are full of these tokens, and the digest of the last full block.
    """

    blocks: dict[int, list[int]]
    told: int
    last: dict[int, tuple[int, bytes]] = field(default_factory=dict)


class Contents:
    """The digests, on the scheduler's side. The digest of a block covers its tokens and all earlier tokens."""

    def __init__(self, tokens: dict[int, int], per_chunk: int, request_of: Callable[[str], Any]) -> None:
        """tokens: number of tokens per block, by group in vLLM's order. per_chunk: number of blocks per chunk.

        request_of: returns a request by id.
        """
        self._tokens, self._per_chunk, self._request_of = tokens, per_chunk, request_of
        self._held: dict[int, bytes] = {}  # digests by block
        self._tables: dict[str, Table] = {}
        self._left: dict[str, dict[int, bytes]] = {}  # digests by block, for requests finished since the last step
        self._asked: dict[str, int] = {}  # number of tokens in vLLM's own cache, by waiting request
        self._loaded: set[str] = set()  # requests whose prefix this connector loaded, not another connector

    def ask(self, request: str, computed: int) -> None:
        """Note that a request is about to begin or resume. computed: number of its tokens in vLLM's own cache."""
        self._asked[request] = computed

    def follow(self, output: Any) -> None:
        """Follow a step that vLLM has scheduled. output: vLLM's message to the workers."""
        begin = {}
        for preempted in getattr(output, "preempted_req_ids", None) or ():
            self._tables.pop(preempted, None)
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids, new.num_computed_tokens)
            begin[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._go_on(request, blocks, computed, request in cached.resumed_req_ids)
            begin[request] = computed
        for copy in getattr(output, "kv_cache_block_copies", None) or ():
            self._hold(copy.dst_block_id, self._held.get(copy.src_block_id))
        for request, count in output.num_scheduled_tokens.items():
            self._write(request, begin[request], begin[request] + count)

    def finish(self, request: Any) -> None:
        """Note that a request is done. vLLM frees its blocks next, and its last chunks are stored in the next step."""
        self._asked.pop(request.request_id, None)
        self._loaded.discard(request.request_id)
        table = self._tables.get(request.request_id)
        if table is None:
            return
        self._write(request.request_id, table.told, min(request.num_computed_tokens, request.num_tokens))
        del self._tables[request.request_id]
        blocks = [block for of_group in table.blocks.values() for block in of_group]
        self._left[request.request_id] = {block: self._held[block] for block in blocks if block in self._held}

    def note(self, meta: Any) -> None:
        """Add digests to the jobs of a step."""
        for job in meta.store_jobs.values():
            self._note_stored(job, self._left.get(job.req_id, self._held))
        for job in meta.load_jobs.values():
            self._note_loaded(job)
        self._left.clear()

    # ------------------------------------------------------------------ content of blocks

    def _go_on(self, request: str, blocks: Any, computed: int, resumed: bool) -> None:
        """Continue a request. blocks: its new blocks by group, or all of its blocks if it was `resumed`."""
        if resumed:
            self._begin(request, blocks, computed)
            return
        for group, of_group in self._tables[request].blocks.items():
            of_group += blocks[group] if blocks else ()

    def _begin(self, request: str, blocks: Any, computed: int) -> None:
        """Begin a request. blocks: all of its blocks, by group.

        The content of blocks that another connector has loaded is unknown.
        """
        self._tables[request] = Table({group: list(blocks[group]) for group in self._tokens}, computed)
        known = self._asked.pop(request, computed)
        if request in self._loaded:
            self._loaded.discard(request)
            return
        for group, tokens in self._tokens.items():
            for block in blocks[group][known // tokens : -(-computed // tokens)]:
                self._held.pop(block, None)

    def _write(self, name: str, start: int, stop: int) -> None:
        """Record that a step computes tokens [start, stop) of a request.

        The last tokens may be guesses, which a later step confirms or replaces.
        """
        table, request = self._tables[name], self._request_of(name)
        known, start = min(stop, request.num_tokens), min(start, table.told)
        for group, tokens in self._tokens.items():
            blocks, first = table.blocks[group], start // tokens
            for block in blocks[first : -(-stop // tokens)]:
                self._held.pop(block, None)
            number, digest = table.last.get(group, (0, b""))
            if number != first or not digest:
                digest = self._up_to(request, group, blocks, first)
            for number in range(first, known // tokens):
                digest = digest and _next(digest, request, number * tokens, (number + 1) * tokens)
                self._hold(blocks[number], digest)
            table.last[group] = known // tokens, digest
        table.told = known

    def _up_to(self, request: Any, group: int, blocks: list[int], count: int) -> bytes:
        """Return the digest of a request's first `count` blocks.

        If vLLM has freed the last of these blocks, the digest is computed from the tokens.
        """
        if count and blocks[count - 1]:
            return self._held.get(blocks[count - 1], b"")
        *_, digest = self._chain(request, group, count * self._tokens[group])
        return digest

    def _chain(self, request: Any, group: int, stop: int) -> Iterator[bytes]:
        """Yield the digest before a request's first block, then the digest of each block, up to token `stop`."""
        digest, tokens = _seed(request, group), self._tokens[group]
        yield digest
        for first in range(0, stop, tokens):
            yield (digest := _next(digest, request, first, min(stop, first + tokens)))

    def _hold(self, block: int, digest: bytes | None) -> None:
        if block and digest:  # block 0 belongs to no request
            self._held[block] = digest
        else:
            self._held.pop(block, None)

    # ------------------------------------------------------------------ jobs

    def _note_stored(self, job: Any, held: Mapping[int, bytes]) -> None:
        """Add the digests of a job's chunks. A group with a block of unknown content gets no digests."""
        chunks: ChunksToStore = job.dst_spec
        for place, (group, first, blocks) in enumerate(self._runs(job.src_spec)):
            offered = chunks.places.get(place)
            if offered is None:
                continue
            found = [held.get(block, b"") for block in blocks]
            if offered.tail:
                found[-1] = self._end_of_prompt(job.req_id, group, found)
            before = -first % self._per_chunk  # number of leading blocks to skip; their chunk began before the job
            if found[before:] and all(found[before:]):
                left_out = bytes(DIGEST_BYTES) if before else b""
                chunks.digests[place] = left_out + _of_chunks(found[before:], self._per_chunk)

    def _end_of_prompt(self, name: str, group: int, found: list[bytes]) -> bytes:
        """Return the digest of the block in which a prompt ends. found: digests of the blocks up to that block."""
        tokens, request = self._tokens[group], self._request_of(name)
        stop = request.num_prompt_tokens
        number = stop // tokens
        if stop % tokens == 0:
            return found[-1]
        before = found[-2] if len(found) > 1 else self._up_to(request, group, self._tables[name].blocks[group], number)
        return before and _next(before, request, number * tokens, stop)

    def _note_loaded(self, job: Any) -> None:
        """Add the digests that the request expects. After the job, its blocks have this content, or are recomputed."""
        chunks, request = job.src_spec, self._request_of(job.req_id)
        self._loaded.add(job.req_id)
        for place, (group, first, blocks) in enumerate(self._runs(job.dst_spec)):
            if not blocks:
                continue
            tokens, per_chunk = self._tokens[group], self._per_chunk
            stop = -(-(first + len(blocks)) // per_chunk) * per_chunk * tokens
            if stop > request.num_tokens:  # the tail of a prompt
                stop = request.num_prompt_tokens
            _, *digests = self._chain(request, group, stop)
            for number, block in enumerate(blocks, first):
                self._hold(block, digests[number] if (number + 1) * tokens <= stop else None)
            chunks.digests[place] = _of_chunks(digests[first // per_chunk * per_chunk :], per_chunk)

    def _runs(self, spec: Any) -> list[tuple[int, int, list[int]]]:
        """Return, for each group in vLLM's order, its index in keys, the number of its first block, and its blocks."""
        ids, found, begin = spec.block_ids.tolist(), [], 0
        for group, size, first in zip(self._tokens, spec.group_sizes, spec.block_indices, strict=True):
            found.append((group, first, ids[begin : begin + size]))
            begin += size
        return found


def _of_chunks(blocks: list[bytes], per_chunk: int) -> bytes:
    """Compute the digests of chunks from the digests of their blocks. The last chunk may not be full."""
    return b"".join(_digest(*blocks[first : first + per_chunk]) for first in range(0, len(blocks), per_chunk))


def _seed(request: Any, group: int) -> bytes:
    """Return the digest before a request's first token."""
    adapter = request.lora_request.lora_name if request.lora_request else ""
    return _digest(b"%d" % group, (request.cache_salt or "").encode(), adapter.encode())


def _next(before: bytes, request: Any, first: int, stop: int) -> bytes:
    """Return the digest of a request's tokens [0, stop). before: the digest of the request's tokens [0, first)."""
    images = [
        f"{image.identifier}@{image.mm_position.offset}"
        for image in request.mm_features or ()
        if image.mm_position.offset < stop and image.mm_position.offset + image.mm_position.length > first
    ]
    tokens = array("q", request.all_token_ids[first:stop]).tobytes()
    embeds = b"" if request.prompt_embeds is None else _bytes_of(request.prompt_embeds[first:stop])
    return _digest(before, tokens, "\0".join(images).encode(), embeds)


def _bytes_of(tensor: Any) -> bytes:
    found: bytes = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return found


def mixed(digests: bytes, weights: bytes) -> bytes:
    """Combine digests of chunks with the weights of the adapter that computed the chunks."""
    if not weights:
        return digests
    return b"".join(_digest(digests[at : at + DIGEST_BYTES], weights) for at in range(0, len(digests), DIGEST_BYTES))


def _digest(*parts: bytes) -> bytes:
    total = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.digest()
