"""`raykv status`: a pool as text. Nothing is cut off: a table that is too wide becomes paragraphs."""

import contextlib
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click

from raykv.cli.spinner import spinner
from raykv.client.administration import directory_stats
from raykv.config import MIB, parse_size
from raykv.protocol.location import host_of
from raykv.ui.overview import ANSWER_S, Member, Overview, fault_text, hit_sources

GIB = 1 << 30
LOOK_S = 0.2  # seconds between two checks whether the memory has its full size
STANDSTILL_S = 30.0  # seconds without a new slab, until growth counts as failed; a slab of 1 GiB takes 3 s
COLORS = {"alive": "green", "silent": "red", "no store": "red"}  # all other states are yellow
Row = dict[str, str]  # cells by column


def show(overview: Overview) -> None:
    """Print a status. Raises ClickException afterwards if the directory does not answer."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    click.echo("\n".join(lines(overview, width)))
    if not overview.counts:
        raise click.ClickException(
            f"pool {overview.pool!r}: its directory {overview.upkeep['directory']}, so there are no counts; "
            f"another takes over: try again in a few seconds"
        )


def grow(pool: str) -> None:
    """Show progress until all nodes offer all their memory, or until no node offers more for STANDSTILL_S."""
    before, since = -1, time.monotonic()
    text = f"preparing the memory of pool {pool}"
    with contextlib.suppress(KeyboardInterrupt), spinner(text) as progress:  # the nodes continue without this command
        while time.monotonic() < since + STANDSTILL_S:
            if counts := directory_stats(pool, ANSWER_S):
                offered, planned = growth(counts)
                if offered == planned:
                    return
                if offered != before:
                    before, since = offered, time.monotonic()
                what = f"{text}, {size_text(offered)} of {size_text(planned)}"
                progress.update(progress.task_ids[0], description=what, completed=offered, total=planned)
            time.sleep(LOOK_S)


def lines(overview: Overview, width: int | None) -> list[str]:
    """Return the whole status. width: width of the terminal; None for lines of any length."""
    found = [f"pool {overview.pool}", "", *node_lines(overview, node_rows(overview), width), ""]
    for text in (*_upkeep(overview), *_tiers(overview), *_routes(overview)):
        found += wrapped(text, width)
    if overview.counts:
        counts = overview.counts
        for text in (*_growing(counts), _blocks(counts), hit_rate(counts), *hit_curve(counts), *_tenants(counts)):
            found += wrapped(text, width)
    return [*found, *wrapped(_faults(overview), width)]


# ---------------------------------------------------------------------- nodes


def node_rows(overview: Overview) -> dict[str, Row]:
    """Return a row of cells for each living Ray node, by node id."""
    return {
        node_id: {
            "node": overview.shown[node_id],
            "host": member.host,
            "state": member.state,
            "up": duration(member.uptime_s),
            "restarts": "-" if member.restarts is None else str(member.restarts),
            **{tier: fill(*of) for tier, of in overview.tier_bytes(node_id).items()},
            "roles": ", ".join(member.roles),
        }
        for node_id, member in overview.members.items()
    }


def node_lines(overview: Overview, rows: dict[str, Row], width: int | None) -> list[str]:
    """Return a table of the nodes, then the reasons why nodes are not alive. A too wide table becomes paragraphs."""
    found = table(list(rows.values()))
    if width is not None and max(map(len, found)) > width:
        return [line for node_id, row in rows.items() for line in _paragraph(row, overview.members[node_id], width)]
    return with_reasons(overview, rows, found, width)


def with_reasons(overview: Overview, rows: dict[str, Row], found: list[str], width: int | None) -> list[str]:
    """Return a table of nodes with colored states, then reasons why nodes are not alive. found: the table's lines."""
    members = [overview.members[node_id] for node_id in rows]
    shown = [found[0], *(colored(line, member) for line, member in zip(found[1:], members, strict=True))]
    for row, member in zip(rows.values(), members, strict=True):
        shown += wrapped(f"{row['node']}: {member.why}", width) if member.why else []
    return shown


