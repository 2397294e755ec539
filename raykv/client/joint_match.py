"""Leases on blocks that have several parts, or several readers, which other processes read, each on its own node."""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from raykv.client.hits import count_found, count_saved, found_tokens
from raykv.client.lease import Lease, Leased
from raykv.client.request_record import RequestRecord, lease_name
from raykv.client.session import Session
from raykv.config import KEYS_PER_CALL
from raykv.keys import Keys
from raykv.metrics.span import span, tell
from raykv.protocol import Intent, MatchedPart


class Part(NamedTuple):
    """One part of a prompt's blocks, for one reader.

    memory: what the directory calls the memory that it is read into (`Session.memory_name` there).
    """

    memory: str
    keys: Keys


class JointMatch:
    """The leading blocks that are ready in all parts, leased: none of them is evicted before `release`.

    Other processes read them (`leased`), each in the memory of its own node, which this process need not map.

    pending: blocks that others write or are about to compute, after those that are ready. While the caller waits for
    them, nothing is leased.
    """

    def __init__(self, session: Session, parts: Sequence[Part], tokens_per_s: float, request: str = "") -> None:
        """Nothing is leased before `ask`. parts: at least one, all of equally many blocks of equally many tokens.

        tokens_per_s: how fast the engine computes, which limits the wait for an external tier. request: the engine's
        name of what this is for.
        """
        self._session, self._parts, self._request = session, parts, request
        self._record: RequestRecord | None = None  # while somebody follows requests
        self._cache = parts[0].keys.cache
        self._block_s = self._cache.block_tokens / tokens_per_s
        self._calls: list[list[Lease]] = []  # a lease a part, of each call
        self._intent = session.directory.new_id()
        self.pending = 0

    def ask(self, computes: bool = False, wait: bool = False) -> Self:
        """Lease the blocks: one call for all parts, unless they are more keys than one call may ask for.

        computes: the caller computes what is not found (of the last call's keys) and stores it, and others may wait for
        that until `end_intent`. wait: where others do so, lease nothing: see `pending`.
        """
        try:
            self._ask_all(Intent(self._intent if computes else 0, wait) if computes or wait else None)
        except BaseException:  # a signal's, or of who exports the span: nobody would release what was leased before it
            self.release()
            raise
        return self

    def _ask_all(self, intent: Intent | None) -> None:
        total = len(self._parts[0].keys)
        blocks = max(1, KEYS_PER_CALL // len(self._parts))
        asked, begin = total * self._cache.block_tokens, time.monotonic()
        with span("match", pool=self._session.name, model=self._cache.model, asked_tokens=asked) as it:
            for first in range(0, total, blocks):
                found = self._ask([part.keys[first : first + blocks] for part in self._parts], intent)
                if found < min(blocks, total - first):
                    break
            hits = found_tokens((leases[0] for leases in self._calls), self._cache)
            tell(it, hit_tokens=self.num_blocks * self._cache.block_tokens, **hits)
        if self.pending:  # it will be asked again
            self._record = None
            self.release()
            self.end_intent()
            self._calls.clear()
            return
        count_found(self._session, self._cache, asked, hits)
        if self._record is not None:
            self._record.found, self._record.lookup_s = hits, time.monotonic() - begin

    def _ask(self, keys: list[Keys], intent: Intent | None) -> int:
        """Lease what all parts have of these keys. Returns how many blocks."""
        directory, readers = self._session.directory, [part.memory for part in self._parts]
        ids, answer = directory.match_parts(
            readers, [part.tobytes() for part in keys], [part.cache.block_bytes for part in keys], intent
        )
        if directory.requests.followed and self._record is None:
            asked, name = len(self._parts[0].keys) * self._cache.block_tokens, lease_name(directory.client, ids[0])
            self._record = RequestRecord("match", self._cache, asked, id=name, request=self._request)
        if self._record is not None and (answer is None or answer.short):
            self._record.fall_short((answer.short or "") if answer else "no directory answered")
        self.pending = answer.pending if answer else 0
        if answer is None or not answer.parts:
            directory.release(*ids)
            return 0
        self._calls.append([])
        try:
            for memory, part, lease, found in zip(readers, keys, ids, answer.parts, strict=True):
                made = Lease.granted_part(self._session, memory, part, self._block_s, lease, MatchedPart(*found))
                made.record = self._record
                self._calls[-1].append(made)
        except BaseException:
            self._calls.pop()
            directory.release(*ids)
            raise
        return len(self._calls[-1][0])

    @property
    def num_blocks(self) -> int:
        return sum(len(leases[0]) for leases in self._calls)

    def count_saved(self, blocks: int) -> None:
        """Count blocks that an engine reads instead of computing them."""
        count_saved(self._session, self._cache, blocks, self._block_s)

    def fetch_external(self) -> int:
        """Have the readers' stores bring blocks of an external tier, as many as the windows hold and come in time.

        Returns how many leading blocks are in memory then in all parts, of the reader's node or others.
        """
        done = 0
        for leases in self._calls:
            count = min([lease.fetch_external() for lease in leases])
            done += count
            if count < len(leases[0]):
                break
        return done

    def leased(self, part: int, first: int, stop: int) -> list[Leased]:
        """Blocks [first, stop) of a part, for a process of its reader's node to read while this holds them."""
        found, at = [], 0
        for leases in self._calls:
            lease = leases[part]
            if first < at + len(lease) and at < stop:
                found.append(lease.leased(max(0, first - at), min(len(lease), stop - at)))
            at += len(lease)
        return found

    def release(self) -> None:
        """Let the blocks go. The directory learns of it with the next call, so this costs nothing."""
        ids: Iterable[int] = (lease.id for leases in self._calls for lease in leases)
        self._session.directory.release(*ids)
        record, self._record = self._record, None
        if record is not None and record.lookup_s >= 0:
            self._session.directory.report(record.line(self._session.node_id))

    def end_intent(self) -> None:
        """What was to be computed is stored, or will not be. The directory learns of it with the next call."""
        self._session.directory.release(self._intent)
