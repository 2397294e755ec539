"""A pool at one moment: the directory's counts, and every living Ray node's part in the pool."""

import contextlib
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from raykv.client.administration import ADMIN_DEADLINE_S, directory_stats, store_stats, transports_among
from raykv.cluster import internal_kv, named_actors, ray_calls
from raykv.protocol.location import host_of
from raykv.ui.pool_actors import Actor, look_up
from raykv.ui.ray_nodes import SHORT, RayNode, living_nodes, short_ids

ANSWER_S = 1.0  # seconds for the directory, its successor and the supervisor to answer
UPKEEP = ("directory", "successor", "supervisor")  # roles with one actor per pool, on any node
TIERS = {"cpu": "memory", "gpu": "gpu"}
FAULTS = {  # texts to print after the number of faults, by kind
    "corrupt": "blocks dropped that were not what was stored",
    "corrupt_on_arrival": "blocks altered on their way",
    "tier_refused": "blocks refused by the external tier",
    "tier_missing": "blocks missing from the external tier",
    "tier_strangers": "foreign files or keys in the external tier, left alone",
    "tier_down": "calls given up while the external tier was down",
}


@dataclass(frozen=True)
class Member:
    """A living Ray node, and its part in the pool.

    roles: some of "head" (Ray's), UPKEEP and "store". state: see `state_of`. why: why the node is not alive; "" if it
    is alive. uptime_s: seconds since the store started; None while it does not run. restarts: number of times that Ray
    restarted the store; None without a store. pulled: number of blocks that the store has copied from other nodes or a
    tier since it started; None if it does not answer. faults: number of the store's faults since it started, by kind.
    refusal: why the external tier can't be written; "" if it can be written, or if there is no tier.
    """

    host: str
    address: str
    roles: tuple[str, ...]
    state: str
    why: str
    uptime_s: float | None
    restarts: int | None
    pulled: int | None
    faults: dict[str, int]
    refusal: str


