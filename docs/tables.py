"""Writes docs/figures.json into the tables of README.md and of the pages.

    python -m docs.tables

A table begins with `<!-- figures: NAME -->` and ends with `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docs.figures import FILE, ROOT

PAGES = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "scale.md"]
TABLE = re.compile(r"(?s)(<!-- figures: (\S+) -->\n).*?(<!-- end -->)")
Row = tuple[str, str, str]  # (subcommand of `raykv bench`, what it does, what it measured)
Figures = dict[str, Any]


def _start(f: Figures) -> list[Row]:
    return [
        (
            "`start`",
            "a pool on two nodes serves",
            f"{f['start_s']:.1f} s; {f['ratio']:.1f} times an empty detached actor a node",
        )
    ]


def _local(f: Figures) -> list[Row]:
    copies, calls = f["read_gbps"] / f["memcpy_gbps"], f["read_e2e_gbps"] / f["memcpy_gbps"]
    verified = f["verified_read_gbps"] / f["verified_memcpy_gbps"]
    keys = f["match_keys_per_s"]
    read = f"{copies:.2f} of memcpy; verified {verified:.2f}; with its calls {calls:.2f}"
    match = f"{f['match_us_p50']:.0f} us, {f['match_us_p50'] / f['actor_call_us_p50']:.2f} of an empty actor call"
    match += f" with the same bytes; a bare socket's round trip takes {f['socket_us_p50']:.0f}"
    four = f"{keys / 1e6:.1f} million, {keys / f['actor_match_keys_per_s']:.1f} times as many as through Ray"
    return [
        ("`local`", "read, 16 blocks of 2 MiB from another process", read),
        ("", "match of 512 keys", match),
        ("", "keys that four clients look up in a second", four),
    ]


def _cross(f: Figures) -> list[Row]:
    socket = f"{f['read_gbps'] / f['socket_gbps']:.2f} of a bare socket, which moves {f['socket_gbps']:.1f} GB/s"
    shares = f"{f['read_of_ray_get']:.2f} of `ray.get` of one array; {socket}"
    return [("`cross`", "read 128 MiB from another node, verified, over TCP", shares)]


def _transports(figures: Figures) -> list[Row]:
    return [
        ("", f"the same with `--transport {name}`", f"{figures[key]['read_of_ray_get']:.2f} of `ray.get`")
        for name, key in (("nixl", "cross-nixl"), ("object_store", "cross-object-store"))
    ]


def _link(figures: Figures) -> list[Row]:
    f, lossy = figures["link"], figures["lossy-link"]
    beside = f["small_beside_large_ms"] / f["small_ms"]
    shares = f"{f['read_of_iperf3']:.2f} of `iperf3 -P 4`; {lossy['read_of_iperf3']:.2f} with 0.1% of loss"
    slow = f"the slower takes {f['two_readers_slow_of_fast']:.2f} of the faster; {beside:.1f} times as long as alone"
    return [
        ("`cross --link 10gbit`", "pull 512 MiB over a shaped link", shares),
        ("", "two readers at once; 8 MiB beside 504", slow),
    ]


def _scale(f: Figures) -> list[Row]:
    (row,) = (row for row in f["results"] if row["nodes"] == f["largest_nodes"])
    carried = f"{row['nodes']}, where a match takes {row['p99_ms']:.1f} ms (p99); [more](docs/scale.md)"
    return [("`scale`", "nodes of 8 engines that one directory carries, 5 requests a second an engine", carried)]


def _directory(f: Figures) -> list[Row]:
    ours, plain = f["match_us"]["8192"] / 1e3, f["floor"]["match_us"]["8192"] / 1e3
    memory = f"{f['bytes_per_entry']:.0f} bytes, plain dicts {f['floor']['bytes_per_entry']:.0f}"
    match = f"{ours:.1f} ms, plain dicts {plain:.1f}"
    return [("`directory --entries 10000000`", "match of 8,192 keys; memory of an entry", f"{match}; {memory}")]


def _tiers(f: Figures) -> list[Row]:
    def shares(name: str, floor: str) -> str:
        return f"store {f[f'{name}_store_ratio']:.2f}, load {f[f'{name}_load_ratio']:.2f} of {floor}"

    return [
        ("`tiers`", "64 blocks of 2 MiB to and from a file on disk", shares("file", "raw direct I/O")),
        ("", "the same to and from redis", shares("redis", "bare pipelined redis-py")),
    ]


def _demotion(f: Figures) -> list[Row]:
    shares = [f["store_ratio"], f["read_ratio"], f["match_ratio"]]
    what = "store, read and match in memory while blocks are demoted to a disk at full speed"
    return [("`demotion`", what, "{:.2f}, {:.2f} and {:.2f} of idle".format(*shares))]


def _route(f: Figures) -> list[Row]:
    calls = f"{f['added_calls']:.1f} empty actor calls with the same bytes, awaited on an event loop"
    return [("`route`", f"what the router adds to a request of {f['prompt_tokens']:,} tokens", calls)]


def _flight(f: Figures) -> list[Row]:
    what = "eight equal prompts of 3,000 tokens, asked of two engines at once: computed prompts"
    last = f"{f['last_first_token_ms'] / 1e3:.1f} s, without a pool {f['without_pool_last_first_token_ms'] / 1e3:.1f}"
    computed = f"{f['computed_prompts']:.2f} prompts; without a pool {f['without_pool_computed_prompts']:.2f}"
    return [("`flight`", what, f"{computed}; the last first token after {last}, alone {f['alone_ms'] / 1e3:.1f}")]


def _pd(f: Figures) -> list[Row]:
    delays = ", ".join(str(row["sent_after_ms"]) for row in f["results"])
    shares = ", ".join(f"{row['of_floor']:.2f}" for row in f["results"])
    prefill = f"another engine's prefill of {f['prompt_tokens']:,} tokens"
    floor = f"its own hit ({f['own_hit_ms']:.0f} ms) + 1.3 times the transfer of the bytes ({f['transfer_ms']:.0f} ms)"
    return [
        (
            "`pd`",
            f"a decode engine's first token, asked {delays} ms after {prefill}",
            f"{shares} of {floor}; a cold prompt {f['cold_ms'] / 1e3:.1f} s",
        )
    ]


def _trace(f: Figures) -> list[Row]:
    def rates(name: str) -> str:
        return " / ".join(f"{row[name]:.1f}" for row in f["results"])

    sizes = " / ".join(f"{row['capacity'] // 1000}k" for row in f["results"])
    lru = f"exact LRU {rates('exact_lru')}; isolated caches {rates('isolated')}"
    return [("`trace`", f"{sizes} blocks on {f['nodes']} nodes: hit rate", f"{rates('pool')}%; {lru}")]


def _ttft(f: Figures) -> list[Row]:
    local = f"pool, same node {_s(f['pool_local_ms'])}: {f['local_of_floor']:.2f} of own cache and memcpy"
    lane = f"{f['remote_of_floor']:.2f} of own cache and 1.1 times the pool's lane"
    remote = f"pool, other node {_s(f['pool_remote_ms'])}: {lane}"
    own = f"computed {f['cold_ms'] / 1e3:.1f} s; engine's own cache {_s(f['own_hit_ms'])}"
    what = f"first token of {f['prompt_tokens']:,} tokens ({f['kv_bytes'] >> 20} MiB of KV, float32)"
    return [
        ("`ttft --engine vllm`", what, f"{own}; {local}; {remote}"),
        ("", "the same from a file on the other node's disk", _s(f["pool_tier_ms"])),
        ("", "what the connector adds to a prompt without a hit", f"{f['connector_ms']:.0f} ms"),
    ]


def _s(ms: float) -> str:
    return f"{ms / 1e3:.2f} s"


def summary(figures: Figures) -> str:
    """Return the table of README.md."""
    rows = _ttft(figures["ttft"]) + _start(figures["start"]) + _local(figures["local"])
    rows += _scale(figures["scale"]) + _cross(figures["cross-tcp"]) + _link(figures)[:1]
    rows += _directory(figures["directory"]) + _tiers(figures["tiers"])[:1] + _trace(figures["trace"])
    return _table(("`raykv bench`", "what", "measured"), rows)


def throughput(figures: Figures) -> str:
    rows = _start(figures["start"]) + _local(figures["local"]) + _cross(figures["cross-tcp"]) + _transports(figures)
    rows += _link(figures) + _route(figures["route"]) + _flight(figures["flight"]) + _pd(figures["pd"])
    rows += _tiers(figures["tiers"]) + _demotion(figures["demotion"])
    return _table(("`raykv bench`", "figure", "of its floor"), rows)


def ttft(figures: Figures) -> str:
    f = figures["ttft"]
    low, high = f["cold_less_without_low_ms"] / 1e3, f["cold_less_without_high_ms"] / 1e3
    lane = f"1.1 times the pool's time to bring the bytes ({f['lane_ms']:.0f} ms)"
    lane += f"; `ray.get` of them: {f['ray_get_ms']:.0f} ms"
    rows = [
        (
            "computed",
            f"{f['cold_ms'] / 1e3:.1f} s",
            f"{low:+.2f} to {high:+.2f} s beside an engine without the connector",
        ),
        ("the engine's own prefix cache", _s(f["own_hit_ms"]), "-"),
        (
            "pool, same node",
            _s(f["pool_local_ms"]),
            f"{f['local_of_floor']:.2f} of the engine's own cache and a memcpy of the bytes ({f['memcpy_ms']:.0f} ms)",
        ),
        (
            "pool, other node",
            _s(f["pool_remote_ms"]),
            f"{f['remote_of_floor']:.2f} of the engine's own cache and {lane}",
        ),
        (
            "the same, of a reader whose staging window is a tenth of the prompt",
            _s(f["pool_windows_ms"]),
            f"{f['windows_of_floor']:.2f} of the same floor",
        ),
        ("pool, from a file on the other node's disk", _s(f["pool_tier_ms"]), "-"),
        (
            "what the connector adds to a prompt without a hit",
            f"{f['connector_ms']:.0f} ms",
            "the engine without the pool",
        ),
    ]
    return _table(("case", "time", "floor"), rows)


def sizes(figures: Figures) -> str:
    rows = [
        (
            f"{row['blocks']} x {row['block_bytes'] >> 10:,} KiB",
            f"{row['store_of_memcpy1']:.2f}, {row['store_of_memcpy']:.2f}",
            f"{row['read_of_memcpy1']:.2f}, {row['read_of_memcpy']:.2f}",
        )
        for row in figures["sizes"]["results"]
    ]
    return _table(("blocks", "store", "read"), rows)


def directory(figures: Figures) -> str:
    f = figures["directory"]
    plain = f["floor"]
    rows = [("memory of an entry", f"{f['bytes_per_entry']:.0f} bytes", f"{plain['bytes_per_entry']:.0f}")]
    for keys in ("512", "8192"):
        ours, theirs = f["match_us"][keys], plain["match_us"][keys]
        rows.append((f"match of {int(keys):,} keys", f"{ours:,.0f} us", f"{theirs:,.0f} us"))
    inserts = f"{f['insert_per_s'] / 1e6:.2f} million a second", f"{plain['insert_per_s'] / 1e6:.2f} million"
    rows.append(("inserts, each with an eviction", *inserts))
    lost = f"losing a node of {f['remove_node_blocks']:,} blocks"
    rows.append((lost, f"{f['remove_node_ms']:.0f} ms", "-"))
    return _table(("figure", "raykv", "plain dicts"), rows)


def hit_rate(figures: Figures) -> str:
    (_, what, rates), (row,) = _trace(figures["trace"])[0], figures["tier-trace"]["results"]
    percent, _, floors = rates.partition("; ")
    tiers = f"shared {row['pool_shared_tier']:.1f}%, nodes' own {row['pool_own_tiers']:.1f}%"
    lru = f"exact LRU of 30k blocks {row['exact_lru_external']:.1f}%"
    rows = [(what.partition(" blocks")[0] + " in memory", percent, floors)]
    return _table(("blocks", "hit rate", "floor"), [*rows, ("5k in memory, 30k in an external tier", tiers, lru)])


def agents(figures: Figures) -> str:
    results = figures["agents"]["results"]
    here, curve = "of that on the reader's node", "[hit curve](operations.md#how-much-memory-a-pool-needs)"
    names = [
        ("the pool, requests in turn", "pool"),
        (here, "pool_here"),
        ("the pool, sessions stay on a node", "sticky"),
        (here, "sticky_here"),
        ("the pool, told what sessions are done with", "told"),
        ("exact LRU", "exact_lru"),
        (f"the same, by the pool's own {curve}", "hit_curve"),
        ("isolated caches", "isolated"),
        ("a cache that knows what comes", "optimum"),
    ]
    rows = [(what, *(f"{row[name]:.1f}" for row in results)) for what, name in names]
    return _table(("blocks", *(f"{row['capacity']:,}" for row in results)), rows)


def scale(figures: Figures) -> str:
    rows = [
        (
            f"{row['nodes']}",
            f"{row['offered_per_s']:,.0f}",
            f"{row['calls_per_s']:,.0f}",
            f"{row['busy']:.2f}",
            f"{row['call_us']:.0f} us",
            f"{row['p50_ms']:.1f} ms",
            f"{row['p99_ms']:.1f} ms",
        )
        for row in figures["scale"]["results"]
    ]
    heads = ("nodes", "offered calls/s", "answered calls/s", "busy", "a call", "match p50", "match p99")
    return _table(heads, rows)


def take_over(figures: Figures) -> str:
    f = figures["scale"]["take_over"]
    waits = f"all stores joined after {f['all_joined_s']:.1f} s, p99 low again after {f['p99_low_s']:.1f} s"
    longest = f"the longest wait {f['worst_ms'] / 1e3:.2f} s"
    first = f"the first match after {f['first_match_s']:.2f} s"
    return f"With {f['nodes']} nodes and 5 million blocks: {first}, {waits}, {longest}.\n"


def commits(figures: Figures) -> str:
    """Return the sentence that names the commits and the machine of the figures."""
    by_commit: dict[str, list[str]] = {}
    for name, found in figures.items():
        by_commit.setdefault(found["commit"], []).append(f"`{name}`")
    machines = " and ".join(sorted({found["machine"] for found in figures.values()}))
    most, *others = sorted(by_commit, key=lambda commit: -len(by_commit[commit]))
    said = "".join(f", {', '.join(by_commit[commit])} on {commit}" for commit in others)
    return f"`make figures` measured them on commit {most}{said}, on one machine with {machines}.\n"


def _table(heads: tuple[str, ...], rows: list[Any]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


WRITERS: dict[str, Callable[[Figures], str]] = {
    writer.__name__: writer
    for writer in (summary, throughput, ttft, sizes, directory, hit_rate, agents, scale, take_over, commits)
}


def figures() -> Figures:
    """Return all figures, by the name of a bench."""
    found: Figures = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def pages() -> dict[Path, str]:
    """Return the texts of the pages, with their tables filled in."""
    found = figures()

    def filled(page: str) -> str:
        return TABLE.sub(lambda table: table[1] + WRITERS[table[2]](found) + table[3], page)

    return {path: filled(path.read_text(encoding="utf-8")) for path in PAGES}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
