"""The `raykv` command."""

import json
import time
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from raykv.config import TRANSPORTS, WRITE_SHARES, PoolConfig
from raykv.errors import PoolNotFound, RayKVError

SIZE = "A fraction of the node's memory (0.3), or bytes (20GiB, 500MB, 1073741824)."
NAME = click.option("--name", default="default", show_default=True, help="Name of the pool.")
TRANSPORT = click.option(
    "--transport", type=click.Choice(TRANSPORTS), default="auto", show_default=True, help="How blocks cross nodes."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line.")


class Commands(click.Group):
    """Says what a user can do about an error, without a traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (RayKVError, ImportError, ValueError) as error:
            raise click.ClickException(str(error)) from error
        except Exception as error:
            from ray.exceptions import RayError

            if isinstance(error, RayError):
                raise click.ClickException(f"the pool does not answer, try again: {error}") from error
            if isinstance(error, TimeoutError):
                raise click.ClickException(str(error)) from error
            raise


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="raykv", message="raykv %(version)s")
def main() -> None:
    """A KV-cache pool inside a Ray cluster."""


@main.command()
@NAME
@click.option("--cpu-memory", metavar="SIZE", default="0.3", show_default=True, help=SIZE)
@click.option("--gpu-memory", metavar="SIZE", default="0", show_default=True, help="The same of every GPU; 0: no tier.")
@click.option("--locality", type=float, default=1.5, show_default=True, help="1: exact LRU over all nodes.")
@TRANSPORT
@click.option("--external", help="External tier: file:///mnt/nvme/raykv?capacity=200GiB, redis://..., s3://...")
@click.option(
    "--write", type=click.Choice(list(WRITE_SHARES)), default="back", show_default=True, help="Old blocks; all; none."
)
@click.option("--min-hits", default=0, show_default=True, help="Matches that a block needs before the tier gets it.")
@click.option("--secret-file", type=click.Path(exists=True, dir_okay=False), help="What keys are derived from (0600).")
@click.option("--exist-ok", is_flag=True, help="Take a pool that runs with other settings as it is.")
@JSON
def start(name: str, secret_file: str | None, exist_ok: bool, as_json: bool, **settings: Any) -> None:
    """Start a pool on every node of the Ray cluster that runs here."""
    import raykv
    from raykv.cli import shell

    config = PoolConfig(name, secret=secret_file, **settings)
    shell.join(name)
    with _spinner(f"starting pool {name}") as spinner:

        def compiled(done: int, kernels: int) -> None:
            what = f"starting pool {name}: compiling its kernels, {done} of {kernels}"
            spinner.update(spinner.task_ids[0], description=what, completed=done, total=kernels)

        raykv.start(config, exist_ok=exist_ok, on_progress=compiled).close()
    _status(name, as_json)


@main.command()
@NAME
def stop(name: str) -> None:
    """End a pool, or what is left of one, and give its memory back."""
    from raykv.cli import shell
    from raykv.client.stop import stop_pool

    shell.join(name)
    with _spinner(f"stopping pool {name}"):
        if not stop_pool(name):
            raise PoolNotFound(f"no pool {name!r} runs in this Ray cluster, and no memory is left of one")


@main.command()
@NAME
@JSON
def status(name: str, as_json: bool) -> None:
    """Every Ray node and its part in the pool, how full tiers are, where hits come from, and faults."""
    from raykv.cli import shell

    shell.administer(name)
    _status(name, as_json)


@main.command()
@NAME
def top(name: str) -> None:
    """What `raykv status` shows, live: q quits, s sorts the nodes by something else."""
    from raykv.cli import shell
    from raykv.cli.top import run

    shell.administer(name)
    run(name)


@main.command()
@NAME
@click.option("--host", help="Address to listen at. Default: 127.0.0.1 of Ray's head.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port. Default: 8270; 0: any that is free.")
@click.option("--stop", "end", is_flag=True, help="Serve the page no more.")
@JSON
def ui(name: str, host: str | None, port: int | None, end: bool, as_json: bool) -> None:
    """Have a page of the pool served from Ray's head: nodes, hits, traffic, faults and events since then."""
    from raykv.cli import shell
    from raykv.cli import ui as pages

    shell.administer(name)
    if end:
        pages.stop(name)
        return
    with _spinner(f"serving a page of pool {name}"):
        page = pages.serve(name, host, port)
    click.echo(json.dumps({"url": page.url}) if as_json else pages.said(page))


@main.command()
@NAME
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a request.")
def trace(name: str, as_json: bool) -> None:
    """Requests as they are done: what they asked, found and read, how long that took, and why a hit was short."""
    from raykv.cli import shell
    from raykv.cli.trace import run

    shell.administer(name)
    run(name, as_json)


@main.command()
@NAME
@JSON
def clear(name: str, as_json: bool) -> None:
    """Forget every block of a pool."""
    from raykv.cli import shell

    keys = shell.administer(name).clear()
    click.echo(json.dumps({"cleared": keys}) if as_json else f"{keys} blocks forgotten")


@main.command()
@click.argument("node", required=False)
@click.option("--self", "own", is_flag=True, help="The node that this command runs on, as a preStop hook wants it.")
@click.option("--deadline", default=60.0, show_default=True, help="Seconds.")
@NAME
@JSON
def drain(node: str | None, own: bool, deadline: float, name: str, as_json: bool) -> None:
    """Empty a node that is about to leave: as `raykv status` shows it, by node or by host.

    What is left past the deadline is no error.
    """
    from raykv.cli import shell
    from raykv.cli.ray_nodes import find_node, living_nodes

    if own == (node is not None):
        raise click.UsageError("give a node as `raykv status` shows it, or --self")
    pool = shell.administer(name)
    found = find_node(node or pool.own_node(), living_nodes())
    with _spinner(f"draining node {found.node_id[:8]} on {found.host}"):
        left = pool.drain(found.node_id, deadline)
    click.echo(json.dumps({"left": left}) if as_json else f"{left} blocks are on no other node")


@main.command()
@click.argument("node")
@click.option("--cpu-memory", metavar="SIZE", required=True, help=SIZE)
@click.option("--deadline", default=60.0, show_default=True, help="Seconds.")
@NAME
@JSON
def resize(node: str, cpu_memory: str, deadline: float, name: str, as_json: bool) -> None:
    """Give a node, as `raykv status` shows it, more memory, or less, while the pool is in use."""
    from raykv.cli import shell
    from raykv.cli.ray_nodes import find_node, living_nodes

    pool = shell.administer(name)
    found = find_node(node, living_nodes())
    with _spinner(f"resizing node {found.node_id[:8]} on {found.host}"):
        size = pool.resize(found.node_id, cpu_memory, deadline)
    click.echo(json.dumps({"bytes": size}) if as_json else f"the node has {size / (1 << 30):.2f} GiB now")


@main.group(invoke_without_command=True)
@NAME
@JSON
@click.pass_context
def quota(context: click.Context, name: str, as_json: bool) -> None:
    """What tenants have of a pool's memory at least and at most, and what each uses."""
    from raykv.cli import shell
    from raykv.cli.status import quota_rows, table

    if context.invoked_subcommand is None:
        quotas = shell.administer(name).quotas()
        click.echo(json.dumps({"tenants": quotas}) if as_json else "\n".join(table(quota_rows(quotas))))


SHARE = click.FloatRange(0, 1)


def _own_or_group_name(context: click.Context) -> str:
    """The pool that `--name` says after the subcommand, else the one that it says before."""
    after = context.get_parameter_source("name") is not ParameterSource.DEFAULT
    given = context if after or context.parent is None else context.parent
    return str(given.params["name"])


@quota.command("set")
@click.argument("tenant")
@click.option("--minimum", type=SHARE, default=0.0, show_default=True, help="A share that no other tenant takes.")
@click.option("--maximum", type=SHARE, default=1.0, show_default=True, help="The most that it can have; 1: no limit.")
@NAME
@click.pass_context
def quota_set(context: click.Context, tenant: str, minimum: float, maximum: float, name: str) -> None:
    """Set a tenant's quota, in the place of the one that it had."""
    from raykv.cli import shell

    shell.administer(_own_or_group_name(context)).set_quota(tenant, minimum, maximum)


@quota.command("remove")
@click.argument("tenant")
@NAME
@click.pass_context
def quota_remove(context: click.Context, tenant: str, name: str) -> None:
    """Have a tenant share what is left with all that have no quota."""
    from raykv.cli import shell

    if not shell.administer(_own_or_group_name(context)).remove_quota(tenant):
        raise click.ClickException(f"tenant {tenant!r} has no quota: see `raykv quota`")


@main.command()
@click.option("--out", metavar="FOLDER", help="Where to; default: where Ray provisions Grafana from, on the head.")
def dashboard(out: str | None) -> None:
    """Write a Grafana dashboard and Prometheus alert rules for all pools."""
    from raykv.cli.dashboard import write

    for path in write(out):
        click.echo(path)


@main.command()
@click.option("--name", help="Of a pool that runs: look at its stores, and have blocks cross between its nodes.")
@JSON
@click.pass_context
def doctor(context: click.Context, name: str | None, as_json: bool) -> None:
    """Look at every node for what a pool lacks there, and say what to do. Exits with 1 where something is wrong."""
    from raykv.cli.doctor import Report

    with _spinner("looking at every node"):
        report = Report(name)
    if as_json:
        click.echo(report.json())
    else:
        report.show()
    context.exit(0 if report.ok else 1)


@main.command()
@click.option("--requests", default=12, show_default=True, type=click.IntRange(1), help="How many questions are asked.")
@click.option(
    "--nodes", default=2, show_default=True, type=click.IntRange(1), help="Ray nodes, with an engine on each."
)
@click.option("--seed", default=0, show_default=True, help="Of the model's weights and the questions.")
@JSON
def demo(requests: int, nodes: int, seed: int, as_json: bool) -> None:
    """Two engines on two Ray nodes of this machine share what they have read."""
    from raykv.cli.demo import run

    if not run(requests, nodes, seed, as_json):
        raise click.ClickException("tokens differ from those without the pool")


@main.group()
def bench() -> None:
    """Measure, each figure beside its floor of the same run."""


@bench.command("local")
@click.option("--blocks", metavar="COUNTS", help="Also a table by blocks of a call: 1,4,16,64, say.")
@click.option("--block-bytes", metavar="SIZES", help="Also a table by block size: 64KiB,512KiB,2MiB, say.")
@JSON
def bench_local(blocks: str | None, block_bytes: str | None, as_json: bool) -> None:
    """Store and read on one node, against memcpy, an empty actor call and a socket."""
    from raykv.bench import block_sizes, local

    shapes = block_sizes.shapes(blocks or "16", block_bytes or "2MiB") if blocks or block_bytes else None
    _report(lambda: local.run(shapes), as_json)


@bench.command("cross")
@TRANSPORT
@click.option("--link", metavar="LINK", help="Over TCP on a link of this rate, delay and loss: 10gbit,1ms,0.1%.")
@JSON
def bench_cross(transport: str, link: str | None, as_json: bool) -> None:
    """Read from another node, against ray.get and a socket; or over a link, against iperf3."""
    from raykv.bench import cross
    from raykv.bench import link as shaped

    _report(lambda: shaped.run(link) if link else cross.run(transport), as_json)


@bench.command("directory")
@click.option("--entries", default=1_000_000, show_default=True)
@JSON
def bench_directory(entries: int, as_json: bool) -> None:
    """The directory's calls and memory, against plain dicts."""
    from raykv.bench import directory

    _report(lambda: directory.run(entries), as_json)


@bench.command("scale")
@click.option("--nodes", default="8,64,128,256,1000", show_default=True, help="Numbers of nodes to try.")
@click.option("--entries", default=10_000_000, show_default=True, help="Blocks of all nodes together.")
@click.option("--seconds", default=10.0, show_default=True, help="How long each number of nodes is measured.")
@click.option("--take-over", default=0, help="Kill the directory of a pool of so many nodes, too; 0: of none.")
@JSON
def bench_scale(nodes: str, entries: int, seconds: float, take_over: int, as_json: bool) -> None:
    """How many nodes one directory carries, simulated by processes that speak its protocol."""
    from raykv.bench import scale

    _report(lambda: scale.run([int(part) for part in nodes.split(",")], entries, seconds, take_over), as_json)


@bench.command("trace")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--nodes", default=8, show_default=True)
@click.option("--capacity", default="5000,10000,30000", show_default=True, help="Blocks of all nodes together.")
@click.option("--external", default=0, help="Blocks of their external tiers.")
@JSON
def bench_trace(file: str, nodes: int, capacity: str, external: int, as_json: bool) -> None:
    """Hit rate on a trace in Mooncake's format, against exact LRU and isolated caches."""
    from raykv.bench import trace

    _report(lambda: trace.run(file, nodes, [int(part) for part in capacity.split(",")], external), as_json)


@bench.command("schedule")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--blocks", default=5000, show_default=True, help="Blocks of the engine, of 512 tokens.")
@click.option("--tokens-per-s", default=20_000.0, show_default=True, help="What the engine computes.")
@click.option("--slower", default=1.0, show_default=True, help="How many times as long the trace takes.")
@click.option("--offset", default=0, show_default=True, help="The request to begin with.")
@JSON
def bench_schedule(file: str, blocks: int, tokens_per_s: float, slower: float, offset: int, as_json: bool) -> None:
    """What one engine computes of a trace, and how long requests wait, by who is scheduled first."""
    from raykv.bench import schedule

    _report(lambda: schedule.run(file, blocks, tokens_per_s, slower, offset), as_json)


@bench.command("tiers")
@click.option("--directory", default="/var/tmp", show_default=True, help="On the disk to measure.")
@JSON
def bench_tiers(directory: str, as_json: bool) -> None:
    """Store to and load from external tiers, against bare direct I/O and redis-py."""
    from raykv.bench import tiers

    _report(lambda: tiers.run(directory), as_json)


@bench.command("demotion")
@click.option("--directory", default="/var/tmp", show_default=True, help="On the disk to measure.")
@JSON
def bench_demotion(directory: str, as_json: bool) -> None:
    """Store, read and match in memory while blocks are demoted to a disk, against the same while none are."""
    from raykv.bench import demotion

    _report(lambda: demotion.run(directory), as_json)


@bench.command("ttft")
@click.option("--engine", type=click.Choice(["vllm"]), default="vllm", show_default=True)
@click.option(
    "--model",
    type=click.Choice(["llama-shape", "gpt-oss-shape", "gemma3-shape", "deepseek-shape", "qwen3-next-shape"]),
    default="llama-shape",
    show_default=True,
    help="Random weights; what its layers keep: all of it, with windows beside it, a latent, or states beside it.",
)
@JSON
def bench_ttft(engine: str, model: str, as_json: bool) -> None:
    """A prompt's first token with the pool, against the engine's own prefix cache and no pool."""
    from raykv.bench import ttft

    _report(lambda: ttft.run(model), as_json)


@bench.command("flight")
@JSON
def bench_flight(as_json: bool) -> None:
    """One prompt, asked of two engines many times at once: how often it is computed, with the pool and without."""
    from raykv.bench import flight

    _report(flight.run, as_json)


@bench.command("pd")
@JSON
def bench_pd(as_json: bool) -> None:
    """A decode engine's first token after another engine's prefill, against its own prefix cache."""
    from raykv.bench import pd

    _report(pd.run, as_json)


@bench.command("start")
@JSON
def bench_start(as_json: bool) -> None:
    """Start a pool on two nodes, against an empty detached actor a node."""
    from raykv.bench import start

    _report(start.run, as_json)


@bench.command("route")
@JSON
def bench_route(as_json: bool) -> None:
    """What PrefixRouter adds to a request of Ray Serve, against an empty actor call."""
    from raykv.bench import route

    _report(route.run, as_json)


@bench.command("gpu")
@JSON
def bench_gpu(as_json: bool) -> None:
    """Copies of a GPU tier, against the same copies by cudaMemcpyAsync."""
    from raykv.bench import gpu

    _report(gpu.run, as_json)


def _spinner(text: str) -> Progress:
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    progress.add_task(text, total=None)
    return progress


def _report(run: Callable[[], dict[str, Any]], as_json: bool) -> None:
    begin = time.monotonic()
    with _spinner("measuring"):
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


def _status(name: str, as_json: bool) -> None:
    from raykv.cli import status
    from raykv.cli.overview import look

    overview = look(name)
    if as_json:
        click.echo(json.dumps(overview.as_json()))
    else:
        status.show(overview)
