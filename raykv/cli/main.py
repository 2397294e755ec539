"""The `raykv` command."""

import json
import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click
from ray.exceptions import RayError

import raykv
from raykv.cli import shell
from raykv.cli.bench import bench
from raykv.cli.options import JSON, NAME, SIZE, TRANSPORT, YES
from raykv.cli.spinner import spinner
from raykv.cli.status.status import grow, held_by, quota_rows, resized, show, table
from raykv.cli.trace import run as run_trace
from raykv.client.stop import stop_pool
from raykv.config import METADATA_DEADLINE_S, WRITE_SHARES, PoolConfig
from raykv.errors import PoolNotFound, RayKVError
from raykv.metrics import dashboard_files
from raykv.ui.overview import look
from raykv.ui.ray_nodes import find_node, living_nodes


class Commands(click.Group):
    """Prints errors without a traceback. Their text says what a user can do."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (RayKVError, ImportError, ValueError) as error:
            raise click.ClickException(str(error)) from error
        except RayError as error:
            raise click.ClickException(f"the pool does not answer, try again: {error}") from error
        except TimeoutError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="raykv", message="raykv %(version)s")
def main() -> None:
    """A KV-cache pool inside a Ray cluster."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale may lack characters that commands print


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
@click.option(
    "--deadline",
    default=METADATA_DEADLINE_S,
    show_default=True,
    help="Seconds for an answer of the directory; a later answer is a miss.",
)
@click.option(
    "--idle-node-s",
    default=0.0,
    show_default=True,
    help="Leave a node to Ray's autoscaler if nothing else ran there for so long; 0: never.",
)
@click.option("--secret-file", type=click.Path(exists=True, dir_okay=False), help="File with the keys' secret (0600).")
@click.option("--exist-ok", is_flag=True, help="Take a pool that runs with other settings as it is.")
@JSON
def start(name: str, secret_file: str | None, exist_ok: bool, as_json: bool, **settings: Any) -> None:
    """Start a pool on every node of this machine's Ray cluster."""
    config = PoolConfig(name, secret=secret_file, **settings)
    shell.join(name)
    with spinner(f"starting pool {name}") as progress:

        def compiled(done: int, kernels: int) -> None:
            what = f"starting pool {name}: compiling its kernels, {done} of {kernels}"
            progress.update(progress.task_ids[0], description=what, completed=done, total=kernels)

        raykv.start(config, exist_ok=exist_ok, on_progress=compiled).close()
    if sys.stdout.isatty():
        grow(name)
    _status(name, as_json)


@main.command()
@NAME
@YES
def stop(name: str, yes: bool) -> None:
    """End a pool, or the rest of a broken pool, and free its memory."""
    shell.join(name)
    if held := held_by(name):
        shell.confirm(f"End pool {name}, with {held}?", yes)
    with spinner(f"stopping pool {name}"):
        if not stop_pool(name):
            raise PoolNotFound(f"no pool {name!r} runs in this Ray cluster, and no memory is left of one")
    click.echo(f"pool {name} ended: it had {held}" if held else f"what was left of pool {name} is gone")


@main.command()
@NAME
@JSON
def status(name: str, as_json: bool) -> None:
    """Show each Ray node's part in the pool, how full tiers are, where hits come from, and faults."""
    shell.administer(name)
    _status(name, as_json)


@main.command()
@NAME
def top(name: str) -> None:
    """Show `raykv status` live: q quits, s sorts the nodes by another column."""
    from raykv.cli.status.top import run

    shell.administer(name)
    run(name)


@main.command()
@NAME
@click.option("--host", help="Address to listen at. Default: 127.0.0.1 of Ray's head.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port. Default: 8270; 0: any that is free.")
@click.option("--stop", "end", is_flag=True, help="Stop serving the page.")
@JSON
def ui(name: str, host: str | None, port: int | None, end: bool, as_json: bool) -> None:
    """Serve a page of the pool from Ray's head: nodes, hits, traffic, faults, and events from now on."""
    from raykv.cli import ui as pages

    shell.administer(name)
    if end:
        pages.stop(name)
        return
    with spinner(f"serving a page of pool {name}"):
        url, tunnel = pages.serve(name, host, port)
    click.echo(json.dumps({"url": url}) if as_json else url + tunnel)


@main.command()
@NAME
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a request.")
def trace(name: str, as_json: bool) -> None:
    """Print finished requests: the tokens that each asked for, found and read, the times, and why a hit was short."""
    shell.administer(name)
    run_trace(name, as_json)


@main.command()
@NAME
@YES
@JSON
def clear(name: str, yes: bool, as_json: bool) -> None:
    """Forget every block of a pool."""
    pool = shell.administer(name)
    shell.confirm(f"Forget all of pool {name}: {held_by(name)}, and what its external tier has?", yes)
    keys = pool.clear()
    click.echo(json.dumps({"cleared": keys}) if as_json else f"{keys} blocks forgotten")


