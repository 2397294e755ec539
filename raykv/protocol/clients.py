"""The calls of clients to the directory: their messages."""

from typing import NamedTuple

NOT_WRITTEN, WRITTEN, UNTOUCHED = range(3)  # what a writer did to a slot


class Call(NamedTuple):
    """The first argument of every call of a client."""

    client: int  # its random id
    seq: int  # rises with every call
    held: bytes = b""  # ids of its leases, reservations and intents; earlier ids that are not listed end
    pulled: bytes = b""  # locations of staging slots that hold their block now
    corrupt: bytes = b""  # locations where a reader did not find the block, or where the checksum did not fit


class MatchRequest(NamedTuple):
    """Lease the longest ready prefix of `keys`. Answer: Matched.

    A tuple of MatchRequests is one question (`match_parts`), for blocks of several parts or for several readers. The
    directory leases the longest prefix that all parts have. The call may also carry an Intent. Answer: MatchedParts.

    A part with a window needs only its last blocks before the end of that prefix, as a sliding-window layer does. A
    model's state needs one block. Earlier blocks may be gone, or may never have been stored.

    `ahead` is for the layers of a drafter. A drafter's KV of the last token in a block depends on the next token too.
    The next token is in the following block, and only that block's key names the token. So the following block must be
    ready too.
    """

    lease: int  # id that the client has chosen
    node: str  # name of the memory that the client reads into
    keys: bytes
    block_bytes: int
    stage: int  # at most so many blocks get staging slots now; NextWindowRequest brings the others' slots
    window: int = 0  # for `match_parts`: how many last blocks the reader needs; 0: all
    tokens: int = 1  # for `match_parts`: tokens of a block of this part; parts may differ
    tenant: str = ""  # the tenant to charge for the found blocks
    counted: bool = True  # hit rates count the call: an engine looks blocks up; False: a client only moves blocks
    ahead: int = 0  # for `match_parts`: blocks after the prefix that must be ready too; they are not leased


class Intent(NamedTuple):
    """The client will compute the blocks that its MatchRequests do not find. So other clients may wait for them."""

    intent: int  # id that the client has chosen, held like a lease until the blocks are stored; 0: it will store none
    wait: bool  # where other clients compute or write the next blocks, lease nothing: see MatchedParts.pending


class NextWindowRequest(NamedTuple):
    """Ask for staging slots for blocks [start, stop) of a lease. Its other blocks lose their slots. Answer: Window."""

    owner: int  # the client that has the lease; any process of its node may read by it
    lease: int
    start: int
    stop: int
    block_bytes: int
    again: bool = False  # send `passed` again, as the earlier answer with `passed` may have been lost
    may_wait: bool = False  # the reader asks again, so it may get no slots while a copy arrives on another node


class Matched(NamedTuple):
    """Where leased blocks are. Both arrays have equal lengths."""

    epoch: int
    source: bytes  # locations to read
    # Locations on the reader's node to pull the blocks into. slab_gen 0: the block is on that node already (then node
    # is 0 too), or gets its slot later. Empty if all blocks are on that node already.
    staged: bytes
    # None: nobody follows requests. Else the client reports this request (RequestLine). The text says why the match
    # ended early (see `raykv.directory.calls.why_missing`); "" for a match of all keys.
    short: str | None = None


class MatchedPart(NamedTuple):
    """Where the leased blocks of one part are. source, staged: as in Matched."""

    node: int  # index of the reader's memory in locations; -1: the memory has no index
    nonce: bytes  # of the reader's arena
    source: bytes
    staged: bytes
    first: int = 0  # index in `keys` of the first leased block; earlier blocks are outside the window


class MatchedParts(NamedTuple):
    """The answer to several MatchRequests. All parts end at the same token, before their blocks ahead."""

    epoch: int
    parts: tuple[MatchedPart, ...]  # one for each request; empty where nothing is leased
    pending: int = 0  # how many blocks others will add to the prefix; above 0, nothing is leased
    short: str | None = None  # as in Matched


class Window(NamedTuple):
    """Where blocks of a lease are, once the reader has passed the blocks before `start`.

    source and staged are as in Matched, for the blocks from `start` on. Both end before the first block that no longer
    exists. source may name another copy than before: the client then reads that copy, since the directory holds this
    copy.
    """

    epoch: int
    source: bytes
    staged: bytes
    # Sources of all blocks before `start`. Empty, unless some sources are now on another node, or `again` is set.
    passed: bytes = b""


class ReserveRequest(NamedTuple):
    """Ask for slots for the missing keys of keys[start:]. Touches their parents, keys[:start]. Answer: Reserved."""

    reservation: int  # id that the client has chosen
    node: str  # name of the memory that the client writes to
    keys: bytes
    start: int
    block_bytes: int
    tenant: str = ""  # the tenant to charge for the blocks


class Reserved(NamedTuple):
    """Slots that were granted. `indices`, `locations` and `staged` have equal lengths."""

    epoch: int
    covered: int  # leading keys that are stored, being written or granted now; the next key found no room
    indices: bytes  # int32: which of the keys were granted a slot
    locations: bytes  # the slots
    staged: bytes  # locations on the writer's node to write into; slab_gen 0: write into the slot itself


class CommitRequest(NamedTuple):
    """Offer the blocks that were written, and end the reservation. Idempotent. Answer: Counted, of the offered blocks.

    The Call must still list the reservation as held: the directory releases unlisted reservations first.
    """

    reservation: int
    locations: bytes  # slots that were granted
    keys: bytes
    written: bytes  # uint8: WRITTEN; NOT_WRITTEN: the write failed and may still go on; UNTOUCHED: nobody writes there


class Counted(NamedTuple):
    """The answer to a call that changes blocks by their keys, and to `client_heartbeat` (done: 0)."""

    epoch: int
    done: int = 0  # number of keys or blocks that were changed


class Located(NamedTuple):
    """The answer to `locate_prefix`: which nodes have a prefix in memory or on their GPUs.

    The call touches, leases and counts nothing.
    """

    blocks: int  # of the longest ready prefix, in external tiers too
    nodes: dict[str, int]  # how many of these blocks each node has, by name. Leaves out nodes without such blocks


class Stored(NamedTuple):
    """The answer to `stored`: which keys are in memory or in an external tier.

    The call touches, leases and counts nothing.
    """

    epoch: int
    found: bytes  # uint8, 1 or 0 for each key. Empty while a node joins, as its blocks are not known yet
