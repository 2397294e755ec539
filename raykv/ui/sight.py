"""A pool at one moment, as the page's scripts read it: see static/page.js."""

from dataclasses import asdict
from typing import Any

from raykv.ui.overview import Overview, fault_text
from raykv.ui.ray_nodes import SHORT


def sight(overview: Overview) -> dict[str, Any]:
    """The pool, for JSON.

    nodes: each Member with its `faults` in words, its `id`, its short id as `shown`, and `fills`: (bytes used, bytes)
    by tier, of its tiers.
    counts: of the directory; empty while it does not answer. hit_curve: hit rates by multiples of the memory, and the
    `ceiling`; empty before a block was asked for.
    routes: memories that read from each other. bytes, failed: by transport, since the reader's store started.
    prefixes: prefixes at whose end look-ups ended. key: of the last block, in hex. blocks: number of blocks. bytes:
    their size. hits: number of look-ups. idle_s: seconds since the last look-up. nodes: short ids of the nodes whose
    memory has the last block.
    """
    counts, shown = overview.counts, overview.shown
    return {
        "pool": overview.pool,
        "summary": overview.summary,
        "nodes": [
            {
                **asdict(member),
                "id": node_id,
                "shown": shown[node_id],
                "faults": [f"{count} {fault_text(kind)}" for kind, count in member.faults.items()],
                "fills": {tier: of for tier, of in overview.tier_bytes(node_id).items() if of[1]},
            }
            for node_id, member in overview.members.items()
        ],
        "counts": {name: count for name, count in counts.items() if isinstance(count, int)},
        "hit_curve": counts.get("hit_curve", {}),
        "routes": [
            {**route, **{end: overview.memory_name(route[end]) for end in ("reader", "from")}}
            for route in overview.transports
        ],
        "prefixes": [
            {**prefix, "nodes": [shown.get(node_id, node_id[:SHORT]) for node_id in prefix["nodes"]]}
            for prefix in counts.get("prefixes", ())
        ],
    }