@dataclass(frozen=True)
class Overview:
    """counts: result of Directory.stats; empty while the directory does not answer. failed: why nodes have no store.

    shown: short ids of the nodes, by Ray node id. members: nodes by Ray node id. upkeep: fault of each actor of UPKEEP;
    "" if it works.
    """

    pool: str
    shown: dict[str, str]
    counts: dict[str, Any]
    failed: dict[str, str]
    transports: list[dict[str, Any]]
    members: dict[str, Member]
    upkeep: dict[str, str]

    @property
    def summary(self) -> list[str]:
        """Lines of text: the number of living nodes, then the faults of UPKEEP."""
        alive = sum(member.state == "alive" for member in self.members.values())
        wrong = [f"{role} {why}" for role, why in self.upkeep.items() if why]
        return [f"{alive} of {len(self.members)} nodes alive", *wrong]

    def limit(self, node_id: str) -> int | None:
        """Bytes of memory that a node may offer. None if the directory does not know the node."""
        memory = self.counts.get("nodes", {}).get(node_id)
        return memory["limit"] * memory["slab_bytes"] if memory else None

    def memory_name(self, name: str) -> str:
        """The name of a node's memory for users. For a GPU, it includes the end of the GPU's UUID."""
        node_id, _, gpu = name.partition("/")
        return self.shown.get(node_id, node_id) + (f" (gpu {gpu[-8:]})" if gpu else "")

    def tier_bytes(self, node_id: str) -> dict[str, tuple[int, int]]:
        """Return a node's (bytes used, bytes) for each tier that any node has; (0, 0) for a tier that it lacks."""
        sizes: dict[str, tuple[int, int]] = {"memory": (0, 0)}

        def add(tier: str, used: int, size: int, mine: bool) -> None:
            before = sizes.get(tier, (0, 0))
            sizes[tier] = (before[0] + used * mine, before[1] + size * mine)

        for name, memory in self.counts.get("nodes", {}).items():
            size = (memory["slabs"] + memory["spare_slabs"]) * memory["slab_bytes"]
            add(TIERS[memory["tier"]], memory["bytes_used"], size, host_of(name) == node_id)
        for name, tier in self.counts.get("tiers", {}).items():
            if name:
                add("external", tier["bytes_used"], tier["capacity"], name == node_id)
        return sizes

    @property
    def faults(self) -> dict[str, int]:
        """Faults of the whole pool by kind, as the directory and the stores count them."""
        total = Counter({"corrupt": int(self.counts.get("corrupt", 0))})
        for member in self.members.values():
            total.update(member.faults)
        for route in self.transports:
            total.update({f"transport_{name}": count for name, count in route["failed"].items()})
        return {kind: count for kind, count in total.items() if count}

    def as_json(self) -> dict[str, Any]:
        """The object that `raykv status --json` prints; see docs/cli-json.md."""
        return {
            **self.counts,
            "failed": self.failed,
            "transports": self.transports,
            "faults": self.faults,
            "pool": self.pool,
            "ray_nodes": {node_id: asdict(member) for node_id, member in self.members.items()},
            "upkeep": self.upkeep,
        }

    def for_page(self) -> dict[str, Any]:
        """Return what static/page.js reads, for JSON.

        nodes: each Member with its `faults` in words, its `id`, its short id as `shown`, and `fills`: (bytes used,
        bytes) of each of its tiers.
        counts: the directory's counts; empty while it does not answer. hit_curve: hit rates by multiples of the memory,
        and with unlimited memory (`ceiling`); empty before the first look-up.
        routes: pairs of memories; in a pair, one memory reads from the other. bytes, failed: counts by transport, since
        the reader's store started.
        prefixes: the prefixes that provided the most blocks to look-ups. key: the last block's key, in hex. blocks:
        number of blocks. bytes: size of the blocks. hits: number of look-ups that found exactly this prefix. idle_s:
        seconds since the latest of these look-ups. nodes: short ids of the nodes whose memory has the last block.
        """
        counts, shown = self.counts, self.shown
        return {
            "pool": self.pool,
            "summary": self.summary,
            "nodes": [
                {
                    **asdict(member),
                    "id": node_id,
                    "shown": shown[node_id],
                    "faults": [f"{count} {fault_text(kind)}" for kind, count in member.faults.items()],
                    "fills": {tier: of for tier, of in self.tier_bytes(node_id).items() if of[1]},
                }
                for node_id, member in self.members.items()
            ],
            "counts": {name: count for name, count in counts.items() if isinstance(count, int)},
            "hit_curve": counts.get("hit_curve", {}),
            "routes": [
                {**route, **{end: self.memory_name(route[end]) for end in ("reader", "from")}}
                for route in self.transports
            ],
            "prefixes": [
                {**prefix, "nodes": [shown.get(node_id, node_id[:SHORT]) for node_id in prefix["nodes"]]}
                for prefix in counts.get("prefixes", ())
            ],
        }


def hit_sources(counts: dict[str, Any]) -> dict[str, int]:
    """Number of found blocks by source, as seen from the reader's node."""
    elsewhere = counts["remote_hits"] + counts["external_hits"] + counts["gpu_hits"]
    return {
        "this node": counts["hits"] - elsewhere,
        "other nodes": counts["remote_hits"],
        "gpu": counts["gpu_hits"],
        "external tier": counts["external_hits"],
    }


def fault_text(kind: str) -> str:
    """Return the text for a kind of `Overview.faults`."""
    by, _, what = kind.partition("_")
    if by == "transport":
        return f"transfers failed by {what}"
    return FAULTS.get(kind, f"calls of the external tier failed ({what})")


def look(pool: str) -> Overview:
    """Ask Ray, the directory and the stores. The result also says which actors did not answer in time."""
    nodes = living_nodes()
    upkeep = _upkeep_actors(pool)
    wrong = _what_is_wrong(upkeep)
    stores = {node.node_id: look_up(named_actors.node_store_name(pool, node.node_id)) for node in nodes}
    counts = directory_stats(pool, ANSWER_S if wrong["directory"] else ADMIN_DEADLINE_S)
    if not counts:
        wrong["directory"] = wrong["directory"] or "does not answer"
    answers = store_stats(pool, {node_id for node_id, store in stores.items() if store and store.is_alive})
    failed, idle = internal_kv.failures(pool), internal_kv.left_nodes(pool)
    members = {}
    for node in nodes:
        store, answer = stores[node.node_id], answers.get(node.node_id)
        roles = [role for role, actor in upkeep.items() if actor and actor.is_alive and actor.node_id == node.node_id]
        why = failed.get(node.node_id), wrong["supervisor"], node.node_id in idle
        state = state_of(store, answer is not None, counts and counts["nodes"].get(node.node_id), *why)
        members[node.node_id] = _member(node, roles, store, answer, *state)
    transports = transports_among(list(counts.get("nodes", ())), answers)
    return Overview(pool, short_ids(nodes), counts, failed, transports, members, wrong)


