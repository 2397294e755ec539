"""The Grafana dashboard and the alert rules of a pool, made from the table of metrics."""

import re
from typing import Any, NamedTuple

from raykv.metrics.metric import METRICS, PREFIX

WIDTH, HEIGHT = 12, 8  # size of a panel in Grafana's units; a row has 24 units
POOL = '{pool=~"$pool"}'
RULES = "raykv_alerts.yml"
DASHBOARD = "raykv_grafana_dashboard.json"
_NAME = re.compile(r"@(\w+)")


class Panel:
    """A panel. unit: Grafana's name of the unit. lines: (legend, expression); `@name` stands for a metric's name."""

    def __init__(self, title: str, text: str, unit: str, *lines: tuple[str, str]) -> None:
        self.title, self.text, self.unit, self.lines = title, text, unit, lines


class Alert(NamedTuple):
    """An alert that fires when its expression has had results for at least `lasts`."""

    name: str
    lasts: str
    expression: str
    summary: str


PANELS = (
    Panel(
        "Hit rate",
        "Share of the blocks asked for that the pool had, by where they were.",
        "percentunit",
        ("{{source}}", "sum by (source) (rate(@hit_blocks_total[5m])) / scalar(sum(rate(@lookup_blocks_total[5m])))"),
    ),
    Panel(
        "Tokens saved",
        "Tokens a second that engines read instead of computing them.",
        "short",
        ("{{model}}", "sum by (model) (rate(@saved_tokens_total[5m]))"),
    ),
    Panel(
        "Prefill saved",
        "Estimate: number of engines that would be busy computing what was read.",
        "short",
        ("{{model}}", "sum by (model) (rate(@saved_prefill_seconds_total[5m]))"),
    ),
    Panel(
        "Memory in use",
        "Share of what each node offers.",
        "percentunit",
        (
            "{{node}} {{tier}}",
            "max by (node, tier) (@memory_used_bytes) / max by (node, tier) (@memory_capacity_bytes)",
        ),
    ),
    Panel(
        "Age of the coldest block",
        "How long ago the block that is evicted next was used: prompts that come back later are misses.",
        "s",
        ("{{node}} {{tier}}", "max by (node, tier) (@coldest_block_age_seconds)"),
    ),
    Panel(
        "Hit rate by memory",
        "Hit rates that half, twice and four times the memory would give, and any amount (ceiling).",
        "percentunit",
        ("{{times}}", "max by (times) (@hit_rate_by_memory)"),
    ),
    Panel(
        "Hit rate of tenants",
        "Share of the tokens that a tenant's engines asked for and the pool had.",
        "percentunit",
        (
            "{{tenant}}",
            "sum by (tenant) (rate(@hit_tokens_total[5m])) / sum by (tenant) (rate(@asked_tokens_total[5m]))",
        ),
    ),
    Panel(
        "Memory of tenants",
        "Memory of each tenant with a quota, beside its minimum and maximum; without a name: all others together.",
        "bytes",
        ("{{tenant}} uses", "max by (tenant) (@tenant_used_bytes)"),
        ("{{tenant}} minimum", "max by (tenant) (@tenant_minimum_bytes)"),
        ("{{tenant}} maximum", "max by (tenant) (@tenant_maximum_bytes)"),
    ),
    Panel(
        "Evictions, stores and refusals",
        "Blocks a second.",
        "short",
        ("evicted", "sum(rate(@evicted_blocks_total[5m]))"),
        ("stored", "sum(rate(@stored_blocks_total[5m]))"),
        ("refused", "sum(rate(@refused_blocks_total[5m])) or vector(0)"),
    ),
    Panel(
        "Traffic between nodes",
        "Bytes a second, by reader and source.",
        "Bps",
        ("{{from}} to {{node}} by {{transport}}", "sum by (from, node, transport) (rate(@pulled_bytes_total[5m]))"),
    ),
    Panel(
        "Reads",
        "Seconds of an engine's reads, pulls included.",
        "s",
        ("p50", "histogram_quantile(0.5, sum by (le) (rate(@read_seconds_bucket[5m])))"),
        ("p99", "histogram_quantile(0.99, sum by (le) (rate(@read_seconds_bucket[5m])))"),
    ),
    Panel(
        "The directory",
        "Processor time, as a share of a core; and how long a match takes: the mean, and the 99th percentile.",
        "short",
        ("busy", "sum(rate(@directory_cpu_seconds_total[5m]))"),
        (
            "seconds of a match",
            (
                'sum(rate(@directory_call_seconds_total{method=~"match|match_parts"}[5m]))'
                ' / sum(rate(@directory_calls_total{method=~"match|match_parts"}[5m]))'
            ),
        ),
        (
            "p99 of a match",
            'histogram_quantile(0.99, sum by (le) (rate(@directory_call_seconds_bucket{method="match"}[5m])))',
        ),
    ),
    Panel(
        "Clients and leases",
        "Processes that use the pool, and matches whose blocks are held.",
        "short",
        ("clients", "max by (pool) (@clients)"),
        ("leases", "max by (pool) (@leases)"),
    ),
    Panel(
        "External tier",
        "Share of its capacity that is in use.",
        "percentunit",
        ("{{node}}", "max by (node) (@external_used_bytes) / max by (node) (@external_capacity_bytes)"),
    ),
    Panel(
        "Faults",
        "Faults a minute that were treated as misses.",
        "short",
        ("{{kind}}", "60 * sum by (kind) (rate(@faults_total[5m]))"),
    ),
)

