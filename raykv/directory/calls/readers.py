"""Calls of readers: leases on the blocks of a prompt, and staging slots on the reader's node."""

from dataclasses import dataclass
from math import lcm

import numpy as np

from raykv.config import KEYS_PER_CALL
from raykv.directory.calls.clients import on_call
from raykv.directory.kernels import chains, eviction, leases, lists, lookup, table
from raykv.directory.kernels.columns import NODE_MASK, UNSTAGED, Blocks, Places
from raykv.directory.state.allocator import Node
from raykv.directory.state.arrays import KeyArray, RowArray, key_array, split_keys
from raykv.directory.state.holds import Hold
from raykv.directory.state.state import State
from raykv.protocol.clients import (
    Call,
    Intent,
    Located,
    Matched,
    MatchedPart,
    MatchedParts,
    MatchRequest,
    NextWindowRequest,
    Stored,
    Window,
)
from raykv.protocol.location import KEY_BYTES, LOCATION, is_block_size, is_count, is_tier, slot_bytes

HELD_UP_S = 0.5  # seconds that a reader without a staging slot waits for slots that other readers hold
TURN = 4  # while other readers wait, a reader in a chain gets slots for a quarter of the blocks that it asks for
AWAITED_S = 0.1  # seconds for which a reader counts as waiting after `next_window` told it to wait
WAIT_S = 0.5  # after this wait, a reader in a chain gives up copies begun before it; after twice this wait, all copies


@dataclass(slots=True)
class HeldPrefix:
    """A prefix that is held for a reader, and the places of its blocks.

    counts: number of blocks in total, outside the reader's memory, in external tiers, and in the memory of `host`.
    """

    reader: Node | None
    host: int  # index of the node that the reader's GPU belongs to; -1 if the reader is not on a GPU
    hold: Hold
    places: Places
    counts: tuple[int, int, int, int]

    @property
    def in_memory(self) -> int:
        """Number of blocks in memory."""
        return self.counts[0] - self.counts[2]

    @property
    def source(self) -> bytes:
        return self.places.locations[: self.counts[0]].tobytes()

    @property
    def staged(self) -> bytes:
        return self.places.staged_locations[: self.counts[0]].tobytes() if self.counts[1] else b""


def match(state: State, call: Call, request: MatchRequest, now: float) -> Matched:
    """Lease the longest ready prefix of the keys."""
    client = on_call(state, call, now)
    state.clients.end(client, request.lease)
    if not is_block_size(request.block_bytes):
        return Matched(state.epoch, b"", b"")
    keys = key_array(request.keys)
    found = _hold_prefix(state, call, request, keys, request.lease, now)
    if request.counted:
        state.hit_curve.asked(keys, request.block_bytes, found.in_memory)
        _count_match(state, len(keys), found)
    if not found.counts[0]:
        return Matched(state.epoch, b"", b"")
    client.holds[request.lease] = found.hold
    if request.counted:
        state.prefixes.count(request.keys, found.counts[0], request.block_bytes, now)
    return Matched(state.epoch, found.source, found.staged)


def match_parts(
    state: State, call: Call, requests: tuple[MatchRequest, ...], intent: Intent | None, now: float
) -> MatchedParts:
    """Lease the longest prefix that is ready in all parts. Each reader gets a lease on the blocks that it needs.

    requests: a request for each part and reader, each with its own lease. Parts with the same number of tokens in a
    block have the same number of keys. intent: if it has an id, the client will compute the blocks that are not leased,
    and other clients can wait for these blocks. If `intent.wait` is set, nothing is leased while other clients compute
    or write the next blocks. ValueError for bad requests.
    """
    client = on_call(state, call, now)
    keys = [key_array(request.keys) for request in requests]
    _check(requests, keys, intent)
    state.clients.end_all(client, [request.lease for request in requests])
    if intent:
        state.intents.end(call.client, intent.intent)
    if not requests or not all(is_block_size(request.block_bytes) for request in requests):
        return MatchedParts(state.epoch, ())
    prefix = _ready_prefix(state, requests, keys)
    if intent and intent.wait and (pending := _pending(state, call.client, requests, keys, prefix)):
        return MatchedParts(state.epoch, (), pending)
    tokens = _boundary(state, requests, keys, prefix)
    found: list[HeldPrefix] = []
    for request, part in zip(requests, keys, strict=True):
        blocks = _needed(request, tokens)
        held = _hold_prefix(state, call, request, part[blocks], requests[0].lease, now)
        found.append(held)
        if held.counts[0] < blocks.stop - blocks.start:  # no room to stage the rest
            tokens = _shortened(requests, held.counts[0] * request.tokens)
    watched = set()  # last keys of counted parts: ranks with the same last key read the same blocks
    for request, part, held in zip(requests, keys, found, strict=True):
        blocks = _needed(request, tokens)
        _cut(state, held, blocks.stop - blocks.start)
        if (last := request.keys[-KEY_BYTES:]) not in watched:
            watched.add(last)
            asked = part[blocks] if request.window and tokens else part[-request.window :]
            state.hit_curve.asked(asked, request.block_bytes, held.in_memory)
        _count_match(state, min(request.window or len(part), len(part)), held)
        if tokens:
            client.holds[request.lease] = held.hold
    first, n = requests[0], tokens // requests[0].tokens
    if n:
        state.prefixes.count(first.keys, n, sum(request.block_bytes for request in requests), now)
    if intent and intent.intent:
        state.intents.add(call, intent.intent, _next_keys(first.keys, n), now)
    if not tokens:
        return MatchedParts(state.epoch, ())
    starts = [_needed(request, tokens).start for request in requests]
    return MatchedParts(state.epoch, tuple(map(_matched_part, found, starts)))


