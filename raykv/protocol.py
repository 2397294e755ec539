"""Every message between clients, node stores and the directory, and what they are made of.

A message is a NamedTuple whose fields are documented at its class. Arrays travel as bytes, which is copied fastest.
Messages travel as plain tuples (`tuple(message)`; the receiver makes the class again): over the directory's socket as
msgpack (`packed`, `unpacked`), and through Ray, for which pickling a class would cost more than all other arguments.

A field that is `bytes` holds, little-endian and contiguous:

- locations, source, target, staged, sweep: LOCATION records (see below);
- keys: 16 bytes a key;
- ids, held: uint64; counts and generations of an array: uint64; indices: int32.

Both sides of every message must have the same VERSION. `raykv.internal_kv.settings` checks it for whoever joins a pool.
"""

import time
from numbers import Integral
from typing import Any, NamedTuple, overload

import msgpack
import numpy as np
from numpy.typing import NDArray

VERSION = 17  # of all messages here, of a header and of a superblock; raise it with every change of any of them

LOCATION = np.dtype(
    [
        ("node", "<u4"),  # the directory's index of the node, never reused; odd: of an external tier (see is_tier)
        ("slab", "<u4"),  # slab of that node's arena
        ("slot", "<u4"),  # slot of that slab
        ("bytes", "<u4"),  # block_bytes; a slot is that, rounded up to ALIGN
        ("slab_gen", "<u8"),  # generation of the slab's format; 0: there is no such block
        ("gen", "<u8"),  # generation of the block, or of a writer's grant
    ]
)
KEY_BYTES = 16
ALIGN = 4096  # payload alignment, and so the smallest slot, in bytes
CONTENT_BYTES = 8  # name of a tier's content since it was last cleared; nothing from before is read again
COUNTER_BITS = 40  # a generation is epoch << COUNTER_BITS | counter
EPOCHS = 1 << 21  # no epoch is as high: a header keeps a generation and two bits more in 8 bytes
GENERATIONS = EPOCHS << COUNTER_BITS  # no generation is as high
SLABS_MAX = 1 << 20  # of one arena or tier: what is counted by somebody else is not to fill a memory
SLAB_BYTES_MAX = 1 << 30  # of an arena
FAILED, PULLED, ALTERED = range(3)  # verdicts: what became of a block that was to cross nodes
STILL_WRITTEN, FREED, FINISHED = range(3)  # verdicts of a sweep
NOT_WRITTEN, WRITTEN, UNTOUCHED = range(3)  # what a writer did to a slot


@overload
def is_tier(index: int) -> bool: ...
@overload
def is_tier(index: NDArray[Any]) -> NDArray[np.bool_]: ...
def is_tier(index: int | NDArray[Any]) -> bool | NDArray[np.bool_]:
    """Whether a node's index in a location is an external tier's: those are odd, nodes' are even.

    index: an int, or a numpy array of them (then the answer is a bool array).
    """
    return index & 1 == 1


def host_of(name: str) -> str:
    """Ray node id of a node, or of a node's GPU, whose name is that with "/" and its UUID."""
    return name.partition("/")[0]


def is_block_size(block_bytes: int) -> bool:
    """Whether a block can have so many bytes."""
    return isinstance(block_bytes, Integral) and 0 < block_bytes <= SLAB_BYTES_MAX


def is_count(number: object) -> bool:
    """Whether this can be a number of blocks or tokens."""
    return isinstance(number, int) and 0 <= number < 1 << 31