ALERTS = (
    Alert("RayKVDirectoryAway", "1m", "max by (pool) (@directory_up) == 0", "no directory answers: all look-ups miss"),
    Alert("RayKVStoreMissing", "2m", "max by (pool, node) (@store_up) == 0", "node {{ $labels.node }} has no store"),
    Alert("RayKVTierDown", "2m", "max by (pool, node) (@external_up) == 0", "the external tier can't be used"),
    Alert("RayKVFaults", "5m", "sum by (pool, kind) (rate(@faults_total[5m])) > 1", "many faults: {{ $labels.kind }}"),
    Alert(
        "RayKVNothingStored",
        "5m",
        "sum by (pool) (rate(@refused_blocks_total[5m])) > 0 and on (pool)"
        " sum by (pool) (rate(@stored_blocks_total[5m])) == 0",
        "all that engines store is refused: nodes are drained, or all memory is held",
    ),
    Alert(
        "RayKVTooSmall",
        "15m",
        "max by (pool, node) (@coldest_block_age_seconds) < 600 and on (pool, node)"
        " max by (pool, node) (@memory_used_bytes) / max by (pool, node) (@memory_capacity_bytes) > 0.9",
        "node {{ $labels.node }} evicts blocks that were used less than 10 minutes ago: give the pool more memory",
    ),
)


def expression(text: str, pool: str = "") -> str:
    """Return PromQL with the metric's full name for every `@name`. Raises KeyError for an unknown metric.

    pool: a selector to add to each metric, such as `{pool=~"$pool"}`; "" selects all pools.
    """

    def full(found: re.Match[str]) -> str:
        name = found[1]
        METRICS[name if name in METRICS else name.removesuffix("_bucket")]
        return f"ray_{PREFIX}{name}"

    with_names = _NAME.sub(full, text)
    if not pool:
        return with_names
    inner = pool[1:-1]
    return re.sub(rf"(ray_{PREFIX}\w+)(\{{)?", lambda m: f"{m[1]}{{{inner}{',' if m[2] else '}'}", with_names)


def dashboard() -> dict[str, Any]:
    """Return a dashboard in the form that Grafana imports."""
    return {
        "uid": "raykv",
        "title": "RayKV",
        "tags": ["ray", "raykv"],
        "timezone": "browser",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), _pools()]},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _pools() -> dict[str, Any]:
    query = f"label_values(ray_{PREFIX}clients, pool)"
    return {
        "name": "pool",
        "type": "query",
        "label": "Pool",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": "pools"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    columns = 24 // WIDTH
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": number % columns * WIDTH, "y": number // columns * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 10}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expression(text, POOL), "legendFormat": legend}
            for at, (legend, text) in enumerate(panel.lines)
        ],
    }


def rules() -> dict[str, Any]:
    """Return alert rules in the form that Prometheus reads."""
    found = [
        {
            "alert": alert.name,
            "expr": expression(alert.expression),
            "for": alert.lasts,
            "labels": {"severity": "warning"},
            "annotations": {"summary": f"raykv pool {{{{ $labels.pool }}}}: {alert.summary}"},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "raykv", "rules": found}]}
