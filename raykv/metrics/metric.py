"""Every metric of a pool, by name. docs/metrics.md is written from this table."""

from typing import NamedTuple

PREFIX = "raykv_"  # Ray puts `ray_` before it
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # upper bounds of histograms' buckets
# upper bounds of the buckets for calls of the directory
CALL_SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5)


class Metric(NamedTuple):
    """kind: counter, gauge or histogram. tags: all tags except `pool`. by: the process that exports it."""

    kind: str
    by: str
    text: str
    tags: tuple[str, ...] = ()


def _by(process: str, *metrics: tuple[str, str, tuple[str, ...]]) -> dict[str, Metric]:
    return {name: Metric(_kind(name), process, text, tags) for name, text, tags in metrics}


def _kind(name: str) -> str:
    return "counter" if name.endswith("_total") else "histogram" if name in HISTOGRAMS else "gauge"


HISTOGRAMS = ("read_seconds", "store_seconds")
NODE, MEMORY, ROUTE, MODEL = ("node",), ("node", "tier"), ("node", "from", "transport"), ("node", "model", "tenant")
TENANT = ("tenant",)

METRICS: dict[str, Metric] = {
    **_by(
        "actor",
        ("start_time_seconds", "Unix time when the directory, store or supervisor started.", ("node", "role")),
    ),
    **_by(
        "directory",
        ("lookup_blocks_total", "Blocks that look-ups asked for.", ()),
        ("hit_blocks_total", "Blocks that look-ups found, by place: memory, gpu, node, external.", ("source",)),
        (
            "hit_rate_by_memory",
            "Estimate, from a sample, of the hit rate with `times` as much memory (ceiling: any amount).",
            ("times",),
        ),
        ("stored_blocks_total", "Blocks that were stored.", ()),
        ("refused_blocks_total", "Blocks that found no room.", ()),
        ("corrupt_blocks_total", "Blocks that a reader found altered or missing; the directory forgot them.", ()),
        ("evicted_blocks_total", "Blocks that were evicted from memory or from an external tier.", ()),
        ("done_blocks_total", "Copies of blocks that their users were done with.", ()),
        ("kept_blocks_total", "Blocks that their users asked to keep until a time.", ()),
        ("preempted_requests_total", "Requests that engines swapped out.", ()),
        ("blocks", "Different blocks that the pool has.", ()),
        ("pinned_blocks", "Blocks that stay until they are unpinned.", ()),
        ("clients", "Processes that use the pool.", ()),
        ("leases", "Matches whose blocks are held for their reader.", ()),
        ("oldest_lease_seconds", "How long the oldest lease has been held.", ()),
        ("reservations", "Stores in progress.", ()),
        ("directory_epoch", "Rises with every directory that takes charge.", ()),
        ("directory_calls_total", "Calls of the directory.", ("method",)),
        (
            "directory_call_seconds_total",
            "Seconds that the directory's calls took. Of frequent calls, every eighth is timed and counts for eight.",
            ("method",),
        ),
        (
            "directory_call_seconds_bucket",
            "Calls since this directory started that took at most `le` seconds, for histogram_quantile.",
            ("method", "le"),
        ),
        ("directory_cpu_seconds_total", "Processor seconds of the directory's process.", ()),
        ("memory_capacity_bytes", "Memory that a node, or one of its GPUs, offers.", MEMORY),
        ("memory_used_bytes", "Memory in use of a node, or of one of its GPUs.", MEMORY),
        ("memory_blocks", "Places for blocks, by state: ready, replica, writing, ...", (*MEMORY, "state")),
        ("memory_alive", "1 while the node's store reports to the directory, else 0.", MEMORY),
        (
            "coldest_block_age_seconds",
            "Time since the last use of the block that is evicted next, apart from `done` blocks.",
            MEMORY,
        ),
        ("tenant_used_bytes", "Memory of a tenant's blocks, each counted once.", TENANT),
        ("tenant_minimum_bytes", "Memory that others can't take from a tenant.", TENANT),
        ("tenant_maximum_bytes", "Memory that a tenant can have.", TENANT),
        ("tenant_evicted_blocks_total", "Blocks of a tenant that made room for others.", TENANT),
        ("external_capacity_bytes", "Capacity of an external tier. `shared` is the tier of all nodes.", NODE),
        ("external_used_bytes", "Bytes in use in an external tier.", NODE),
        ("external_blocks", "Blocks in an external tier.", NODE),
        ("external_up", "1 while an external tier can be used, else 0.", NODE),
        ("demoted_blocks_total", "Blocks that were copied to an external tier.", NODE),
    ),
    **_by(
        "node store",
        ("pulled_bytes_total", "Bytes pulled from another node.", ROUTE),
        ("pull_seconds_total", "Sum of the seconds that pulls took.", ROUTE),
        ("pull_failures_total", "Failed pulls. After each, another transport is tried.", ROUTE),
        ("altered_blocks_total", "Blocks that did not match their checksum on arrival.", NODE),
        ("external_faults_total", "Faults of an external tier.", ("node", "kind")),
    ),
    **_by(
        "supervisor",
        ("ray_nodes", "Living nodes of the Ray cluster.", ()),
        ("store_up", "1 if the node has a living store, else 0.", NODE),
        ("directory_up", "1 if a directory answers the supervisor, else 0.", ()),
    ),
    **_by(
        "client",
        ("lookups_total", "Requests that engines looked up.", MODEL),
        ("asked_tokens_total", "Tokens of the blocks that engines asked for.", MODEL),
        ("hit_tokens_total", "Tokens that were found, by place: memory, node, external.", (*MODEL, "source")),
        ("saved_tokens_total", "Tokens that engines read instead of computing them.", MODEL),
        (
            "saved_prefill_seconds_total",
            "Estimate of the seconds that computing the saved tokens would have taken.",
            MODEL,
        ),
        ("read_seconds", "Seconds of an engine's reads, pulls included.", NODE),
        ("read_bytes_total", "Bytes that engines read.", NODE),
        ("store_seconds", "Seconds of an engine's stores.", NODE),
        ("written_bytes_total", "Bytes that engines stored.", NODE),
        ("without_directory_seconds_total", "Seconds in which look-ups missed because no directory answered.", NODE),
        ("faults_total", "Faults of a client that were treated as misses.", ("node", "kind")),
    ),
}
