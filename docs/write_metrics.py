"""Writes docs/metrics.md from the table of metrics: `python -m docs.write_metrics`."""

from itertools import groupby
from pathlib import Path

from raykv.metrics.metric import METRICS, PREFIX, Metric

PAGE = Path(__file__).parent / "metrics.md"
HEAD = f"""# Metrics

A pool exports its metrics through Ray: wherever Ray's own are scraped, these are there too, with nothing to install.
Ray puts `ray_` before each name and adds tags of its own (`WorkerId`, `NodeAddress`, `SessionName`). All of them have
the tag `pool`; `node` is a Ray node id. This page is written from `raykv/metrics/metric.py` by `python -m
docs.write_metrics`.

Counters are a process's own, so sum their rates: `sum(rate(ray_{PREFIX}saved_tokens_total[5m]))`. Those of the
directory go on from those of the directory before: its hit rate survives a take-over, and `max by (pool) (...)` is
the total since the pool started. A counter of what has never happened is not there yet.

Is the pool large enough? `ray_{PREFIX}coldest_block_age_seconds` is how long ago the block was used that a node evicts
next. Prompts that come back later than that are misses. If users return after ten minutes, an age of less calls for
more memory (`raykv resize`, a larger `cpu_memory`) or an external tier; an age of hours says that there is too much.

`tenant` is the name of a cache's [tenant](quotas.md#tenants), else the `pool.tenant_of(salt)` of the `salt`
of a cache or a prompt, and empty without either. A process tells 50 named tenants, 50 of
salts and 50 models apart; what comes after is `other`. In metrics of the directory it is empty for all tenants without
a quota together.

Where a client's process has set up OpenTelemetry, `match`, `pull`, `read` and `store` are spans (`raykv.match`, ...),
children of the span that is current, with the tokens or blocks and where they were as attributes. Spans of `aread` are
children of its caller's span. With vLLM, `match` and `read` are children of the span that the request's trace headers
name, beside vLLM's own `llm_request`: that one is made when the request is done, so it can't be their parent.

`raykv dashboard` writes a Grafana dashboard (`raykv_grafana_dashboard.json`) to where Ray provisions Grafana from, and
alert rules (`raykv_alerts.yml`) for Prometheus: a directory that is away, a node without a store, an external tier that
is down, many faults, a pool that is too small. The head's store does so too, at its start and when
the files are missing, where Ray's dashboard runs: Ray wipes that folder at its start. For another Grafana give `--out
FOLDER`, and import the dashboard by hand.
"""


def page() -> str:
    """The page's text."""
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