@main.command()
@click.argument("node", required=False)
@click.option("--self", "own", is_flag=True, help="The node that this command runs on, as a preStop hook wants it.")
@click.option("--deadline", default=60.0, show_default=True, help="Seconds.")
@click.option("--force", is_flag=True, help="Drain even the last node that takes blocks.")
@click.option("--cancel", is_flag=True, help="Cancel a drain: the node stays, and takes blocks again.")
@NAME
@JSON
def drain(node: str | None, own: bool, deadline: float, force: bool, cancel: bool, name: str, as_json: bool) -> None:
    """Empty a node that is about to leave. Name it by the node or the host that `raykv status` shows.

    Blocks that are left after the deadline are no error.
    """
    if own == (node is not None):
        raise click.UsageError("give a node as `raykv status` shows it, or --self")
    pool = shell.administer(name)
    found = find_node(node or pool.own_node(), living_nodes())
    if cancel:
        pool.cancel_drain(found.node_id)
        click.echo(json.dumps({"cancelled": True}) if as_json else "the node stays, and takes blocks again")
        return
    with spinner(f"draining node {found.node_id[:8]} on {found.host}"):
        left = pool.drain(found.node_id, deadline, force=force)
    click.echo(json.dumps({"left": left}) if as_json else f"{left} blocks are on no other node")


@main.command()
@click.argument("node")
@click.option("--cpu-memory", metavar="SIZE", required=True, help=SIZE)
@click.option("--deadline", default=60.0, show_default=True, help="Seconds.")
@NAME
@JSON
def resize(node: str, cpu_memory: str, deadline: float, name: str, as_json: bool) -> None:
    """Give a node more or less memory while the pool is in use. Name the node as `raykv status` shows it."""
    pool = shell.administer(name)
    found = find_node(node, living_nodes())
    with spinner(f"resizing node {found.node_id[:8]} on {found.host}"):
        size = pool.resize(found.node_id, cpu_memory, deadline)
    click.echo(json.dumps({"bytes": size}) if as_json else resized(cpu_memory, size))


@main.group(invoke_without_command=True)
@NAME
@JSON
@click.pass_context
def quota(context: click.Context, name: str, as_json: bool) -> None:
    """Show each tenant with a quota: its minimum and maximum share of the pool's memory, and the memory that it uses.

    One more row is for all other tenants together.
    """
    context.obj = name
    if context.invoked_subcommand is None:
        quotas = shell.administer(name).quotas()
        click.echo(json.dumps({"tenants": quotas}) if as_json else "\n".join(table(quota_rows(quotas))))


SHARE = click.FloatRange(0, 1)
OWN_NAME = click.option("--name", help="Name of the pool. Default: the name before the subcommand.")


@quota.command("set")
@click.argument("tenant")
@click.option("--minimum", type=SHARE, default=0.0, show_default=True, help="A share that no other tenant takes.")
@click.option("--maximum", type=SHARE, default=1.0, show_default=True, help="Its largest share; 1: no limit.")
@OWN_NAME
@click.pass_obj
def quota_set(group_name: str, tenant: str, minimum: float, maximum: float, name: str | None) -> None:
    """Set a tenant's quota. It replaces an earlier quota."""
    shell.administer(group_name if name is None else name).set_quota(tenant, minimum, maximum)


@quota.command("remove")
@click.argument("tenant")
@OWN_NAME
@click.pass_obj
def quota_remove(group_name: str, tenant: str, name: str | None) -> None:
    """Remove a tenant's quota. The tenant then shares the rest of the memory with all tenants without a quota."""
    if not shell.administer(group_name if name is None else name).remove_quota(tenant):
        raise click.ClickException(f"tenant {tenant!r} has no quota: see `raykv quota`")


@main.command()
@click.option("--out", metavar="FOLDER", help="Default: the folder where Ray provisions Grafana from, on the head.")
def dashboard(out: str | None) -> None:
    """Write a Grafana dashboard and Prometheus alert rules for all pools."""
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        if not os.environ.get(dashboard_files.FOLDER):
            shell.join("default")
        folder = dashboard_files.provisioned()
    if not folder.is_dir():
        raise ValueError(
            f"Ray provisions Grafana from {folder}, which is not there: start the cluster's head with its dashboard "
            f"(pip install 'ray[default]') and run this on the head, or give --out FOLDER"
        )
    for path in dashboard_files.write(folder):
        click.echo(path)


@main.command()
@click.option("--name", help="A running pool: check its stores too, and send blocks between its nodes.")
@JSON
@click.pass_context
def doctor(context: click.Context, name: str | None, as_json: bool) -> None:
    """Check every node for all that a pool needs, and give advice. Exits with 1 if something is wrong."""
    from raykv.cli.doctor import Report

    with spinner("looking at every node"):
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
@click.option("--seed", default=0, show_default=True, help="Seed of the model's weights and the questions.")
@JSON
def demo(requests: int, nodes: int, seed: int, as_json: bool) -> None:
    """Run engines on Ray nodes of this machine. They share the prefixes that they have computed."""
    from raykv.cli.demo import run

    if not run(requests, nodes, seed, as_json):
        raise click.ClickException("tokens differ from those without the pool")


main.add_command(bench)


def _status(name: str, as_json: bool) -> None:
    overview = look(name)
    if as_json:
        click.echo(json.dumps(overview.as_json()))
    else:
        show(overview)
