"""Leases on the blocks of several parts of a model, or for several readers.

Other processes read the blocks, each on its own node.
"""

import time
from collections.abc import Iterator, Sequence
from math import lcm
from typing import NamedTuple, Self

from raykv.client.leases.hits import count_found, count_saved, found_tokens
from raykv.client.leases.lease import Lease, Leased
from raykv.client.request_record import RequestRecord, lease_name
from raykv.client.session import Session
from raykv.config import KEYS_PER_CALL, KEYS_PER_JOINT_CALL
from raykv.keys import Keys
from raykv.metrics.span import span, tell
from raykv.protocol.clients import Intent, MatchedPart


class Part(NamedTuple):
    """The blocks of a prompt for one part of a model, such as a rank or a group of layers, and for one reader.

    memory: the directory's name for the memory to read into (the reader's `Session.memory_name`). window: number of
    last blocks that the reader needs; 0: all. A sliding-window layer needs the blocks of its window, a model's state
    needs one block. ahead: number of blocks after the prefix that must be ready too, but are not leased. A drafter's
    layer needs one such block.
    """

    memory: str
    keys: Keys
    window: int = 0
    ahead: int = 0


class LeasedCall(NamedTuple):
    """The leases of one call, by part.

    tokens: number of tokens that the call found. firsts: for each part, the index in the prompt of its first leased
    block.
    """

    tokens: int
    firsts: list[int]
    leases: list[Lease]


