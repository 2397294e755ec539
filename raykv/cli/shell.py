"""How a shell command joins Ray and finds its pool, without being a client of it or a job on Ray's dashboard."""

import logging
import sys

import click

from raykv.client.administration import Administration
from raykv.client.connect import connect
from raykv.client.session import settings_of

# Ray's dashboard and job API leave out drivers whose namespace has this prefix. The state API still lists them.
SHELL_NAMESPACE = "_ray_internal_raykv_shell"


def join(name: str) -> None:
    """Join this machine's Ray cluster. Raises PoolNotFound, which names the pool `name`, if there is no cluster."""
    connect(name, SHELL_NAMESPACE, logging.WARNING)


def confirm(question: str, yes: bool) -> None:
    """Ask the user. Raises click.Abort unless the answer is yes. Does nothing if `yes`, or without a terminal."""
    if not yes and sys.stdin.isatty():
        click.confirm(question, abort=True, err=True)


def administer(name: str) -> Administration:
    """Return the pool of this name. Raises PoolNotFound if it does not run, and ProtocolMismatch as `attach` does."""
    join(name)
    settings_of(name)
    return Administration(name)