def _paragraph(row: Row, member: Member, width: int) -> Iterator[str]:
    """Yield the lines of a node for a narrow terminal."""
    up = f" for {row['up']}" if member.uptime_s is not None else ""
    yield from (colored(line, member) for line in wrapped(f"{row['node']}  {row['host']}  {row['state']}{up}", width))
    known = set(row) - {"node", "host", "state", "up", "restarts", "roles"}
    parts = [f"{tier} {row[tier]}" for tier in row if tier in known and row[tier] != "-"]
    if member.restarts is not None:
        parts.insert(0, f"{row['restarts']} restarts")
    for text in (row["roles"], ", ".join(parts), member.why):
        yield from wrapped(f"    {text}", width) if text else ()


def colored(line: str, member: Member) -> str:
    """Return the line with its state in color. click drops the color if the output is not a terminal."""
    before, state, after = line.partition(f"  {member.state}")
    return before + click.style(state, fg=COLORS.get(member.state, "yellow")) + after


# ---------------------------------------------------------------------- the pool


def _growing(counts: dict[str, Any]) -> Iterator[str]:
    """Yield a line on the memory that the nodes offer so far, if they still prepare slabs."""
    offered, planned = growth(counts)
    if offered < planned:
        yield f"{size_text(offered)} of {size_text(planned)} of memory are there: the nodes are preparing the rest"


def _upkeep(overview: Overview) -> Iterator[str]:
    """Yield lines on the directory, its successor and the supervisor: their nodes and faults."""
    for role, wrong in overview.upkeep.items():
        there = [node_id for node_id, member in overview.members.items() if role in member.roles]
        where = f" on {overview.shown[there[0]]}" if there else ""
        yield f"{role}{where} {wrong}".rstrip() + (_listens(overview.counts) if role == "directory" else "")


def _listens(counts: dict[str, Any]) -> str:
    if not counts:
        return ""
    if counts["socket"] is None:
        return ", called through Ray"
    return f", listens at {counts['socket']}, {counts['connections']} connections"


def _tiers(overview: Overview) -> Iterator[str]:
    """Yield a line for each external tier: its state, size and blocks."""
    for name, tier in overview.counts.get("tiers", {}).items():
        whose = f"of {overview.shown.get(name, name)}" if name else "of all nodes"
        state = {"up": "answers", "down": "does not answer", "listing": "is being listed"}[tier["state"]]
        owners = [overview.members[name]] if name in overview.members else overview.members.values()
        why = next((member.refusal for member in owners if member.refusal), "")
        refuses = f", but can't be written: {why}" if why and tier["state"] != "down" else ""
        used = fill(tier["bytes_used"], tier["capacity"])
        yield f"external tier {whose} {state}: {used}, {tier['blocks']} blocks{refuses}"


def _routes(overview: Overview) -> Iterator[str]:
    """Yield a line for each route between memories of nodes or GPUs: the transport, the rate, and failures."""
    for route in overview.transports:
        reader, source = (overview.memory_name(route[end]) for end in ("reader", "from"))
        failed = "".join(f", {name} failed {count} times" for name, count in route["failed"].items())
        yield f"{reader} reads from {source} by {route['transport']}, {route['gbps']:.2f} GB/s{failed}"


def _blocks(counts: dict[str, Any]) -> str:
    copies = sum(node["replica"] for node in counts["nodes"].values())
    writing = sum(node["writing"] for node in counts["nodes"].values())
    return (
        f"{counts['keys']} blocks and {copies} copies, {writing} being written, {counts['pinned']} pinned, "
        f"{counts['leases']} leases, {counts['reservations']} reservations, {counts['evicted']} evicted, "
        f"{counts['clients']} clients"
    )


def hit_rate(counts: dict[str, Any]) -> str:
    """The total hit rate, and the hit rate by source."""
    asked = counts["lookups"]
    if not asked:
        return "hit rate: no block was asked for yet"
    sources = ", ".join(f"{source} {found / asked:.1%}" for source, found in hit_sources(counts).items())
    return f"hit rate {counts['hits'] / asked:.1%} of {asked} blocks asked for: {sources}"


