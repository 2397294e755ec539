"""Every metric of a pool, by name. docs/metrics.md is written from this table."""

from typing import NamedTuple

PREFIX = "raykv_"  # Ray puts `ray_` before it
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # upper bounds of histograms' buckets

CALL_SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5)  # of the directory


class Metric(NamedTuple):
    """kind: counter, gauge or histogram. tags: beside `pool`, which all have. by: the process that exports it."""

    kind: str
    by: str
    text: str
    tags: tuple[str, ...] = ()


def _by(process: str, *metrics: tuple[str, str, str, tuple[str, ...]]) -> dict[str, Metric]:
    return {name: Metric(kind, process, text, tags) for name, kind, text, tags in metrics}


NODE, MEMORY, ROUTE, MODEL = ("node",), ("node", "tier"), ("node", "from", "transport"), ("node", "model", "tenant")
TENANT = ("tenant",)

METRICS: dict[str, Metric] = {
    **_by(
        "actor",
        ("start_time_seconds", "gauge", "Unix time when the directory, store or supervisor started.", ("node", "role")),
    ),
    **_by(
        "directory",
        ("lookup_blocks_total", "counter", "Blocks that were asked for.", ()),
        ("hit_blocks_total", "counter", "Blocks that were found, by where: memory, gpu, node, external.", ("source",)),
        ("stored_blocks_total", "counter", "Blocks that were written and offered.", ()),
        ("refused_blocks_total", "counter", "Blocks that found no room.", ()),
        ("corrupt_blocks_total", "counter", "Blocks that were not what the directory said, and were forgotten.", ()),
        ("evicted_blocks_total", "counter", "Blocks that were evicted, from memory or an external tier.", ()),
        ("preempted_requests_total", "counter", "Requests of which blocks were swapped out.", ()),
        ("blocks", "gauge", "Different blocks that the pool has.", ()),
        ("pinned_blocks", "gauge", "Blocks that stay until they are unpinned.", ()),
        ("clients", "gauge", "Processes that use the pool.", ()),
        ("leases", "gauge", "Matches whose blocks are held for their reader.", ()),
        ("oldest_lease_seconds", "gauge", "How long the oldest lease has been held.", ()),
        ("reservations", "gauge", "Stores that are under way.", ()),
        ("directory_epoch", "gauge", "Rises with every directory that takes charge.", ()),
        ("directory_calls_total", "counter", "Calls of the directory.", ("method",)),
        (
            "directory_call_seconds_total",
            "counter",
            "Seconds that the directory took for them; of frequent ones every eighth is timed, for eight.",
            ("method",),
        ),
        (
            "directory_call_seconds_bucket",
            "gauge",
            "Calls that took up to `le` seconds since this directory started, for histogram_quantile.",
            ("method", "le"),
        ),
        ("directory_cpu_seconds_total", "counter", "Processor seconds of the directory's process.", ()),
        ("memory_capacity_bytes", "gauge", "Memory that a node, or one of its GPUs, offers.", MEMORY),
        ("memory_used_bytes", "gauge", "Of it, what is in use.", MEMORY),
        ("memory_blocks", "gauge", "Slots by what is in them: ready, replica, writing, ...", (*MEMORY, "state")),
        ("memory_alive", "gauge", "1 while the node's store reports to the directory, else 0.", MEMORY),
        ("coldest_block_age_seconds", "gauge", "Since the block that is evicted next was used.", MEMORY),
        ("tenant_used_bytes", "gauge", "Memory of a tenant's blocks, each counted once.", TENANT),
        ("tenant_minimum_bytes", "gauge", "Memory that others can't take from a tenant.", TENANT),
        ("tenant_maximum_bytes", "gauge", "Memory that a tenant can have.", TENANT),
        ("tenant_evicted_blocks_total", "counter", "Blocks of a tenant that made room for others.", TENANT),
        ("external_capacity_bytes", "gauge", "Capacity of an external tier; node `shared`: of all nodes.", NODE),
        ("external_used_bytes", "gauge", "Of it, what is in use.", NODE),
        ("external_blocks", "gauge", "Blocks in an external tier.", NODE),
        ("external_up", "gauge", "1 while an external tier can be used, else 0.", NODE),
        ("demoted_blocks_total", "counter", "Blocks that were copied to an external tier.", NODE),
    ),
    **_by(
        "node store",
        ("pulled_bytes_total", "counter", "Bytes pulled from another node.", ROUTE),
        ("pull_seconds_total", "counter", "Seconds that those pulls took, added up.", ROUTE),
        ("pull_failures_total", "counter", "Pulls that failed: another transport is tried then.", ROUTE),
        ("altered_blocks_total", "counter", "Blocks that did not fit their checksum on arrival.", NODE),
        ("external_faults_total", "counter", "What went wrong with an external tier.", ("node", "kind")),
    ),
    **_by(
        "supervisor",
        ("ray_nodes", "gauge", "Living nodes of the Ray cluster.", ()),
        ("store_up", "gauge", "1 if the node has a store that lives, else 0.", NODE),
        ("directory_up", "gauge", "1 if a directory answers the supervisor, else 0.", ()),
    ),
    **_by(
        "client",
        ("lookups_total", "counter", "Requests for which engines asked.", MODEL),
        ("asked_tokens_total", "counter", "Tokens of the blocks that engines asked for.", MODEL),
        ("hit_tokens_total", "counter", "Of them, those found, by where: memory, node, external.", (*MODEL, "source")),
        ("saved_tokens_total", "counter", "Tokens that engines read instead of computing them.", MODEL),
        ("saved_prefill_seconds_total", "counter", "Estimate of how long that would have taken.", MODEL),
        ("read_seconds", "histogram", "Reads of an engine, pulls included.", NODE),
        ("read_bytes_total", "counter", "Bytes that engines read.", NODE),
        ("store_seconds", "histogram", "Stores of an engine.", NODE),
        ("written_bytes_total", "counter", "Bytes that engines stored.", NODE),
        (
            "without_directory_seconds_total",
            "counter",
            "Seconds in which look-ups missed: no directory answered.",
            NODE,
        ),
        ("faults_total", "counter", "What went wrong for a client and was treated as a miss.", ("node", "kind")),
    ),
}
