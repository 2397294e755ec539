"""Events: the differences between one look at a pool and the next."""

from collections.abc import Iterator
from typing import NamedTuple

from raykv.ui.sight import Node, Sight

MIB = 1 << 20
TOLERANCE_S = 5.0  # when comparing uptimes: Ray's head and this process may have different clocks


class Event(NamedTuple):
    """t: Unix time when it was seen. kind: "bad", "good" or "note"."""

    t: float
    kind: str
    text: str


def changes(before: Sight | None, after: Sight, now: float) -> Iterator[Event]:
    """Events between two looks. before: None at the first look. now: Unix time."""
    if before is None:
        yield Event(now, "note", "the page began to watch")
        return
    for kind, text in (*_nodes(before, after), *_upkeep(before, after), *_tiers(before, after)):
        yield Event(now, kind, text)


def _nodes(before: Sight, after: Sight) -> Iterator[tuple[str, str]]:
    old, new = ({node.id: node for node in sight.nodes} for sight in (before, after))
    for node_id in new.keys() - old.keys():
        yield "note", f"node {_name(new[node_id])} joined the cluster"
    for node_id in old.keys() - new.keys():
        yield "bad", f"node {_name(old[node_id])} left the cluster"
    for node_id in old.keys() & new.keys():
        yield from _node(old[node_id], new[node_id])


def _node(old: Node, new: Node) -> Iterator[tuple[str, str]]:
    name = _name(new)
    if old.state != "restarting" and (new.state == "restarting" or _was_restarted(old, new)):
        yield "bad", f"the store on {name} died"
        if new.state == "alive":
            yield "good", f"the store on {name} serves again"
    elif new.state != old.state:
        yield from _new_state(old, new, name)
    if old.limit is not None and new.limit is not None and old.limit != new.limit:
        yield "note", f"{name} may offer {new.limit / MIB:.0f} MiB, which were {old.limit / MIB:.0f}"


def _new_state(old: Node, new: Node, name: str) -> Iterator[tuple[str, str]]:
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


def _was_restarted(old: Node, new: Node) -> bool:
    if old.restarts is None or new.restarts is None:
        return False
    younger = None not in (old.uptime_s, new.uptime_s) and (new.uptime_s or 0) < (old.uptime_s or 0) - TOLERANCE_S
    return new.restarts > old.restarts or younger


def _upkeep(before: Sight, after: Sight) -> Iterator[tuple[str, str]]:
    for role, wrong in after.upkeep.items():
        if wrong and not before.upkeep[role]:
            yield "bad", f"the {role} {wrong}"
        elif before.upkeep[role] and not wrong:
            yield "good", f"the {role} answers"
    if before.epoch is not None and after.epoch is not None and after.epoch > before.epoch:
        there = [_name(node) for node in after.nodes if "directory" in node.roles]
        yield "note", "another directory took over" + (f", on {there[0]}" if there else "")


def _tiers(before: Sight, after: Sight) -> Iterator[tuple[str, str]]:
    for whose, state in after.tiers.items():
        if state == "down" and before.tiers.get(whose) != "down":
            yield "bad", f"the external tier of {whose} does not answer"
        elif state == "up" and before.tiers.get(whose) == "down":
            yield "good", f"the external tier of {whose} answers again"


def _name(node: Node) -> str:
    return f"{node.shown} ({node.host})"
