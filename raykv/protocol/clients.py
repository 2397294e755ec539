"""Messages of clients' calls to the directory."""

from typing import NamedTuple

NOT_WRITTEN, WRITTEN, UNTOUCHED = range(3)  # what a writer did to a slot


class Call(NamedTuple):
    """The first argument of every call of a client."""

    client: int  # the client's id, a random number
    seq: int  # rises with every call
    held: bytes = b""  # ids of what the client holds; its other leases, reservations and intents from earlier calls end
    pulled: bytes = b""  # locations of staging slots that now hold their blocks
    corrupt: bytes = b""  # locations where a reader did not find the block, or where the checksum did not match


class MatchRequest(NamedTuple):
    """Lease the longest ready prefix of `keys`. Answer: Matched.

    A tuple of MatchRequests is one call (`match_parts`), for blocks of several parts of a model or for several readers.
    The directory leases the longest prefix that all parts have. The call may also carry an Intent. Answer:
    MatchedParts.

    A part with a window, such as a sliding-window layer, needs only its last blocks before the end of that prefix. A
    model's state needs one block. Earlier blocks may be gone, or may never have been stored.

    `ahead` is for the layers of a drafter. A drafter's KV of the last token in a block also depends on the next token.
    This token is in the following block, and only that block's key covers it. Therefore the following block must be
    ready too.
    """

    lease: int  # id that the client has chosen
    node: str  # name of the memory that the client reads into
    keys: bytes
    block_bytes: int
    stage: int  # maximum blocks that get staging slots now; a NextWindowRequest requests slots for later blocks
    window: int = 0  # for `match_parts`: number of the last blocks that the reader needs; 0: all
    tokens: int = 1  # for `match_parts`: number of tokens in a block of this part; parts may differ
    tenant: str = ""  # the tenant to charge for the found blocks
    counted: bool = True  # whether hit rates count the call; False if raykv itself only moves blocks
    ahead: int = 0  # for `match_parts`: number of blocks after the prefix that must be ready too, but are not leased


class Intent(NamedTuple):
    """A client will compute the blocks that its MatchRequests do not find. Other clients may wait for these blocks."""

    intent: int  # id chosen by the client, held like a lease until the blocks are stored; 0: the client only waits
    wait: bool  # whether to lease nothing if other clients compute or write the next blocks: see MatchedParts.pending


class NextWindowRequest(NamedTuple):
    """Request staging slots for blocks [start, stop) of a lease. Its other blocks lose their slots. Answer: Window."""

    owner: int  # id of the client that has the lease; any process of the reader's node may read under the lease
    lease: int
    start: int
    stop: int
    block_bytes: int
    again: bool = False  # whether to send `passed` again, as the earlier answer with `passed` may have been lost
    may_wait: bool = False  # whether the answer may lack slots while another node pulls a copy: the reader asks again


class Matched(NamedTuple):
    """Locations of leased blocks. `source` and `staged` have equal lengths, unless `staged` is empty."""

    epoch: int
    source: bytes  # locations to read from
    # Locations on the reader's node to pull the blocks into. slab_gen 0: the block is on that node already (then `node`
    # is 0 too), or gets its slot later. Empty if all blocks are on that node already.
    staged: bytes
    # None: nobody follows requests. Otherwise the client reports this request (RequestLine), and the text says why the
    # match ended early (see `raykv.directory.calls.why_missing`); "" for a match of all keys.
    short: str | None = None


class MatchedPart(NamedTuple):
    """Locations of the leased blocks of one part. source, staged: as in Matched."""

    node: int  # index of the reader's memory in locations; -1: the memory has no index
    nonce: bytes  # nonce of the reader's arena
    source: bytes
    staged: bytes
    first: int = 0  # index in `keys` of the first leased block; earlier blocks are outside the window


class MatchedParts(NamedTuple):
    """The answer to several MatchRequests. The leased blocks of all parts end at the same token."""

    epoch: int
    parts: tuple[MatchedPart, ...]  # one part for each request; empty if nothing is leased
    pending: int = 0  # number of blocks that others will add to the prefix; above 0, nothing is leased
    short: str | None = None  # as in Matched


class Window(NamedTuple):
    """Locations of a lease's blocks, after the reader has passed the blocks before `start`.

    source and staged are as in Matched, for the blocks from `start` on. Both end before the first block that no longer
    exists. source may name another copy than before. The client must then read the new copy, as the lease protects only
    this copy from eviction.
    """

    epoch: int
    source: bytes
    staged: bytes
    # Sources of all blocks before `start`, if some of these sources are now on another node, or if `again` is set.
    passed: bytes = b""


class ReserveRequest(NamedTuple):
    """Request slots for the missing keys of keys[start:], and mark keys[:start], their parents, as used.

    Answer: Reserved.
    """

    reservation: int  # id that the client has chosen
    node: str  # name of the memory that the client writes to
    keys: bytes
    start: int
    block_bytes: int
    tenant: str = ""  # the tenant to charge for the blocks


class Reserved(NamedTuple):
    """Slots that were granted. `indices`, `locations` and `staged` have equal lengths."""

    epoch: int
    covered: int  # number of leading keys that are stored, being written or granted now; the next key found no room
    indices: bytes  # int32: indices of the keys that were granted a slot
    locations: bytes  # the slots
    staged: bytes  # locations on the writer's node to write into; slab_gen 0: write into the slot itself


class CommitRequest(NamedTuple):
    """Offer the written blocks, and end the reservation. Idempotent. Answer: Counted, the number of offered blocks.

    The Call must still list the reservation as held: the directory releases unlisted reservations first.
    """

    reservation: int
    locations: bytes  # slots that were granted
    keys: bytes
    written: bytes  # uint8: WRITTEN; NOT_WRITTEN: the write failed and may still run; UNTOUCHED: nobody writes there


class Counted(NamedTuple):
    """The answer to a call that changes blocks by their keys, and to `client_heartbeat` (done: 0)."""

    epoch: int
    done: int = 0  # number of keys or blocks that were changed


class Located(NamedTuple):
    """The answer to `locate_prefix`: which nodes have a prefix in memory or on their GPUs.

    The call leases and counts nothing, and marks no block as used.
    """

    blocks: int  # length of the longest ready prefix, including blocks in external tiers
    nodes: dict[str, int]  # number of these blocks on each node, by name; only nodes with such blocks


class Stored(NamedTuple):
    """The answer to `stored`: which keys are in memory or in an external tier.

    The call leases and counts nothing, and marks no block as used.
    """

    epoch: int
    found: bytes  # uint8, 1 or 0 for each key. Empty while a node joins, as its blocks are not known yet
