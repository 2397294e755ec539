"""How a shell command joins Ray and finds its pool. It is no client of the pool, and no job on Ray's dashboard."""

import logging
import sys

import click

from raykv.client.administration import Administration
from raykv.client.connect import connect
from raykv.client.session import settings_of

# Ray's dashboard and job API leave out drivers whose namespace begins like this. The state API still lists them.
SHELL_NAMESPACE = "_ray_internal_raykv_shell"


def join(name: str) -> None:
    """Join the Ray cluster of this machine. PoolNotFound if there is no cluster; the error names the pool `name`."""
    connect(name, SHELL_NAMESPACE, logging.WARNING)


def confirm(question: str, yes: bool) -> None:
    """Ask the user of a terminal; click.Abort unless the answer is yes. A script gets no question. yes: ask nobody."""
    if not yes and sys.stdin.isatty():
        click.confirm(question, abort=True, err=True)


def administer(name: str) -> Administration:
    """The pool of that name. PoolNotFound if it does not run; ProtocolMismatch as `attach`."""
    join(name)
    settings_of(name)
    return Administration(name)