def hit_curve(counts: dict[str, Any]) -> Iterator[str]:
    """Yield a line with the hit rates of other sizes of memory, if these rates are known."""
    if curve := counts.get("hit_curve"):
        names = {"0.5": "half", "1": "as now", "2": "twice", "4": "four times", "ceiling": "any"}
        yield "hit rate by memory: " + ", ".join(f"{names[times]} {rate:.1%}" for times, rate in curve.items())


def _tenants(counts: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each tenant with a quota, and one for all other tenants, if any tenant has a quota."""
    for row in quota_rows(counts["tenants"]) if len(counts.get("tenants", ())) > 1 else ():
        yield (
            f"tenant {row['tenant']}: {row['used']} used, minimum {row['minimum']}, maximum {row['maximum']}, "
            f"{row['evicted']} evicted"
        )


def quota_rows(tenants: dict[str, dict[str, Any]]) -> list[Row]:
    """Return a row for each tenant with a quota, and then one row for all other tenants."""
    return [
        {
            "tenant": tenant or "(others)",
            "used": size_text(record["used"]),
            "minimum": f"{record['minimum']:.1%} ({size_text(record['minimum_bytes'])})",
            "maximum": f"{record['maximum']:.1%} ({size_text(record['maximum_bytes'])})",
            "evicted": str(record["evicted"]),
        }
        for tenant, record in sorted(tenants.items(), key=lambda item: (not item[0], item[0]))
    ]


def _faults(overview: Overview) -> str:
    found = [f"{count} {fault_text(kind)}" for kind, count in overview.faults.items()]
    return "faults: " + (", ".join(found) or "none known")


# ---------------------------------------------------------------------- text


def table(rows: Sequence[Row]) -> list[str]:
    """Format rows with the same columns as lines, the header first. A column is as wide as its widest cell."""
    header = {name: name.upper() for name in rows[0]}
    widths = {name: max(len(row[name]) for row in (header, *rows)) for name in header}
    return ["  ".join(f"{row[name]:<{width}}" for name, width in widths.items()).rstrip() for row in (header, *rows)]


def wrapped(text: str, width: int | None) -> list[str]:
    """Wrap a text between words, and indent all lines but the first. A word longer than a line is not broken."""
    if width is None or len(text) <= width:
        return [text]
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def fill(used: int, size: int) -> str:
    """Format a fill level, as "61% of 20.00 GiB"; "-" for size 0."""
    return f"{used / size:.0%} of {size_text(size)}" if size else "-"


def size_text(size: int) -> str:
    """Format a size, as "20.00 GiB" or "64 MiB"."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


def resized(asked: str, got: int) -> str:
    """The text that `raykv resize` prints. asked: the user's argument. got: bytes that the node offers now."""
    wanted, now = parse_size("cpu_memory", asked), f"the node has {size_text(got)} now"
    if isinstance(wanted, float) or wanted == got:
        return now
    if got < wanted:
        return f"{now}, not {size_text(wanted)}: it gives memory in whole slabs, and one more would be above that"
    return f"{now}, not {size_text(wanted)}: blocks in the rest are held, and it gives that back as they are released"


def held_by(pool: str) -> str:
    """Describe a pool's blocks, memory and nodes; "" if its directory does not answer."""
    counts = directory_stats(pool, ANSWER_S)
    if not counts:
        return ""
    offered, _ = growth(counts)
    hosts = {host_of(name) for name in counts["nodes"]}
    return f"{counts['keys']} blocks in {size_text(offered)} of memory on {len(hosts)} nodes"


def growth(counts: dict[str, Any]) -> tuple[int, int]:
    """Return (bytes of memory that all nodes offer now, bytes that they will offer)."""
    nodes = counts["nodes"].values()
    offered = sum((node["slabs"] + node["spare_slabs"]) * node["slab_bytes"] for node in nodes)
    return offered, sum(node["limit"] * node["slab_bytes"] for node in nodes)


def duration(seconds: float | None) -> str:
    """Format a duration, as 12s, 3m04s, 5h07m or 12d03h; "-" for None."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    for unit, smaller, size, part in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02}{smaller}"
    return f"{whole}s"
