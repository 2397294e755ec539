"""What a command of the shell is to a pool and to Ray: no client, and no job on the dashboard."""

import logging
import sys

import click

from raykv.client.administration import Administration
from raykv.client.connect import connect
from raykv.client.session import settings_of

# Ray's dashboard and its job API leave out drivers whose namespace begins so; the state API still lists them.
SHELL_NAMESPACE = "_ray_internal_raykv_shell"


def join(name: str) -> None:
    """Join the Ray cluster of this machine. PoolNotFound, for the pool called `name`, where there is none."""
    connect(name, SHELL_NAMESPACE, logging.WARNING)


def confirm(question: str, yes: bool) -> None:
    """On a terminal, ask; click.Abort unless the answer is yes. A script is not asked. yes: nor is anybody."""
    if not yes and sys.stdin.isatty():
        click.confirm(question, abort=True, err=True)


def administer(name: str) -> Administration:
    """The pool of that name. PoolNotFound where it does not run; ProtocolMismatch as `attach`."""
    join(name)
    settings_of(name)
    return Administration(name)