def slot_bytes(block_bytes: int) -> int:
    """Bytes of the slot that holds a block of `block_bytes`."""
    return -(-block_bytes // ALIGN) * ALIGN


def epoch_of(generation: int) -> int:
    """The directory epoch a generation was granted in."""
    return generation >> COUNTER_BITS


def seconds_left(end: float) -> float:
    """Seconds until the time `end` (time.monotonic()); never 0, which some calls take for no deadline."""
    return max(0.001, end - time.monotonic())


# the longest: an array gets its memory before its parts are there. A dict has nodes, by their index
LIMITS = {"max_array_len": 1 << 12, "max_map_len": 1 << 16, "max_ext_len": 0}


def packed(message: Any) -> bytes:
    """A message as it crosses a socket: of None, bool, int, str, bytes, tuples and dicts. Else raises TypeError."""
    data: bytes = msgpack.packb(message)
    return data


def unpacked(data: bytes) -> Any:
    """The message, of tuples, that `packed` made into bytes. Raises ValueError if it is none."""
    try:
        return msgpack.unpackb(data, use_list=False, strict_map_key=False, **LIMITS)
    except (msgpack.UnpackException, TypeError) as error:  # TypeError: a key of a dict that can't be hashed
        raise ValueError(f"{len(data)} bytes are no message: {error!r}") from error


def data_deadline(size: int) -> float:
    """Seconds that a transfer of `size` bytes may take: 100 MB/s of a slow link, and 2 s for a busy machine."""
    return 2.0 + size / 100e6


# ---------------------------------------------------------------------- client -> directory


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
    # before the last key: see `raykv.directory.why_missing`; "" where it does not.
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


class RequestLine(NamedTuple):
    """A request that is done, as its client reports it while somebody follows requests. It travels as bytes.

    kind: "request", of a look-up and its reads; "match", of a look-up whose blocks another process reads; "read", of
    what that process read. Times of what was not done here are -1. Counts are of tokens.
    """

    kind: str
    id: str  # of the lease: a match and its read have the same
    request: str  # the engine's own name of it; "" where it has none
    at_ms: int  # when it was done, Unix time
    node: str  # Ray node id of the client
    pid: int
    model: str
    tenant: str
    asked: int
    hit: int
    memory: int  # of the hit: on the client's node
    other: int  # on other nodes
    external: int  # in an external tier
    read: int
    size: int  # bytes that were read
    lookup_us: int
    pull_us: int  # waited for what came from elsewhere
    copy_us: int
    short: str  # why less was hit than asked, or read than hit; "" where neither is so
    about: int  # index of the node that `short` is about; -1: none

    def packed(self) -> bytes:
        """As it travels; longer texts are cut."""
        return packed(tuple(part[:LINE_TEXT] if isinstance(part, str) else part for part in self))

    @classmethod
    def unpacked(cls, data: bytes) -> "RequestLine":
        """Of `packed` bytes that another process sent. Texts get printable. ValueError for anything else."""
        parts = unpacked(data)
        if not isinstance(parts, tuple) or [type(part).__name__ for part in parts] != LINE_TYPES:
            raise ValueError(f"{len(data)} bytes are no line of a request")
        return cls._make("".join(filter(str.isprintable, part)) if isinstance(part, str) else part for part in parts)


LINE_TEXT = 160  # characters of a text, at most
LINE_BYTES = 4096  # of a line, at most
LINE_TYPES = [kind.__name__ for kind in RequestLine.__annotations__.values()]


class Followed(NamedTuple):
    """Answer to `follow`: lines of requests that are new since the cursor."""

    cursor: tuple[int, int, int]  # for the next call; (0, 0, 0) asks for none yet
    lines: tuple[bytes, ...]  # RequestLine.packed
    left_out: int  # requests since the cursor that are not among them
    names: dict[int, str]  # of nodes, by the index that locations carry


# ---------------------------------------------------------------------- node store -> directory


class ArenaDescription(NamedTuple):
    """An arena as it joins. Answer: Joined."""

    nonce: bytes  # 16 bytes, in its superblock
    slab_bytes: int
    slab_count: int  # slabs that it is to have
    epoch: int  # the newest directory epoch that it has heard of


class Joined(NamedTuple):
    """Answer to `join`."""

    node: int  # what locations call it
    epoch: int  # to stamp on the arena


class SlabReport(NamedTuple):
    """The slabs of a node's memory; with every `adopt` and `heartbeat`."""

    offered: int  # slabs that were allocated so far, with those that were given back since
    limit: int  # slabs that there are to be
    given_back: bytes  # int32: slabs whose memory was, or is about to be, given back


class SlabTarget(NamedTuple):
    """Answer to `set_slab_target`: slabs to give back."""

    generation: int  # grants in them are of older generations
    numbers: bytes  # int32


class Inventory(NamedTuple):
    """A piece of what a node store found in its arena, the youngest blocks first. The first four have one length."""

    locations: bytes  # of ready blocks
    keys: bytes
    positions: bytes  # uint32: of each block in its chain
    stamps: bytes  # uint32: of its last read, seconds
    writing: bytes  # locations of slots that somebody still writes; in the last piece
    left: int = 0  # older blocks, in the pieces that follow; the directory offers all once there are none
    node: int = -1  # index that `join` gave; a piece of another is too late, and left out. -1: of whatever it is now


class Heartbeat(NamedTuple):
    """Answer to `heartbeat` of a node that the directory knows."""

    epoch: int
    floor: int  # generation up to which all blocks were cleared
    sweep: bytes  # locations of quarantined slots: is their write lock free?


class SweepResult(NamedTuple):
    """What a store found in quarantined slots. All have one length."""

    locations: bytes
    verdicts: bytes  # uint8: STILL_WRITTEN, FREED, or FINISHED as `keys` and `generations` say
    keys: bytes
    generations: bytes  # uint64


# ---------------------------------------------------------------------- external tiers


class TierReport(NamedTuple):
    """The state of a node's external tier. Answer: TierReply, or None where the node must `join` first."""

    capacity: int  # bytes
    shared: bool  # all nodes see one content
    reached: bool
    lost: bytes  # where its content is gone: the name of what is there now, equal from every store of a shared tier


class TierReply(NamedTuple):
    """Answer to `tier_heartbeat`."""

    tier: int  # what locations call it
    list_it: bool  # the store must list what lies there, by `report_existing`


class ExistingBlocks(NamedTuple):
    """What lies in a tier from before, oldest first."""

    keys: bytes
    sizes: bytes  # int64: block_bytes
    last: bool  # there is no more


class DemotionReport(NamedTuple):
    """What became of earlier Demotions, and what is asked for next. Answer: Demotions."""

    locations: bytes  # targets; of one length with keys and stored
    keys: bytes
    stored: bytes  # uint8: 1 where the block lies in the tier now
    seen: int  # `number` of the last answer whose deletions were carried out
    whole: bool  # demote everything


class Demotions(NamedTuple):
    """Blocks of a node's memory to copy to its external tier. The first three have one length."""

    source: bytes  # locations in memory; `bytes` is the slot's size, the header has the block's
    keys: bytes
    target: bytes  # locations in the tier; `bytes` is 0
    to_delete: bytes  # keys to delete in the tier
    number: int  # of this answer; 0: the directory does not serve the tier yet


class GpuDemotionReport(NamedTuple):
    """What became of earlier GpuDemotions. Both have one length. Answer: GpuDemotions."""

    locations: bytes  # targets
    stored: bytes  # uint8


class GpuDemotions(NamedTuple):
    """Blocks of a GPU to copy to its node's memory. All have one length."""

    source: bytes  # locations on the GPU; `bytes` is the slot's size, the header has the block's
    keys: bytes
    target: bytes  # locations in the node's memory; `bytes` is 0


# ---------------------------------------------------------------------- nodes that leave


class SoleCopies(NamedTuple):
    """Blocks that would be lost with a node, youngest first; at most SOLE_COPIES_PER_CALL of each size."""

    locations: bytes  # `bytes` is the slot's size
    keys: bytes
    total: int  # of all of them, with those that are being written


# ---------------------------------------------------------------------- client -> node store, store -> store


class StoreDescription(NamedTuple):
    """What a client maps: the arena of a node, or of one of its GPUs."""

    name: str  # what the directory calls the memory
    path: str
    nonce: bytes
    node: int  # what locations call it
    handle: bytes  # CUDA IPC handle; empty for host memory


class Transfer(NamedTuple):
    """Blocks to fetch into granted slots. All have one length. Answer: uint8 verdicts FAILED, PULLED or ALTERED."""

    source: bytes  # locations
    keys: bytes
    target: bytes  # locations

    def arrays(self) -> tuple[NDArray[np.void], NDArray[np.uint8], NDArray[np.void]]:
        """source (n,) LOCATION, keys (n, 16) and target (n,) LOCATION. ValueError unless all blocks are of one size."""
        source, target = np.frombuffer(self.source, LOCATION), np.frombuffer(self.target, LOCATION)
        keys = np.frombuffer(self.keys, np.uint8).reshape(-1, KEY_BYTES)
        if not len(source) == len(keys) == len(target):
            raise ValueError(f"{len(source)} sources, {len(keys)} keys and {len(target)} targets: give one of each")
        sizes = np.unique([source["bytes"], target["bytes"]]).tolist()
        if len(source) and (len(sizes) > 1 or not 0 < sizes[0] <= SLAB_BYTES_MAX):
            raise ValueError(f"blocks of {', '.join(map(str, sizes))} bytes: give all of one size that a slab holds")
        return source, keys, target


def verdicts_of(answer: bytes, count: int) -> NDArray[np.uint8]:
    """(count,) uint8 verdicts that another process gave. What is none of FAILED, PULLED and ALTERED is FAILED.

    ValueError unless there are as many.
    """
    verdicts = np.frombuffer(answer, np.uint8)
    if len(verdicts) != count:
        raise ValueError(f"{len(verdicts)} verdicts for {count} blocks")
    return np.where(verdicts <= ALTERED, verdicts, FAILED).astype(np.uint8)


class BlocksRead(NamedTuple):
    """Blocks as a store reads them for another. `mask`, `checksums` and `positions` have one length."""

    mask: bytes  # uint8: whether the block is there
    checksums: bytes  # uint64, xxh3_64
    positions: bytes  # uint32, in the chain
    runs: list[NDArray[np.uint8]]  # bytes of the masked, one after the other; unchecked