class JointMatch:
    """Leases on the longest prefix that is ready in all parts. Only the blocks that readers need are leased.

    Other processes read the blocks (see `leased`), each in its node's memory. This process need not map that memory.

    pending: number of blocks that other clients are writing or will compute soon. These blocks follow the first part's
    ready blocks. If there are any, nothing is leased, and the caller should ask again. answered: whether the directory
    answered the last call.
    """

    def __init__(self, session: Session, parts: Sequence[Part], tokens_per_s: float, request: str = "") -> None:
        """Leases nothing before `ask`. parts: at least one; parts with equal `block_tokens` have equal numbers of keys.

        tokens_per_s: rate at which the engine computes; it limits waits for an external tier. request: the engine's
        name for the request.
        """
        self._calls, self._released, self._intends = list[LeasedCall](), True, False
        self._session, self._parts, self._request = session, parts, request
        self._record: RequestRecord | None = None  # set while somebody follows requests
        self._cache = parts[0].keys.cache
        self._tokens_per_s = tokens_per_s
        self._intent = session.directory.new_id()
        self.pending, self.answered = 0, True

    def ask(self, computes: bool = False, wait: bool = False) -> Self:
        """Lease the blocks, with one call for all parts if all keys fit into one call.

        computes: whether the caller will compute and store the blocks that are not found. Other clients may wait for
            these blocks until `end_intent`. wait: whether to lease nothing if others compute or write the next blocks:
            see `pending`.
        """
        try:
            self._ask_all(Intent(self._intent if computes else 0, wait) if computes or wait else None)
        except BaseException:  # a signal handler or the span's exporter raised: nobody else would release the leases
            self.release()
            raise
        return self

    def _ask_all(self, intent: Intent | None) -> None:
        asked, begin = len(self._parts[0].keys) * self._cache.block_tokens, time.monotonic()
        with span("match", pool=self._session.name, model=self._cache.model, asked_tokens=asked) as it:
            for keys in self._pieces():
                if self._ask(keys, intent) < len(keys[0]) * self._cache.block_tokens:
                    break
            hits = found_tokens((call.leases[0] for call in self._calls), self._cache)
            tell(it, hit_tokens=self.tokens, **hits)
        if self.pending:  # the caller will ask again
            self._record = None
            self.release()
            self.end_intent()
            self._calls.clear()
            return
        count_found(self._session, self._cache, asked, hits)
        if self._record is not None:
            self._record.found, self._record.lookup_s = hits, time.monotonic() - begin

    def _pieces(self) -> Iterator[list[Keys]]:
        """Yield the keys of all parts for each call.

        A single call takes all keys if any part has a window or blocks ahead, or if parts have blocks of different
        lengths. This call leaves out keys beyond KEYS_PER_JOINT_CALL.
        """
        # the last `ahead` blocks of a call are not leased: with several calls, each call would lose blocks
        ahead = any(part.ahead for part in self._parts)
        if self._has_windows or ahead or len({part.keys.cache.block_tokens for part in self._parts}) > 1:
            yield self._leading(KEYS_PER_JOINT_CALL)
            return
        total, blocks = len(self._parts[0].keys), max(1, KEYS_PER_CALL // len(self._parts))
        for first in range(0, total, blocks):
            yield [part.keys[first : first + blocks] for part in self._parts]

    def _leading(self, most: int) -> list[Keys]:
        """Return the leading keys of each part, about `most` in total, up to a token where blocks of all parts end."""
        keys, tokens = [part.keys for part in self._parts], [part.keys.cache.block_tokens for part in self._parts]
        if (count := sum(map(len, keys))) <= most:
            return keys
        stop = len(keys[0]) * tokens[0] * most // count
        stop -= stop % lcm(*tokens)
        return [part[: stop // of] for part, of in zip(keys, tokens, strict=True)]

    @property
    def _has_windows(self) -> bool:
        return any(part.window for part in self._parts)

    def _ask(self, keys: list[Keys], intent: Intent | None) -> int:
        """Lease the prefix of these keys that all parts have. Returns its number of tokens."""
        directory = self._session.directory
        self._intends |= bool(intent and intent.intent)
        ids, answer = directory.match_parts(
            [part.memory for part in self._parts],
            keys,
            [(part.window, part.ahead) for part in self._parts],
            intent,
        )
        if directory.requests.followed and self._record is None:
            asked, name = len(self._parts[0].keys) * self._cache.block_tokens, lease_name(directory.client, ids[0])
            self._record = RequestRecord("match", self._cache, asked, id=name, request=self._request)
        if self._record is not None and (answer is None or answer.short):
            self._record.fall_short((answer.short or "") if answer else "no directory answered")
        self.pending, self.answered = answer.pending if answer else 0, answer is not None
        if answer is None or not answer.parts:
            directory.release(*ids)
            return 0
        try:
            leases = [self._lease(*each) for each in zip(self._parts, keys, ids, answer.parts, strict=True)]
        except BaseException:
            directory.release(*ids)
            raise
        tokens = (answer.parts[0].first + len(leases[0])) * self._cache.block_tokens
        before = self.tokens // self._cache.block_tokens
        self._released = False
        self._calls.append(LeasedCall(tokens, [before + part.first for part in answer.parts], leases))
        return tokens

    def _lease(self, part: Part, keys: Keys, lease: int, found: MatchedPart) -> Lease:
        block_s = keys.cache.block_tokens / self._tokens_per_s
        made = Lease.granted_part(self._session, part.memory, keys[found.first :], block_s, lease, found)
        made.blocks.record = self._record
        return made

    @property
    def tokens(self) -> int:
        """Number of tokens in the found prefix."""
        return sum(call.tokens for call in self._calls)

    def count_saved(self, tokens: int) -> None:
        """Count tokens that an engine reads instead of computing them."""
        count_saved(self._session, self._cache, tokens, self._tokens_per_s)

    def fetch_external(self) -> int:
        """Make the readers' stores fetch blocks from an external tier, within the limits of staging windows and time.

        Returns the number of tokens in the prefix for which all needed blocks are then in the memory of nodes.
        """
        tokens = 0
        for call in self._calls:
            counts = [lease.fetch_external() for lease in call.leases]
            if counts == list(map(len, call.leases)):
                tokens += call.tokens
                continue
            # with windows, a shorter prefix would need blocks that are not leased. Without windows, all blocks of a
            # shorter prefix are leased, and the blocks `ahead` of that prefix were found
            if not self._has_windows:
                tokens += self._common(counts)
            break
        return tokens

    def _common(self, counts: Sequence[int]) -> int:
        """Return the tokens of the longest prefix that ends where blocks of all parts end. counts: blocks by part."""
        sizes = [part.keys.cache.block_tokens for part in self._parts]
        most = min(count * size for count, size in zip(counts, sizes, strict=True))
        return most - most % lcm(*sizes)

    def first(self, part: int) -> int:
        """Return the index of a part's first leased block, or 0 if nothing is leased."""
        return self._calls[0].firsts[part] if self._calls else 0

    def leased(self, part: int, first: int, stop: int) -> list[Leased]:
        """Return blocks [first, stop) of a part. Any process of the reader's node may read them until `release`."""
        found = []
        for call in self._calls:
            at, lease = call.firsts[part], call.leases[part]
            if first < at + len(lease) and at < stop:
                found.append(lease.leased(max(0, first - at), min(len(lease), stop - at)))
        return found

    def release(self) -> None:
        """Release the blocks. The next call to the directory reports the release, which needs no call of its own."""
        self._released = True
        self._session.directory.release(*self._ids())
        record, self._record = self._record, None
        if record is not None and record.lookup_s >= 0:
            self._session.directory.report(record.line(self._session.node_id))

    def _ids(self) -> list[int]:
        return [lease.id for call in self._calls for lease in call.leases]

    def __del__(self) -> None:
        held = ([] if self._released else self._ids()) + [self._intent] * self._intends
        if held:
            self._session.directory.drop(held)

    def end_intent(self) -> None:
        """End the intent: the blocks are stored or won't be computed. The next call to the directory reports this."""
        self._intends = False
        self._session.directory.release(self._intent)
