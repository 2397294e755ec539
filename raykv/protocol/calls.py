"""The table of the directory's calls: who may make each call, and its answer."""

from typing import Any, NamedTuple

from raykv.protocol.clients import Counted, Located, Matched, MatchedPart, MatchedParts, Reserved, Stored, Window
from raykv.protocol.requests import Followed
from raykv.protocol.stores import Joined, SoleCopies
from raykv.protocol.tiers import Demotions, GpuDemotions, TierReply

# The version of all messages, headers and superblocks: raise it when any of them changes. A process can join only a
# pool of the same version, which `raykv.cluster.internal_kv.settings` checks.
VERSION = 23

CLIENT, STORE = b"client", b"store"  # who may make a call
ADMINISTRATOR = b"administrator"  # through Ray only


class Asked(NamedTuple):
    """A call of the directory. Usually it is a method of `raykv.directory.directory.Directory`."""

    by: bytes  # who may make it: CLIENT or STORE, over the socket or through Ray; ADMINISTRATOR, only through Ray
    answer: type[tuple[Any, ...]] | None = None  # class of the answer, if the answer is a message
    frequent: bool = False  # whether engines make it with every request; only a few of these calls are timed
    few: bool = False  # whether it takes at most KEYS_PER_CALL keys, as other callers wait while it runs

    def meant(self, answer: Any) -> Any:
        """Turn a plain tuple back into its message. Returns None and other answers unchanged."""
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
    "touch": Asked(CLIENT, Counted, few=True),
    "done": Asked(CLIENT, Counted),  # not `few`: two calls would evict the blocks in another order than one call
    "forget": Asked(CLIENT, Counted, few=True),
    "preempted": Asked(CLIENT, Counted, few=True),
    "locate_prefix": Asked(CLIENT, Located),
    "stored": Asked(CLIENT, Stored),
    "client_heartbeat": Asked(CLIENT, Counted, frequent=True),
    "disconnect": Asked(CLIENT),
    "report_requests": Asked(CLIENT),
    "join": Asked(STORE, Joined),
    "adopt": Asked(STORE),
    "heartbeat": Asked(STORE),  # answer: a Heartbeat and a SlabTarget
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
    """Whether a peer that proved to be `side` may make this call over its connection."""
    return isinstance(call, str) and call in CALLS and CALLS[call].by == side
