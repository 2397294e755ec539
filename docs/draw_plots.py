"""Draws the plots of the pages, from docs/figures.json, which `make figures` writes, and docs/plots/figures.json.

    python -m docs.draw_plots

A bar ends at the highest measured value, and its dark part ends at the lowest.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from docs import svg
from docs.tables import figures

FOLDER = Path(__file__).parent / "plots"
LABELS, BARS, VALUES, ROW, CURVES = 290, 380, 110, 24, 480  # pixels
DARK, LIGHT = "#1d4ed8", "#93c5fd"


def draw(plot: dict[str, Any]) -> str:
    """Return a plot as SVG. plot: `title`, `unit`, `bars` of (label, lowest, highest), optional `line` at a value."""
    scale = BARS / max(high for _, _, high in plot["bars"])
    width, height = LABELS + BARS + VALUES, 50 + ROW * len(plot["bars"])
    shapes = [svg.text(14, 24, plot["title"], size=14, bold=True)]
    if "line" in plot:
        x = LABELS + plot["line"] * scale
        shapes.append(svg.line(x, 36, x, height - 6))
    for i, (label, low, high) in enumerate(plot["bars"]):
        y = 40 + ROW * i
        value = f"{low:,g}" if low == high else f"{low:,g} to {high:,g}"
        shapes += [
            svg.text(LABELS - 10, y + 14, label, anchor="end"),
            svg.rect(LABELS, y + 3, high * scale, ROW - 8, LIGHT),
            svg.rect(LABELS, y + 3, low * scale, ROW - 8, DARK),
            svg.text(LABELS + high * scale + 6, y + 14, f"{value} {plot['unit']}"),
        ]
    return svg.document(width, height, shapes)


def draw_all() -> dict[Path, str]:
    """Return the plots, by the file to which each is written."""
    others = json.loads((FOLDER / "figures.json").read_text(encoding="utf-8"))
    found = figures()
    drawn = {FOLDER / plot["file"]: draw(plot) for plot in _measured(found) + others}
    return {
        **drawn,
        FOLDER / "agents.svg": _curves("Hit rate of coding agents, 8 nodes, by blocks of all nodes", found),
    }


def _curves(title: str, found: Any) -> str:
    """Plot hit rates over memory sizes."""
    results = found["agents"]["results"]
    names = {
        "a cache that knows what comes": ("optimum", svg.FAINT),
        "the pool, told what is over": ("told", "#0d9488"),
        "exact LRU": ("exact_lru", svg.INK),
        "the pool": ("sticky", DARK),
        "of that on the reader's node": ("sticky_here", LIGHT),
        "isolated caches": ("isolated", "#f59e0b"),
    }
    left, top, right = 50, 40, 50 + CURVES
    at = [left + CURVES * row["capacity"] / results[-1]["capacity"] for row in results]
    shapes = [svg.text(14, 24, title, size=14, bold=True)]
    for percent in range(0, 101, 20):
        y = top + 2 * (100 - percent)
        shapes += [svg.line(left, y, right, y, "#e5e7eb"), svg.text(left - 8, y + 4, f"{percent}%", anchor="end")]
    for x, row in zip(at, results, strict=True):
        shapes.append(svg.text(x, top + 220, f"{row['capacity']:,}", anchor="middle"))
    for i, (label, (name, stroke)) in enumerate(names.items()):
        points = [(x, top + 2 * (100 - row[name])) for x, row in zip(at, results, strict=True)]
        shapes += [svg.line(*one, *other, stroke) for one, other in pairwise(points)]
        y = top + 20 + ROW * i
        shapes += [svg.line(right + 20, y - 4, right + 44, y - 4, stroke), svg.text(right + 52, y, label)]
    return svg.document(right + LABELS, top + 235, shapes)


def _measured(found: Any) -> list[dict[str, Any]]:
    """Return plots in the format of docs/plots/figures.json."""
    return [
        _plot(
            "ttft.svg",
            f"Time to first token, vLLM, {found['ttft']['prompt_tokens']:,} tokens",
            "s",
            _ttft_bars(found),
        ),
        {**_plot("ratios.svg", "Throughput as a share of the floor beside it", "x", _ratio_bars(found)), "line": 1.0},
        _plot("hit_rate.svg", "Hit rate on a trace, 8 nodes, by blocks of all nodes", "%", _hit_rate_bars(found)),
        _plot("directory.svg", "Time of a match in a directory of 10 million entries", "us", _directory_bars(found)),
        {
            **_plot("scale.svg", "Processor time of a directory, by nodes", "of a core", _scale_bars(found)),
            "line": 1.0,
        },
    ]


def _plot(file: str, title: str, unit: str, bars: dict[str, float]) -> dict[str, Any]:
    return {
        "file": file,
        "title": title,
        "unit": unit,
        "bars": [(label, value, value) for label, value in bars.items()],
    }


def _ttft_bars(found: Any) -> dict[str, float]:
    names = {
        "computed": "cold_ms",
        "vLLM's own prefix cache": "own_hit_ms",
        "pool, same node": "pool_local_ms",
        "pool, other node": "pool_remote_ms",
        "pool, file on the other node's disk": "pool_tier_ms",
    }
    return {label: round(found["ttft"][name] / 1e3, 2) for label, name in names.items()}


def _ratio_bars(found: Any) -> dict[str, float]:
    local, cross, tiers, demotion = (found[name] for name in ("local", "cross-tcp", "tiers", "demotion"))
    bars = {
        "read, same node / memcpy": local["read_gbps"] / local["memcpy_gbps"],
        "verified read, same node / memcpy": local["verified_read_gbps"] / local["verified_memcpy_gbps"],
        "store with checksum / memcpy": local["store_gbps"] / local["store_memcpy_gbps"],
        "read from another node, TCP / ray.get": cross["read_of_ray_get"],
        "the same, NIXL / ray.get": found["cross-nixl"]["read_of_ray_get"],
        "the same, object store / ray.get": found["cross-object-store"]["read_of_ray_get"],
        "the same, TCP / bare socket": cross["read_gbps"] / cross["socket_gbps"],
        "store to a file / direct I/O": tiers["file_store_ratio"],
        "load from a file / direct I/O": tiers["file_load_ratio"],
        "store to redis / redis-py": tiers["redis_store_ratio"],
        "load from redis / redis-py": tiers["redis_load_ratio"],
        **{f"{what} while demoting / idle": demotion[f"{what}_ratio"] for what in ("store", "read", "match")},
    }
    return {label: round(value, 2) for label, value in bars.items()}


def _hit_rate_bars(found: Any) -> dict[str, float]:
    names = {"pool": "pool", "exact LRU": "exact_lru", "isolated caches": "isolated"}
    bars = {
        f"{row['capacity'] // 1000}k blocks: {label}": round(row[name], 1)
        for row in found["trace"]["results"]
        for label, name in names.items()
    }
    (row,) = found["tier-trace"]["results"]
    own = {"a shared tier": row["pool_shared_tier"], "the nodes' own tiers": row["pool_own_tiers"]}
    return bars | {f"5k in memory, 30k in {where}": round(value, 1) for where, value in own.items()}


def _directory_bars(found: Any) -> dict[str, float]:
    ours, plain = found["directory"]["match_us"], found["directory"]["floor"]["match_us"]
    return {
        f"{int(keys):,} keys: {side}": round(times[keys])
        for keys in ("512", "8192")
        for side, times in (("raykv", ours), ("plain dicts", plain))
    }


def _scale_bars(found: Any) -> dict[str, float]:
    return {
        f"{row['nodes']} nodes, {row['calls_per_s']:,.0f} calls/s": round(row["busy"], 2)
        for row in found["scale"]["results"]
    }


if __name__ == "__main__":
    for path, picture in draw_all().items():
        path.write_text(picture, encoding="utf-8")
