"""The table of the directory's calls: who may make them, and how they are answered."""

from typing import Any, NamedTuple

from raykv.protocol.clients import Counted, Matched, MatchedPart, MatchedParts, Reserved, Stored, Window
from raykv.protocol.requests import Followed
from raykv.protocol.stores import Joined, SoleCopies
from raykv.protocol.tiers import Demotions, GpuDemotions, TierReply

# Of all messages, of a header and of a superblock: raise it with every change of any of them. Whoever joins a pool must
# have its version: `raykv.cluster.internal_kv.settings` checks it.
VERSION = 17

CLIENT, STORE = b"client", b"store"  # who may make a call
ADMINISTRATOR = b"administrator"  # through Ray only


class Asked(NamedTuple):
    """A call of the directory: a function of `raykv.directory.directory.Directory`, as a rule."""

    by: bytes  # who makes it: CLIENT or STORE, over the socket too, or ADMINISTRATOR
    answer: type[tuple[Any, ...]] | None = None  # the message that its answer is, where that is one
    frequent: bool = False  # with every request of an engine: a few of its calls are timed, for all
    few: bool = False  # it has at most KEYS_PER_CALL keys: all others wait meanwhile

    def meant(self, answer: Any) -> Any:
        """The message that a plain answer is. Any other answer as it is, None too."""
        if answer is None or self.answer is None:
            return answer
        if self.answer is MatchedParts:
            epoch, parts, pending, short = answer
            return MatchedParts(epoch, tuple(MatchedPart(*part) for part in parts), pending, short)
        return self.answer(*answer)


CALLS = {
    "ping": Asked(CLIENT),
    "nodes": Asked(CLIENT),
    "match": Asked(CLIENT, Matched, frequent=True, few=True),
    "match_parts": Asked(CLIENT, MatchedParts),
    "next_window": Asked(CLIENT, Window, frequent=True),
    "reserve": Asked(CLIENT, Reserved, frequent=True, few=True),
    "commit": Asked(CLIENT, Counted, frequent=True),
    "pin": Asked(CLIENT, Counted, few=True),
    "unpin": Asked(CLIENT, Counted, few=True),
    "forget": Asked(CLIENT, Counted, few=True),
    "preempted": Asked(CLIENT, Counted, few=True),
    "locate_prefix": Asked(CLIENT),
    "stored": Asked(CLIENT, Stored),
    "client_heartbeat": Asked(CLIENT, Counted, frequent=True),
    "disconnect": Asked(CLIENT),
    "report_requests": Asked(CLIENT),
    "join": Asked(STORE, Joined),
    "adopt": Asked(STORE),
    "heartbeat": Asked(STORE),  # a Heartbeat and a SlabTarget
    "sweep_result": Asked(STORE),
    "tier_heartbeat": Asked(STORE, TierReply),
    "report_existing": Asked(STORE),
    "demote": Asked(STORE, Demotions),
    "demote_gpu": Asked(STORE, GpuDemotions),
    "leave": Asked(ADMINISTRATOR),
    "stay": Asked(ADMINISTRATOR),
    "sole_copies": Asked(ADMINISTRATOR, SoleCopies),
    "remove_node": Asked(ADMINISTRATOR),
    "clear": Asked(ADMINISTRATOR),
    "set_quota": Asked(ADMINISTRATOR),
    "remove_quota": Asked(ADMINISTRATOR),
    "quotas": Asked(ADMINISTRATOR),
    "stats": Asked(ADMINISTRATOR),
    "follow": Asked(ADMINISTRATOR, Followed),
}


def may_ask(side: bytes, call: object) -> bool:
    """Whether who showed itself as this side of a connection may make this call over it."""
    return isinstance(call, str) and call in CALLS and CALLS[call].by == side