def state_of(
    actor: Actor | None,
    answers: bool,
    counts: dict[str, Any] | None,
    failed: str | None,
    supervisor: str,
    idle: bool = False,
) -> tuple[str, str]:
    """Return (state of a node, why it is not alive).

    actor: the store's actor in Ray. answers: whether it answers. counts: the directory's counts of the node's memory;
    None if the directory does not know the node, {} if it does not answer.
    failed: why its store could not start. supervisor: the supervisor's fault; "" if the supervisor works. idle: whether
    nothing but the pool ran on the node; see PoolConfig.idle_node_s.
    States: alive; joining: the directory adopts the node's blocks; leaving: the node is being drained; starting: the
    store's first process starts; restarting: the store died, and Ray restarts it; silent: the store does not answer;
    idle: the store ended, since nothing else runs on the node; no store: the reason is returned.
    """
    if failed is not None:
        return "no store", f"{failed} (it is tried again every 30 s)"
    if actor is None and supervisor:
        return "no store", f"the supervisor, which starts stores, {supervisor}"
    if actor is None and idle:
        return "idle", "nothing else runs there, so its store ended; it starts again when something does"
    if actor is None:
        return "no store", "the supervisor is about to start it"
    if actor.state == "RESTARTING":
        return "restarting", "its process died, and Ray is starting another"
    if not actor.is_alive:
        return "starting", "its process is starting"
    if not answers:
        return "silent", "its process does not answer: it is stopped, hung, or out of reach"
    if not counts:
        return ("joining", "the directory does not know it yet") if counts is None else ("alive", "")
    return counts["state"] if counts["state"] != "suspect" else "silent", {
        "joining": "it tells the directory what lies in its memory",
        "leaving": "it is being drained: readers are served, and nothing new is stored there",
        "suspect": f"the directory has not heard of it for {counts['idle_s']:.0f} s",
    }.get(counts["state"], "")


def _member(
    node: RayNode, roles: list[str], actor: Actor | None, answer: dict[str, Any] | None, state: str, why: str
) -> Member:
    counted = answer or {}
    mine = [*(["head"] if node.is_head else []), *roles, *(["store"] if actor else [])]
    faults = {kind: count for kind, count in counted.items() if kind.startswith("tier_")}
    faults["corrupt_on_arrival"] = counted.get("corrupt", 0)
    return Member(
        host=node.host,
        address=node.address,
        roles=tuple(mine),
        state=state,
        why=why,
        uptime_s=round(actor.uptime_s, 1) if actor and actor.uptime_s is not None else None,
        restarts=actor.restarts if actor else None,
        pulled=counted.get("pulled"),
        faults={kind: count for kind, count in faults.items() if count},
        refusal=counted.get("refusal", ""),
    )


def _upkeep_actors(pool: str) -> dict[str, Actor | None]:
    """Return the actors of UPKEEP by role; None for an actor that Ray does not know."""
    names = [named_actors.directory_name(pool, number) for number in (1, 2)]
    with contextlib.suppress(ValueError):  # no directory is in charge
        names.sort(key=lambda name: name != internal_kv.in_charge(pool).name)
    return dict(zip(UPKEEP, map(look_up, (*names, named_actors.supervisor_name(pool))), strict=True))


def _what_is_wrong(upkeep: dict[str, Actor | None]) -> dict[str, str]:
    """Return the fault of each role's actor; "" if it works."""
    asked = {role: actor.handle.ping.remote() for role, actor in upkeep.items() if actor and actor.is_alive}
    done = set(ray_calls.finished(asked.values(), ANSWER_S))
    return {role: _what(actor, asked.get(role), done) for role, actor in upkeep.items()}


def _what(actor: Actor | None, answer: Any, done: set[Any]) -> str:
    if actor is None:
        return "is not there"
    if not actor.is_alive:
        return "is being restarted" if actor.state == "RESTARTING" else "is starting"
    with contextlib.suppress(RayError):
        if answer in done:
            ray.get(answer)
            return ""
    return "does not answer"
