"""The subcommands of `raykv bench`, and how their figures are printed."""

import json
import time
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from raykv.cli.options import JSON, TRANSPORT
from raykv.cli.spinner import spinner


@click.group()
def bench() -> None:
    """Measure raykv. Each figure stands beside its floor of the same run."""


@bench.command("local")
@click.option("--blocks", metavar="COUNTS", help="Adds a table by number of blocks of a call, such as 1,4,16,64.")
@click.option("--block-bytes", metavar="SIZES", help="Adds a table by block size, such as 64KiB,512KiB,2MiB.")
@JSON
def bench_local(blocks: str | None, block_bytes: str | None, as_json: bool) -> None:
    """Store, read and match on one node, against memcpy, an empty actor call and a socket."""
    from raykv.bench.blocks import block_sizes, local

    shapes = block_sizes.shapes(blocks or "16", block_bytes or "2MiB") if blocks or block_bytes else None
    _report(lambda: local.run(shapes), as_json)


@bench.command("cross")
@TRANSPORT
@click.option("--link", metavar="LINK", help="Over TCP on a link of this rate, delay and loss: 10gbit,1ms,0.1%.")
@JSON
def bench_cross(transport: str, link: str | None, as_json: bool) -> None:
    """Read from another node, against ray.get and a socket; or over a link, against iperf3."""
    from raykv.bench.blocks import cross
    from raykv.bench.blocks import link as shaped

    _report(lambda: shaped.run(link) if link else cross.run(transport), as_json)


@bench.command("directory")
@click.option("--entries", default=1_000_000, show_default=True)
@JSON
def bench_directory(entries: int, as_json: bool) -> None:
    """The directory's calls and memory, against plain dicts."""
    from raykv.bench.directory import directory

    _report(lambda: directory.run(entries), as_json)


@bench.command("scale")
@click.option("--nodes", default="8,64,128,256,1000", show_default=True, help="Numbers of nodes to try.")
@click.option("--entries", default=10_000_000, show_default=True, help="Blocks of all nodes together.")
@click.option("--seconds", default=10.0, show_default=True, help="How long each number of nodes is measured.")
@click.option("--take-over", default=0, help="Also kill the directory of a pool of so many nodes; 0: don't.")
@JSON
def bench_scale(nodes: str, entries: int, seconds: float, take_over: int, as_json: bool) -> None:
    """How many nodes one directory carries; processes that speak its protocol simulate the nodes."""
    from raykv.bench.directory import scale

    _report(lambda: scale.run([int(part) for part in nodes.split(",")], entries, seconds, take_over), as_json)


@bench.command("trace")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--nodes", default=8, show_default=True)
@click.option("--capacity", default="5000,10000,30000", show_default=True, help="Blocks of all nodes together.")
@click.option("--external", default=0, help="Blocks of all external tiers.")
@JSON
def bench_trace(file: str, nodes: int, capacity: str, external: int, as_json: bool) -> None:
    """Hit rate on a trace of Mooncake, Bailian or AgentX, against exact caches, by where the blocks were read."""
    from raykv.bench.trace import trace

    _report(lambda: trace.run(file, nodes, [int(part) for part in capacity.split(",")], external), as_json)


@bench.command("tiers")
@click.option("--directory", default="/var/tmp", show_default=True, help="A folder on the disk to measure.")
@JSON
def bench_tiers(directory: str, as_json: bool) -> None:
    """Store to and load from external tiers, against bare direct I/O and redis-py."""
    from raykv.bench.blocks import tiers

    _report(lambda: tiers.run(directory), as_json)


@bench.command("demotion")
@click.option("--directory", default="/var/tmp", show_default=True, help="A folder on the disk to measure.")
@JSON
def bench_demotion(directory: str, as_json: bool) -> None:
    """Store, read and match in memory while blocks are demoted to a disk, against the same without demotion."""
    from raykv.bench.blocks import demotion

    _report(lambda: demotion.run(directory), as_json)


@bench.command("ttft")
@click.option("--engine", type=click.Choice(["vllm"]), default="vllm", show_default=True)
@click.option(
    "--model",
    type=click.Choice(["llama-shape", "gpt-oss-shape", "gemma3-shape", "deepseek-shape", "qwen3-next-shape"]),
    default="llama-shape",
    show_default=True,
    help="Random weights. In order, layers keep: full KV, windows too, windows too, a latent, states too.",
)
@JSON
def bench_ttft(engine: str, model: str, as_json: bool) -> None:
    """A prompt's first token with the pool, against the engine's own prefix cache and no pool."""
    from raykv.bench.engines import ttft

    _report(lambda: ttft.run(model), as_json)


@bench.command("flight")
@JSON
def bench_flight(as_json: bool) -> None:
    """Ask two engines for one prompt many times at once: how often it is computed, with the pool and without."""
    from raykv.bench.engines import flight

    _report(flight.run, as_json)


@bench.command("pd")
@JSON
def bench_pd(as_json: bool) -> None:
    """A decode engine's first token after another engine's prefill, against its own prefix cache."""
    from raykv.bench.engines import pd

    _report(pd.run, as_json)


@bench.command("start")
@JSON
def bench_start(as_json: bool) -> None:
    """Start a pool on two nodes, against an empty detached actor on each node."""
    from raykv.bench import start

    _report(start.run, as_json)


@bench.command("route")
@JSON
def bench_route(as_json: bool) -> None:
    """Time that PrefixRouter adds to a request of Ray Serve, against an empty actor call."""
    from raykv.bench.engines import route

    _report(route.run, as_json)


@bench.command("gpu")
@JSON
def bench_gpu(as_json: bool) -> None:
    """Copies of a GPU tier, against the same copies by cudaMemcpyAsync."""
    from raykv.bench.blocks import gpu

    _report(gpu.run, as_json)


def _report(run: Callable[[], dict[str, Any]], as_json: bool) -> None:
    begin = time.monotonic()
    with spinner("measuring"):
        figures = run()
    figures["seconds"] = round(time.monotonic() - begin, 1)
    if as_json:
        click.echo(json.dumps(figures))
        return
    rows = figures.pop("results", None)
    console = Console()
    if rows:
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*(_number(value) for value in row.values()))
        console.print(table)
    table = Table("figure", "value", show_header=False)
    for name, value in figures.items():
        table.add_row(name, _number(value))
    console.print(table)


def _number(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