def _ready_prefix(state: State, requests: tuple[MatchRequest, ...], keys: list[KeyArray]) -> int:
    """Return how many tokens are ready in all parts without a window. The `ahead` blocks must be ready too."""
    whole = _whole(requests, keys)
    limits = whole or zip(requests, keys, strict=True)
    tokens = min(_less_ahead(request, len(part)) for request, part in limits)
    for request, part in whole:
        wanted, reader = part[: -(-tokens // request.tokens) + request.ahead], state.nodes.get(request.node)
        ready = lookup.ready_prefix(state.c, wanted, np.empty(len(wanted), np.int64), _index_of(reader), False)
        tokens = min(tokens, _less_ahead(request, ready))
    return tokens


def _boundary(state: State, requests: tuple[MatchRequest, ...], keys: list[KeyArray], prefix: int) -> int:
    """Return the longest prefix, in tokens, from which all readers can continue. prefix: from `_ready_prefix`.

    A reader of a part with a window needs the last `window` blocks of the prefix, and the next `ahead` blocks.
    """
    if not any(request.window for request in requests):
        return _shortened(requests, prefix)
    step = lcm(*(request.tokens for request in requests))
    ends = np.arange(step, prefix + 1, step)
    for request, part in zip(requests, keys, strict=True):
        if request.window:
            wanted, longest = part[: prefix // request.tokens + request.ahead], request.window + request.ahead
            reader, (firsts, runs) = state.nodes.get(request.node), np.empty((2, len(wanted)), np.int64)
            lookup.ready_runs(state.c, wanted, firsts, _index_of(reader), longest, runs)
            ends = ends[ends <= (len(wanted) - request.ahead) * request.tokens]
            blocks = ends // request.tokens
            ends = ends[runs[blocks + request.ahead - 1] >= np.minimum(blocks, request.window) + request.ahead]
    return int(ends[-1]) if len(ends) else 0


def _pending(state: State, client: int, requests: tuple[MatchRequest, ...], keys: list[KeyArray], prefix: int) -> int:
    """Count the blocks of the first part that other clients will add to the ready prefix.

    These are blocks that other clients are writing or are about to compute. Intents name only keys of the first part,
    since a client computes all parts of a block together.
    """
    first, whole = requests[0], _whole(requests, keys)
    tokens = min((_less_ahead(request, len(part)) for request, part in whole), default=0)
    if prefix >= tokens:
        return 0
    covered = min(len(part) * request.tokens for request, part in whole)  # tokens that all parts have after all writes
    for request, part in whole:
        wanted = part[: -(-covered // request.tokens) + request.ahead]
        reader, firsts = state.nodes.get(request.node), np.empty(len(wanted), np.int64)
        written = lookup.ready_prefix(state.c, wanted, firsts, _index_of(reader), True)
        tokens, covered = min(tokens, _less_ahead(request, written)), min(covered, written * request.tokens)
    n = covered // first.tokens
    n += state.intents.leading(client, _next_keys(first.keys, n))
    ahead = max(request.ahead * request.tokens for request, _ in whole)
    return max(tokens, n * first.tokens - ahead) // first.tokens - prefix // first.tokens


def _hold_prefix(state: State, call: Call, request: MatchRequest, keys: KeyArray, group: int, now: float) -> HeldPrefix:
    """Hold the longest ready prefix of the keys for a reader. group: see Hold."""
    reader, stride = state.nodes.get(request.node), slot_bytes(request.block_bytes)
    size_class = state.allocator.size_class(reader, stride) if reader and reader.state == "alive" else -1
    host = _index_of(state.nodes.get(reader.host)) if reader and reader.on_gpu else -1
    firsts, *rows = [np.empty(len(keys), np.int64) for _ in range(5)]
    places = Places(*np.empty((2, len(keys)), LOCATION))
    node, limit = _index_of(reader), int(min(max(0, request.stage), len(keys)))
    tenant = state.quotas.number(request.tenant)
    size, long = int(request.block_bytes), state.long_blocks(request.block_bytes)
    asks = node, size_class, limit, host, size, tenant, long  # a Reader
    question = keys, firsts, asks, tuple(rows), tuple(places)
    counts = leases.match(state.c, *question, False)
    if counts[0] < 0 and reader:
        if state.allocator.provide_slots(reader, size_class, stride, -counts[0]):
            table.find(state.c, keys, firsts)  # again: a slab that was taken may have held some of the blocks
        counts = leases.match(state.c, *question, True)
    hold = Hold(
        call.seq,
        node,
        size_class,
        keys[: counts[0]].copy(),  # a view would keep the whole array in memory
        Blocks(*(rows if counts[0] == len(keys) else [row[: counts[0]].copy() for row in rows])),
        writes=False,
        group=group,
        since=now,
        used=now,
    )
    return HeldPrefix(reader, host, hold, places, counts)


def _cut(state: State, prefix: HeldPrefix, n: int) -> None:
    """Shorten a held prefix to n blocks."""
    if prefix.counts[0] == n:
        return
    state.clients.release([prefix.hold.cut(n)])
    nodes = prefix.places.locations["node"][:n].astype(np.int64)
    remote, external, promoted = nodes != prefix.hold.node, is_tier(nodes), nodes == prefix.host
    prefix.counts = n, int(remote.sum()), int(external.sum()), int(promoted.sum())


def _count_match(state: State, asked: int, prefix: HeldPrefix) -> None:
    n, remote, external, promoted = prefix.counts
    counters = state.counters
    counters["lookups"] += asked
    counters["hits"] += n
    counters["remote_hits"] += remote - external - promoted
    counters["external_hits"] += external
    counters["promoted"] += promoted
    counters["gpu_hits"] += n - remote if prefix.reader is not None and prefix.reader.on_gpu else 0


def next_window(state: State, call: Call, request: NextWindowRequest, now: float) -> Window:
    """Provide staging slots for some blocks of a lease. The lease's other blocks lose their slots.

    The lease may belong to another client.
    """
    on_call(state, call, now)
    owner, start = state.clients.get(request.owner), request.start
    hold = owner.holds.get(request.lease) if owner else None
    sound = hold is not None and 0 <= start <= request.stop and is_block_size(request.block_bytes)
    if hold is None or hold.writes or not sound:
        return Window(state.epoch, b"", b"")
    hold.used = now
    end = min(request.stop, len(hold.keys))
    passed, wanted, later = map(hold.blocks.part, (slice(start), slice(start, end), slice(end, None)))
    for other in (later, passed):
        given, gens = other.staged, other.staged_gens
        leases.release(state.c, given, gens, given[:0], gens[:0])
        given[given >= 0] = UNSTAGED
    moved = leases.pass_by(state.c, hold.keys[:start], tuple(passed), hold.node)
    _provide_staging(state, hold, wanted.staged, slot_bytes(request.block_bytes), now)
    waited = 0.0 if hold.waits is None else now - hold.waits
    begun = hold.waits_gen if waited < 2 * WAIT_S else state.size_classes.last_gen
    if waited >= WAIT_S and hold.gave_up < begun:
        chains.give_up(state.c, hold.keys, hold.node, begun)
        hold.gave_up = begun
    chained = request.may_wait and len(hold.keys) >= state.long_blocks(request.block_bytes)
    turn = _turn(state, int((wanted.staged == UNSTAGED).sum()), now) if chained else 0
    n, waits = leases.next_window(state.c, hold.keys[start:end], tuple(wanted), hold.node, hold.size_class, turn)
    if (wanted.staged >= 0).any():  # the reader can continue
        hold.held_up = hold.waits = None
    elif waits and hold.waits is None:
        hold.waits, hold.waits_gen = now, state.size_classes.last_gen
    if waits:
        state.waited_at = now
    window = wanted.part(slice(n))
    source = state.size_classes.describe(window.source, request.block_bytes)
    staged = state.size_classes.describe(window.staged, request.block_bytes)
    staged["node"][window.staged == UNSTAGED] = hold.node
    tell = moved or request.again
    where = state.size_classes.describe(passed.source, request.block_bytes).tobytes() if tell else b""
    return Window(state.epoch, source.tobytes(), staged.tobytes(), where)


def _turn(state: State, blocks: int, now: float) -> int:
    """Return how many blocks of a reader in a chain may get slots now. blocks: number of blocks without a slot."""
    return max(1, blocks // TURN if now - state.waited_at < AWAITED_S else blocks)


def _provide_staging(state: State, hold: Hold, staged: RowArray, stride: int, now: float) -> None:
    """Provide slabs for the blocks that the reader of a lease stages next.

    The reader waits while no slot of its window can be taken, as other leases probably hold the slots. After HELD_UP_S
    it gets the slots of the oldest primaries, as the other leases' readers may in turn wait for this reader. A leaving
    node keeps its primaries, which still have to be copied.
    """
    since, hold.held_up = hold.held_up, None
    lack = leases.staging_lack(state.c, hold.size_class, staged) if hold.size_class >= 0 else 0
    reader = next((node for node in state.nodes.values() if node.index == hold.node), None) if lack else None
    if reader is None or reader.size_classes.get(stride) != hold.size_class:
        return
    state.allocator.provide_slots(reader, hold.size_class, stride, lack)
    if state.size_classes.takeable(hold.size_class) or reader.leaving:
        return
    hold.held_up = now if since is None else since
    if now - hold.held_up >= HELD_UP_S:
        eviction.restore_window(state.c, hold.size_class, lack)


def locate_prefix(state: State, keys: bytes) -> Located:
    """Find the longest ready prefix of `keys`, and count its blocks on each node. Routers use these counts."""
    hosts = np.zeros(len(state.c.grid), np.int64)
    numbers: dict[str, int] = {}
    for node in state.nodes.values():
        if node.slabs:
            hosts[node.index & NODE_MASK] = numbers.setdefault(node.host, len(numbers))
    counts, last = np.zeros((2, len(numbers)), np.int64)
    blocks = lookup.locate_prefix(state.c, state.find(keys), hosts, counts, last)
    return Located(blocks, {name: int(counts[number]) for name, number in numbers.items() if counts[number]})


def stored(state: State, keys: bytes) -> Stored:
    """Return which keys are stored, in memory or in an external tier. Blocks on silent nodes count too."""
    if any(node.state == "joining" for node in state.nodes.values()):
        return Stored(state.epoch, b"")
    found = state.find(keys)
    lists.replace_by_stored(state.c, found)
    return Stored(state.epoch, found.astype(np.uint8).tobytes())


def _next_keys(keys: bytes, n: int) -> list[bytes]:
    """Return the keys from index n on, but at most KEYS_PER_CALL: other callers wait while these are looked up."""
    return split_keys(keys[n * KEY_BYTES : (n + KEYS_PER_CALL) * KEY_BYTES])


def _index_of(reader: Node | None) -> int:
    """Return the index of a reader's memory in locations; -1 if the reader's node is unknown or joining."""
    return reader.index if reader and reader.state != "joining" else -1


def _matched_part(found: HeldPrefix, first: int) -> MatchedPart:
    reader = found.reader
    nonce = reader.nonce if reader and found.hold.node >= 0 else b""
    return MatchedPart(found.hold.node, nonce, found.source, found.staged, first)


def _check(requests: tuple[MatchRequest, ...], keys: list[KeyArray], intent: Intent | None) -> None:
    """Raise ValueError for bad arguments of `match_parts`."""
    lengths = {(request.tokens, len(part)) for request, part in zip(requests, keys, strict=True)}
    if len(lengths) > len({tokens for tokens, _ in lengths}) or len({r.lease for r in requests}) < len(requests):
        raise ValueError(f"{len(requests)} parts: give equally many keys of each, and each a lease of its own")
    for request in requests:
        window, tokens, ahead = request.window, request.tokens, request.ahead
        if not (is_count(window) and is_count(tokens) and tokens and is_count(ahead)):
            raise ValueError(f"a window of {window!r} blocks of {tokens!r} tokens, {ahead!r} ahead: give counts")
        if not isinstance(request.tenant, str):
            raise ValueError(f"a tenant {request.tenant!r}: give its name")
    if intent and not isinstance(intent.intent, int):
        raise ValueError(f"an intent {intent.intent!r}: give an id")


def _whole(requests: tuple[MatchRequest, ...], keys: list[KeyArray]) -> list[tuple[MatchRequest, KeyArray]]:
    """Return the parts without a window: their readers need all blocks."""
    return [(request, part) for request, part in zip(requests, keys, strict=True) if not request.window]


def _less_ahead(request: MatchRequest, blocks: int) -> int:
    """Return the tokens of the usable prefix if `blocks` blocks are ready. The prefix ends `ahead` blocks earlier."""
    return max(0, blocks - request.ahead) * request.tokens


def _needed(request: MatchRequest, tokens: int) -> slice:
    """Return the slice of a part's blocks that a reader needs to continue after `tokens` tokens."""
    stop = tokens // request.tokens
    return slice(max(0, stop - request.window) if request.window else 0, stop)


def _shortened(requests: tuple[MatchRequest, ...], tokens: int) -> int:
    """Return the longest prefix of at most `tokens` tokens that ends with a whole block in every part.

    Returns 0 if a part has a window, since a shorter prefix needs other blocks of that part.
    """
    if any(request.window for request in requests):
        return 0
    return tokens - tokens % lcm(*(request.tokens for request in requests))
