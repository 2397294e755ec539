"""The oracle's readers: leases on the blocks of a prompt, and staging slots."""

from collections import Counter
from functools import partial
from itertools import takewhile
from math import lcm

from helpers.directory.oracle.membership import Membership
from helpers.directory.oracle.slots import (
    HOLDS_MAX,
    LOCATION,
    PRESENT,
    STORED,
    USES_MAX,
    Lease,
    Row,
    pack,
    split,
)
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

HELD_UP_S = 0.5
TURN, AWAITED_S, WAIT_S = 4, 0.1, 0.5


class Readers(Membership):
    """The part of the Oracle that leases blocks to readers."""

    def best(self, key: bytes, node: int) -> tuple[Row | None, Row | None]:
        """(copy to read, copy being staged on the node).

        The copy to read is the node's own, else the primary, else a replica, else a tier's. The node's own copy is read
        even if its store does not answer: the reader shares the node's memory.
        """
        copies = [r for r in self.table.get(key, ()) if r.holds < HOLDS_MAX]
        here = [r for r in copies if r.state in PRESENT and r.slab.node == node]
        if here:
            return here[0], None
        offered = [r for r in copies if r.slab.size_class.offered]
        present = [r for r in offered if r.state in PRESENT]
        primary = [r for r in present if r.state == "ready"]
        staging = [r for r in offered if r.state == "staging" and r.slab.node == node]
        external = [r for r in offered if r.state == "external"]
        source = primary[-1:] or present[:1] or external[-1:]
        return source[0] if source else None, staging[-1] if staging else None

    def match(self, call: Call, request: MatchRequest, now: float) -> Matched:
        client = self.on_call(call, now)
        self.end(client, request.lease)
        wanted = split(request.keys)
        hold = self.hold_prefix(call, request, wanted, request.lease, now)
        if request.counted:
            self.count_match(request, len(wanted), hold)
        if not hold.keys:
            return Matched(self.epoch, b"", b"")
        client.holds[request.lease] = hold
        return Matched(self.epoch, *self.where(hold, request.block_bytes))

    def match_parts(
        self, call: Call, requests: tuple[MatchRequest, ...], intent: Intent | None, now: float
    ) -> MatchedParts:
        """Lease the longest prefix of which each part has the blocks that its reader needs: all, or the last blocks."""
        client = self.on_call(call, now)
        self.release(*(client.holds.pop(r.lease) for r in requests if r.lease in client.holds))
        if intent:
            self.intents.end(call.client, intent.intent)
        wanted = [split(request.keys) for request in requests]
        whole = [(request, keys) for request, keys in zip(requests, wanted, strict=True) if not request.window]
        ready = min((self.behind(request, self.ready(request, keys)) for request, keys in whole), default=0)
        if intent and intent.wait and (pending := self.pending(call.client, requests, wanted, ready)):
            return MatchedParts(self.epoch, (), pending)
        tokens = self.longest(requests, wanted)
        holds = []
        for request, keys in zip(requests, wanted, strict=True):
            needed = self.needed(request, tokens)
            holds.append(self.hold_prefix(call, request, [keys[i] for i in needed], requests[0].lease, now))
            if (held := len(holds[-1].keys)) < len(needed):
                window = any(request.window for request in requests)
                step = lcm(*(request.tokens for request in requests))
                tokens = 0 if window else held * request.tokens // step * step
        parts = []
        for request, keys, hold in zip(requests, wanted, holds, strict=True):
            needed = self.needed(request, tokens)
            self.cut(hold, len(needed))
            self.count_match(request, min(request.window, len(keys)) if request.window else len(keys), hold)
            if tokens:
                client.holds[request.lease] = hold
                nonce = self.nodes[request.node].nonce if hold.node >= 0 else b""
                where = self.where(hold, request.block_bytes)
                parts.append(MatchedPart(hold.node, nonce, *where, needed.start))
        if intent and intent.intent:
            self.intents.add(call, intent, wanted[0][tokens // requests[0].tokens :], now)
        return MatchedParts(self.epoch, tuple(parts))

    def longest(self, requests: tuple[MatchRequest, ...], wanted: list[list[bytes]]) -> int:
        """The most tokens of a prefix that ends with a block in all parts, and whose needed blocks are all there."""
        step = lcm(*(request.tokens for request in requests))
        total = min(len(keys) * request.tokens for request, keys in zip(requests, wanted, strict=True))
        for tokens in range(total // step * step, 0, -step):
            if all(self.good(request, keys, tokens) for request, keys in zip(requests, wanted, strict=True)):
                return tokens
        return 0

    def good(self, request: MatchRequest, keys: list[bytes], tokens: int) -> bool:
        """Whether a part has the blocks that a prefix of `tokens` needs, and `ahead` blocks after it."""
        needed = self.needed(request, tokens)
        there = keys[needed.start : needed.stop + request.ahead]
        return len(keys) >= needed.stop + request.ahead and self.ready(request, there) == len(there)

    def behind(self, request: MatchRequest, blocks: int) -> int:
        """The tokens of a prefix that so many leading blocks allow: `ahead` of the blocks must follow the prefix."""
        return max(0, blocks - request.ahead) * request.tokens

    def needed(self, request: MatchRequest, tokens: int) -> range:
        stop = tokens // request.tokens
        return range(max(0, stop - request.window) if request.window else 0, stop)

    def ready(self, request: MatchRequest, wanted: list[bytes]) -> int:
        """How many leading keys can be read."""
        found = [self.best(key, self.index_of(request.node))[0] for key in wanted]
        return found.index(None) if None in found else len(found)

    def pending(self, client: int, requests: tuple[MatchRequest, ...], wanted: list[list[bytes]], ready: int) -> int:
        """How many blocks of the first part the prefix of `ready` tokens gains when others' blocks are done."""

        def comes(request: MatchRequest, key: bytes) -> bool:
            writing = any(row.state == "writing" for row in self.table.get(key, ()))
            return writing or self.ready(request, [key]) == 1

        whole = [(request, keys) for request, keys in zip(requests, wanted, strict=True) if not request.window]
        if not whole or ready >= min(self.behind(request, len(keys)) for request, keys in whole):
            return 0
        coming = [(r, sum(1 for _ in takewhile(partial(comes, r), keys))) for r, keys in whole]
        of = requests[0].tokens
        n = min(blocks * r.tokens for r, blocks in coming) // of
        while n < len(wanted[0]) and self.intents.owner(wanted[0][n]) not in (None, client):
            n += 1
        written = min(self.behind(r, blocks) for r, blocks in coming)
        computed = n * of - max(r.ahead * r.tokens for r, _ in whole)
        return max(written, computed) // of - ready // of

    def index_of(self, node: str) -> int:
        reader = self.nodes.get(node)
        return reader.index if reader and reader.state != "joining" else -1

    def cut(self, hold: Lease, n: int) -> None:
        for i in reversed(range(n, len(hold.keys))):
            self.end_read(hold.source[i])
            self.end_hold(hold.staged[i])
        del hold.keys[n:], hold.source[n:], hold.staged[n:]
        hold.unstaged = {i for i in hold.unstaged if i < n}

    def hold_prefix(self, call: Call, request: MatchRequest, wanted: list[bytes], group: int, now: float) -> Lease:
        """Hold the longest prefix that is ready, and stage its blocks of other nodes."""
        node, block_bytes, stage = request.node, request.block_bytes, request.stage
        stride = -(-block_bytes // 4096) * 4096
        reader = self.nodes.get(node)
        # a store that does not answer pulls nothing
        size_class = self.size_class(reader, stride) if reader and reader.state == "alive" else None
        if reader and size_class:
            left = size_class.window - len(size_class.of("staging"))
            need = min(self.unstaged(wanted, reader.index), left, stage)
            if need > 0:
                self.provide_slots(reader, size_class, need)
        here = self.index_of(node)
        hold = Lease(call.seq, False, here, size_class, [], [], [], set(), group, now)
        for key in wanted:
            row, staging = self.best(key, here)
            if row is None:
                break
            if row.slab.node != here and not staging:
                hold.unstaged.add(len(hold.keys))
            for copy in self.table[key]:
                copy.uses = min(USES_MAX, copy.uses + 1)
            hold.keys.append(key)
            hold.source.append(self.hold(row))
            self.claim(key, self.name_of(request.tenant))
            hold.staged.append(self.hold(staging) if staging else None)
        remote = sum(item is not None and item[0].slab.node != here for item in hold.source)
        if remote > stage and self.is_long(hold, block_bytes) and hold.unstaged and hold.size_class:
            first = min(hold.unstaged)
            if hold.size_class.stays and self.crowded(hold.source[first]) and self.elsewhere(hold.keys[first], here)[1]:
                stage = 0  # it streams, and is given slots in its turn
        covered = self.cover(hold, stage)
        behind = range(covered, len(hold.keys))
        if size_class and behind and self.read_elsewhere(hold, behind):
            covered = self.cover(hold, stage)
        if not size_class:  # the reader has no memory to pull into
            for i in reversed(range(covered, len(hold.keys))):
                self.end_hold(hold.source[i])
                self.end_hold(hold.staged[i])
            del hold.keys[covered:], hold.source[covered:], hold.staged[covered:]
            hold.unstaged.clear()
        return hold

    def where(self, hold: Lease, block_bytes: int) -> tuple[bytes, bytes]:
        """(locations of a lease's blocks, locations of their staging slots if some blocks are on other nodes)."""
        remote = any(item is not None and item[0].slab.node != hold.node for item in hold.source)
        return pack(hold.source, block_bytes), self.pack_staged(hold, slice(None), block_bytes) if remote else b""

    def count_match(self, request: MatchRequest, asked: int, hold: Lease) -> None:
        reader = self.nodes.get(request.node)
        remote = sum(item is not None and item[0].slab.node != hold.node for item in hold.source)
        self.counters["lookups"] += asked
        self.counters["hits"] += len(hold.keys)
        external = sum(item is not None and item[0].state == "external" for item in hold.source)
        host = self.nodes.get(reader.host) if reader and reader.on_gpu else None
        promoted = sum(host is not None and row.slab.node == host.index for row, _ in filter(None, hold.source))
        self.counters["remote_hits"] += remote - external - promoted
        self.counters["external_hits"] += external
        self.counters["promoted"] += promoted
        if reader and reader.on_gpu:
            self.counters["gpu_hits"] += len(hold.keys) - remote

    def pack_staged(self, hold: Lease, of: slice, block_bytes: int) -> bytes:
        """Locations of staging slots. A block without a slot gets a location with only the node."""
        without = LOCATION.pack(hold.node, 0, 0, 0, 0, 0)
        numbers = range(*of.indices(len(hold.staged)))
        return b"".join(without if i in hold.unstaged else pack([hold.staged[i]], block_bytes) for i in numbers)

    def unstaged(self, wanted: list[bytes], node: int) -> int:
        count = 0
        for key in wanted:
            row, staging = self.best(key, node)
            if row is None:
                break
            count += row.slab.node != node and staging is None
        return count

    def crowded(self, item: tuple[Row, int] | None) -> bool:
        """Whether a copy in memory has a further holder."""
        return item is not None and item[0].holds > 1 and item[0].state != "external"

    def elsewhere(self, key: bytes, node: int) -> tuple[Row | None, bool]:
        """(the newest copy in another node's memory that can be read, whether another node stages one)."""
        copies = [r for r in self.table.get(key, ()) if r.slab.node != node and r.slab.size_class.stays]
        present = [r for r in copies if r.state in PRESENT and r.holds < HOLDS_MAX]
        return present[-1] if present else None, any(r.state == "staging" and not r.given_up for r in copies)

    def is_long(self, hold: Lease, block_bytes: int) -> bool:
        return len(hold.keys) * block_bytes >= self.long_bytes

    def read_elsewhere(self, hold: Lease, blocks: range, everywhere: bool = False) -> bool:
        """Read from primaries instead of the node's own replicas, and release those: they may use up the window.

        everywhere: instead of other nodes' replicas too.
        """
        moved = False
        for i in reversed(blocks):
            item = hold.source[i]
            if item is None or item[0].state != "replica" or not (everywhere or item[0].slab.node == hold.node):
                continue
            copies = self.table[hold.keys[i]]
            primaries = [r for r in copies if r.state == "ready" and r.holds < HOLDS_MAX and r.slab.size_class.offered]
            if primaries and primaries[0].slab.node != hold.node:
                hold.source[i] = self.hold(primaries[0])
                self.end_hold(item)
                hold.unstaged.add(i)
                moved = True
        return moved

    def cover(self, hold: Lease, stage: int) -> int:
        """Give unstaged blocks slots, in order, until `stage` blocks have a slot or the window is used up.

        Returns how many leading blocks can be read now.
        """
        while hold.unstaged:
            i = min(hold.unstaged)
            has = sum(item is not None for item in hold.staged[:i])
            if has >= stage or not self.stage_next(hold, i, len(hold.keys)):
                self.give_back(hold, range(i + 1, len(hold.keys)))
                return i
        return len(hold.keys)

    def stage_next(self, hold: Lease, i: int, stop: int) -> bool:
        """Give block i a staging slot, if need be the slot of a later block. Returns whether block i has a slot."""
        item = self.stage(hold.size_class, hold.keys[i])
        if item is None and self.give_back(hold, range(i + 1, stop)):
            item = self.stage(hold.size_class, hold.keys[i])
        if item is not None:
            hold.staged[i] = item
            hold.unstaged.remove(i)
        return item is not None

    def give_back(self, hold: Lease, blocks: range) -> bool:
        """Release the blocks' staging slots, last to first. Returns whether there were any."""
        had = False
        for i in reversed(blocks):
            if (item := hold.staged[i]) and item[0].state != "closed":  # closed: the reader's node is gone
                self.end_hold(item)
                hold.staged[i], had = None, True
                hold.unstaged.add(i)
        return had

    def next_window(self, call: Call, request: NextWindowRequest, now: float) -> Window:
        owner, lease, start, stop, block_bytes, again, may_wait = request
        self.on_call(call, now)
        hold = self.clients[owner].holds.get(lease) if owner in self.clients else None
        if hold is None or hold.writes or not 0 <= start <= stop:
            return Window(self.epoch, b"", b"")
        hold.used = now
        stop = min(stop, len(hold.keys))
        for i in (*reversed(range(stop, len(hold.keys))), *reversed(range(min(start, len(hold.keys))))):
            if held := hold.staged[i]:
                self.end_read(held)
                hold.staged[i] = None
                if held[0].state != "closed":  # closed: the reader's node is gone
                    hold.unstaged.add(i)
        for i, item in enumerate(hold.source[:start]):
            if item is None or item[0].gen != item[1] or item[0].state == "closed":
                hold.source[i] = None
        passed = self.read_elsewhere(hold, range(min(start, len(hold.keys))), everywhere=True)
        self.provide_staging(hold, sum(start <= i < stop for i in hold.unstaged), now)
        waited = 0.0 if hold.waits is None else now - hold.waits
        if waited >= WAIT_S:
            begun = hold.waits_gen if waited < 2 * WAIT_S else self.last_gen()
            for copy in (copy for key in hold.keys for copy in self.table.get(key, ())):
                copy.given_up |= copy.slab.node != hold.node and copy.gen <= begun
        asked = sum(start <= i < stop for i in hold.unstaged)
        piece = asked // TURN if now - self.waited_at < AWAITED_S else asked
        chained = may_wait and self.is_long(hold, block_bytes)
        chained = chained and hold.size_class is not None and hold.size_class.stays
        end, full, waits, granted = start, False, False, 0
        while end < stop:
            item = hold.source[end]
            held = hold.staged[end]
            pulls = end in hold.unstaged or (held and held[0].state != "closed")  # closed: the reader's node is gone
            if (item is None or item[0].gen != item[1]) and pulls:
                newest, _ = self.elsewhere(hold.keys[end], hold.node)
                item = hold.source[end] = self.hold(newest) if newest else item
            if item is None or item[0].gen != item[1] or item[0].state not in STORED:
                break
            if end not in hold.unstaged:
                if held[0].gen != held[1] if held else item[0].slab.node != hold.node:
                    break
                end += 1
                continue
            if not full:
                row, staging = self.best(hold.keys[end], hold.node)
                there = row if row and row.slab.node == hold.node else staging
                if there:
                    hold.staged[end] = self.hold(there)
                    hold.unstaged.remove(end)
                elif chained and self.crowded(item):
                    newest, waits = self.elsewhere(hold.keys[end], hold.node)
                    if waits or granted == max(1, piece):
                        full = True
                        self.give_back(hold, range(end + 1, stop))
                    else:
                        full = not self.stage_next(hold, end, stop)
                        granted += 1
                        if not full and newest and newest is not item[0]:
                            hold.source[end] = self.hold(newest)
                            self.end_hold(item)
                else:
                    full = not self.stage_next(hold, end, stop)
            end += 1
        if any(hold.staged[start:stop]):
            hold.held_up = hold.waits = None
        elif waits and hold.waits is None:
            hold.waits, hold.waits_gen = now, self.last_gen()
        if waits:
            self.waited_at = now
        slots = self.pack_staged(hold, slice(start, end), block_bytes)
        where = pack(hold.source[:start], block_bytes) if passed or again else b""
        return Window(self.epoch, pack(hold.source[start:end], block_bytes), slots, where)

    def provide_staging(self, hold: Lease, unstaged: int, now: float) -> None:
        """Give a lease's reader slabs for its next window. A reader that waits too long takes primaries' slots."""
        since, hold.held_up = hold.held_up, None
        reader = next((node for node in self.nodes.values() if node.index == hold.node), None)
        if reader and hold.size_class and hold.size_class in reader.size_classes.values():
            need = min(unstaged, hold.size_class.window - len(hold.size_class.of("staging")))
            if need <= 0 or self.takeable(hold.size_class) >= need:
                return
            self.provide_slots(reader, hold.size_class, need)
            if not self.takeable(hold.size_class) and not reader.leaving:
                hold.held_up = now if since is None else since
                if now - hold.held_up >= HELD_UP_S:
                    self.restore_window(hold.size_class, need)

    def locate_prefix(self, keys: bytes) -> Located:
        counts: Counter[str] = Counter()
        hosts = {node.index: node.host for node in self.nodes.values()}
        blocks = 0
        for key in split(keys):
            copies = [r for r in self.table.get(key, ()) if r.state in STORED and r.slab.size_class.offered]
            if not copies:
                break
            blocks += 1
            counts.update({hosts[row.slab.node] for row in copies if row.state != "external"})
        return Located(blocks, counts)

    def stored(self, keys: bytes) -> Stored:
        if any(node.state == "joining" for node in self.nodes.values()):
            return Stored(self.epoch, b"")
        found = (any(row.state in STORED for row in self.table.get(key, ())) for key in split(keys))
        return Stored(self.epoch, bytes(found))
