"""What clients ask of the directory."""

from typing import NamedTuple

NOT_WRITTEN, WRITTEN, UNTOUCHED = range(3)  # what a writer did to a slot


class Call(NamedTuple):
    """The first argument of every call of a client."""

    client: int  # its random id
    seq: int  # rises with every call
    held: bytes = b""  # ids of the leases and reservations it still has; older ones that are not listed are released
    pulled: bytes = b""  # locations of staging slots that hold their block now
    corrupt: bytes = b""  # locations where a reader did not find the block, or found other bytes than its checksum says


class MatchRequest(NamedTuple):
    """Lease the longest prefix of `keys` that is ready. Answer: Matched.

    Several of them, in a tuple, are one question (`match_parts`) for blocks that have several parts, or several
    readers: what is leased is the longest prefix that all have. An Intent may go along. Answer: MatchedParts.

    A part with a window needs only its last blocks before the end of that prefix (layers that attend to a sliding
    window; a state needs one): the others may be gone, or were never stored.
    """

    lease: int  # id that the client has chosen
    node: str  # name of the memory that the client reads into
    keys: bytes
    block_bytes: int
    stage: int  # blocks that get staging slots at once, at most; the others get theirs with NextWindowRequest
    window: int = 0  # of `match_parts`: how many last blocks the reader needs; 0: all
    tokens: int = 1  # of `match_parts`: what a block of this part has; parts may differ
    tenant: str = ""  # who is charged for what is found
    counted: bool = True  # an engine looks it up: else it moves blocks, and is in no hit rate


class Intent(NamedTuple):
    """With several MatchRequests: the client computes the blocks that are not found, so others may wait for them."""

    intent: int  # id that the client has chosen, held as a lease is: until they are stored. 0: it stores none of them
    wait: bool  # where other clients compute or write the next blocks, lease nothing: see MatchedParts.pending


class NextWindowRequest(NamedTuple):
    """Staging slots for blocks [start, stop) of a lease; those of its other blocks are given back. Answer: Window."""

    owner: int  # the client whose lease it is: any process of its node may read by it
    lease: int
    start: int
    stop: int
    block_bytes: int
    again: bool = False  # an answer was lost, and with it maybe what `passed` said: say it again


class Matched(NamedTuple):
    """Where leased blocks are. Both arrays have one length."""

    epoch: int
    source: bytes  # locations to read
    # Locations on the reader's node to pull them into. slab_gen 0: the block is there already (node 0 too), or gets its
    # slot later. Empty if all are there already.
    staged: bytes
    # None: nobody follows requests. Else the client is to report this one (RequestLine), and it is why the match ends
    # before the last key: see `raykv.directory.calls.why_missing`; "" where it does not.
    short: str | None = None


class MatchedPart(NamedTuple):
    """Where the leased blocks of one part are. source, staged: as of Matched."""

    node: int  # what locations call the reader's memory; -1: it has none
    nonce: bytes  # of the reader's arena
    source: bytes
    staged: bytes
    first: int = 0  # which of the keys the first leased block is of; those before are outside the window


class MatchedParts(NamedTuple):
    """Answer to several MatchRequests at once. All parts end at the same token."""

    epoch: int
    parts: tuple[MatchedPart, ...]  # one a request; empty where nothing is leased
    pending: int = 0  # blocks after the ready ones that others compute or write. The client waits: nothing is leased
    short: str | None = None  # as of Matched


class Window(NamedTuple):
    """Where blocks of a lease are, once its reader has passed those before `start`.

    source and staged are as of Matched, of the blocks from `start` on that are there still: fewer than were asked for
    where a node is gone.
    """

    epoch: int
    source: bytes
    staged: bytes
    # Sources of all blocks before `start`, if some are read from another node from now on, or if asked for `again`.
    passed: bytes = b""


class ReserveRequest(NamedTuple):
    """Slots for what is missing of keys[start:]. keys[:start], their parents, are touched. Answer: Reserved."""

    reservation: int  # id that the client has chosen
    node: str  # name of the memory that the client writes to
    keys: bytes
    start: int
    block_bytes: int
    tenant: str = ""  # who is charged for the blocks


class Reserved(NamedTuple):
    """Slots that were granted. `indices`, `locations` and `staged` have one length."""

    epoch: int
    covered: int  # leading keys that are stored, being written or granted now; the next one found no room
    indices: bytes  # int32: which of the keys were granted a slot
    locations: bytes  # the slots
    staged: bytes  # locations on the writer's node to write into, where the slot is elsewhere (slab_gen 0: none)


class CommitRequest(NamedTuple):
    """Offer the blocks that were written. Ends the reservation. Idempotent. Answer: Counted (blocks that are offered).

    The Call must still list the reservation as held: what it does not list is released before anything else is done.
    """

    reservation: int
    locations: bytes  # slots that were granted
    keys: bytes
    written: bytes  # uint8: WRITTEN; NOT_WRITTEN where that failed and may go on; UNTOUCHED where nobody writes


class Counted(NamedTuple):
    """Answer to a call that changes blocks by their keys, and to `client_heartbeat` (done: 0)."""

    epoch: int
    done: int = 0  # keys or blocks for which it was done


class Stored(NamedTuple):
    """Answer to `stored`: which of some keys are stored, in memory or in an external tier, for who tells others of it.

    It is no client's call: nothing is touched, leased or counted.
    """

    epoch: int
    found: bytes  # uint8, 1 or 0 a key. Empty while a node joins, of which it is not known yet what it has
