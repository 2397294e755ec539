"""Writes docs/metrics.md from the table of metrics: `python -m docs.write_metrics`."""

from itertools import groupby
from pathlib import Path

from raykv.metrics.metric import METRICS, PREFIX, Metric

PAGE = Path(__file__).parent / "metrics.md"
HEAD = f"""# Metrics

A pool exports its metrics through Ray, beside Ray's own. Ray puts `ray_` before each name and adds tags of its own
(`WorkerId`, `NodeAddress`, `SessionName`). All metrics have the tag `pool`; `node` is a Ray node id. `python -m
docs.write_metrics` writes this page from `raykv/metrics/metric.py`.

Each process has its own counters, so sum their rates: `sum(rate(ray_{PREFIX}saved_tokens_total[5m]))`. A new directory
continues the old directory's counters: the hit rate goes on, and `max by (pool) (...)` is the total since the pool
started. A counter appears when its event first happens.

Is the pool large enough? `ray_{PREFIX}coldest_block_age_seconds` is the time since the last use of the block that a
node evicts next. Prompts that return later than that are misses. If users return after ten minutes and this age is
shorter, the pool needs more memory (`raykv resize`, a larger `cpu_memory`) or an external tier. An age of hours means
too much memory.

`tenant` is the name of a cache's [tenant](quotas.md#tenants), else `pool.tenant_of(salt)` of the salt of a cache or
prompt, else empty. A process tells 50 named tenants, 50 tenants of salts and 50 models apart; the rest are `other`. The
directory's metrics have one empty `tenant` for all tenants without a quota.

If a client has set up OpenTelemetry, `match`, `pull`, `read` and `store` are spans (`raykv.match`, ...), with the
tokens or blocks and their places as attributes. They are children of the current span; for `aread`, of its caller's
span. With vLLM, `match` and `read` are children of the span that the request's trace headers name. They are siblings of
vLLM's `llm_request`, as vLLM makes it when the request is done.

`raykv dashboard` writes a Grafana dashboard (`raykv_grafana_dashboard.json`) to the folder from which Ray provisions
Grafana, and alert rules (`raykv_alerts.yml`) for Prometheus: no directory answers, a node has no store, an external
tier is down, many faults, the pool is too small. Ray empties this folder at its start. With Ray's dashboard, the
store on Ray's head writes both files at its start and if one is missing. For another Grafana give `--out FOLDER`, and
import the dashboard by hand.
"""


def page() -> str:
    """Return the page's text."""
    parts = [HEAD]
    for by, metrics in groupby(METRICS.items(), key=lambda item: item[1].by):
        parts += [f"\n## Of {f'every {by}' if by in ('client', 'actor') else f'the {by}'}\n"]
        parts += ["| name | kind | tags | what it says |", "| --- | --- | --- | --- |"]
        parts += [_row(name, metric) for name, metric in metrics]
    return "\n".join(parts) + "\n"


def _row(name: str, metric: Metric) -> str:
    tags = ", ".join(f"`{tag}`" for tag in metric.tags)
    return f"| `ray_{PREFIX}{name}` | {metric.kind} | {tags} | {metric.text} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
