"""`raykv doctor`: its findings on the nodes, as a table, as lines, or as JSON."""

import json
from importlib.metadata import version

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

import raykv
from raykv.cli import shell
from raykv.cluster import internal_kv
from raykv.doctor import examination, exchange, judgement
from raykv.doctor.finding import ADVICE, OK, WRONG, Finding

COLOURS = {OK: "green", ADVICE: "yellow", WRONG: "red"}


class Report:
    """The findings on all nodes. hosts: host names by Ray node id."""

    def __init__(self, name: str | None) -> None:
        """name: a running pool, whose stores are also examined. Raises PoolNotFound if the pool does not run."""
        shell.join(name or "default")
        nodes = examination.Examination()
        self.hosts = nodes.hosts
        found = [examination.of_token()]
        if found[0].state == OK:
            pool = raykv.attach(name) if name else None
            found += nodes.findings()
            if pool:
                found += exchange.findings(pool, self.hosts)
                told = internal_kv.other_tokens(pool.name)  # number of chunks with wrong tokens, by the engines' node
                found += [judgement.of_tokens(node, told[node]) for node in self.hosts if node in told]
                pool.close()
        order = list(self.hosts)
        self.findings = sorted(found, key=lambda finding: order.index(finding.node))  # stable sort

    @property
    def ok(self) -> bool:
        """Whether no finding has the state WRONG."""
        return not any(finding.state == WRONG for finding in self.findings)

    def json(self) -> str:
        """Return the report in the form that docs/operations.md describes."""
        checks = [{"host": self.hosts[finding.node], **finding._asdict()} for finding in self.findings]
        return json.dumps({"ok": self.ok, "version": version("raykv"), "nodes": self.hosts, "checks": checks})

    def show(self) -> None:
        """Print a table on a terminal. Elsewhere, print each finding as one line of any length."""
        console = Console()
        if not console.is_terminal:
            for finding in self.findings:
                click.echo(f"{self._node(finding)} {finding.check}: {_said(finding)}")
            return
        table = Table()
        for title in ("node", "check", ""):
            table.add_column(title, overflow="fold")
        for finding in self.findings:
            table.add_row(self._node(finding), finding.check, Text(_said(finding), COLOURS[finding.state]))
        console.print(table)

    def _node(self, finding: Finding) -> str:
        return f"{self.hosts[finding.node]} {finding.node[:16]}"


def _said(finding: Finding) -> str:
    return f"ok, {finding.text}" if finding.state == OK else f"{finding.state}: {finding.text}"
