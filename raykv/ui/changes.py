"""Events: the differences between one look at a pool and the next."""

from collections.abc import Iterator
from typing import NamedTuple

from raykv.config import MIB
from raykv.ui.overview import Member, Overview

TOLERANCE_S = 5.0  # tolerance in comparisons of uptimes: the clocks of Ray's head and of this process may differ


class Event(NamedTuple):
    """t: Unix time when the event was seen. kind: "bad", "good" or "note"."""

    t: float
    kind: str
    text: str


def changes(before: Overview | None, after: Overview, took_over: bool, now: float) -> Iterator[Event]:
    """Yield the events between two looks.

    before: None at the first look. took_over: whether a new directory took over. now: Unix time.
    """
    if before is None:
        yield Event(now, "note", "the page began to watch")
        return
    for kind, text in (*_nodes(before, after), *_upkeep(before, after, took_over), *_tiers(before, after)):
        yield Event(now, kind, text)


def _nodes(before: Overview, after: Overview) -> Iterator[tuple[str, str]]:
    old, new = before.members, after.members
    for node_id in new.keys() - old.keys():
        yield "note", f"node {_name(after, node_id)} joined the cluster"
    for node_id in old.keys() - new.keys():
        yield "bad", f"node {_name(before, node_id)} left the cluster"
    for node_id in old.keys() & new.keys():
        name = _name(after, node_id)
        yield from _node(old[node_id], new[node_id], name)
        was, is_now = before.limit(node_id), after.limit(node_id)
        if was is not None and is_now is not None and was != is_now:
            yield "note", f"{name} may offer {is_now / MIB:.0f} MiB, which were {was / MIB:.0f}"


def _node(old: Member, new: Member, name: str) -> Iterator[tuple[str, str]]:
    if old.state != "restarting" and (new.state == "restarting" or _was_restarted(old, new)):
        yield "bad", f"the store on {name} died"
        if new.state == "alive":
            yield "good", f"the store on {name} serves again"
    elif new.state != old.state:
        yield from _new_state(old, new, name)


def _new_state(old: Member, new: Member, name: str) -> Iterator[tuple[str, str]]:
    if new.state == "alive":
        starts = old.state in ("starting", "joining", "idle") or (old.state == "no store" and old.restarts is None)
        yield (
            "good",
            f"the drain of {name} ended"
            if old.state == "leaving"
            else (f"the store on {name} serves" if starts else f"the store on {name} serves again"),
        )
    elif new.state == "leaving":
        yield "note", f"{name} is being drained"
    elif new.state == "idle":
        yield "note", f"nothing else ran on {name}, so its store ended"
    elif new.state == "silent":
        yield "bad", f"the store on {name} does not answer"
    elif new.state == "no store":
        yield "bad", f"{name} has no store: {new.why}"


def _was_restarted(old: Member, new: Member) -> bool:
    if old.restarts is None or new.restarts is None:
        return False
    younger = None not in (old.uptime_s, new.uptime_s) and (new.uptime_s or 0) < (old.uptime_s or 0) - TOLERANCE_S
    return new.restarts > old.restarts or younger


def _upkeep(before: Overview, after: Overview, took_over: bool) -> Iterator[tuple[str, str]]:
    for role, wrong in after.upkeep.items():
        if wrong and not before.upkeep[role]:
            yield "bad", f"the {role} {wrong}"
        elif before.upkeep[role] and not wrong:
            yield "good", f"the {role} answers"
    if took_over:
        there = [_name(after, node_id) for node_id, member in after.members.items() if "directory" in member.roles]
        yield "note", "another directory took over" + (f", on {there[0]}" if there else "")


def _tiers(before: Overview, after: Overview) -> Iterator[tuple[str, str]]:
    for name, tier in after.counts.get("tiers", {}).items():
        whose, old = after.shown.get(name, name) or "all nodes", before.counts.get("tiers", {}).get(name, {})
        if tier["state"] == "down" and old.get("state") != "down":
            yield "bad", f"the external tier of {whose} does not answer"
        elif tier["state"] == "up" and old.get("state") == "down":
            yield "good", f"the external tier of {whose} answers again"


def _name(overview: Overview, node_id: str) -> str:
    return f"{overview.shown[node_id]} ({overview.members[node_id].host})"
