"""`raykv doctor`: what is found on the nodes, as a table, as lines, or as JSON."""

import json
from importlib.metadata import version

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

import raykv
from raykv.cli import shell
from raykv.cluster import internal_kv
from raykv.doctor import exchange, judgement, token
from raykv.doctor.examination import Examination
from raykv.doctor.finding import ADVICE, OK, WRONG, Finding

COLOURS = {OK: "green", ADVICE: "yellow", WRONG: "red"}


class Report:
    """Of all nodes. hosts: their names by Ray node id."""

    def __init__(self, name: str | None) -> None:
        """name: of a pool that runs, whose stores are to be looked at too. PoolNotFound where it does not."""
        shell.join(name or "default")
        examination = Examination()
        self.hosts = examination.hosts
        found = [token.finding()]
        if found[0].state == OK:
            pool = raykv.attach(name) if name else None
            found += examination.findings()
            if pool:
                found += exchange.findings(pool, self.hosts)
                found += self._tokens(pool.name)
                pool.close()
        order = list(self.hosts)
        self.findings = sorted(found, key=lambda finding: order.index(finding.node))  # stable

    def _tokens(self, pool: str) -> list[Finding]:
        """What engines on nodes that are still there have told."""
        told = internal_kv.other_tokens(pool)
        return [judgement.of_tokens(node, told[node]) for node in self.hosts if node in told]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.state == WRONG for finding in self.findings)

    def json(self) -> str:
        """As docs/operations.md describes it."""
        checks = [{"host": self.hosts[finding.node], **finding._asdict()} for finding in self.findings]
        return json.dumps({"ok": self.ok, "version": version("raykv"), "nodes": self.hosts, "checks": checks})

    def show(self) -> None:
        """A table on a terminal; else a line each, however long."""
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
