"""What a command of the shell is to a pool and to Ray: no client, and no job on the dashboard."""

import logging

from raykv.client.administration import Administration
from raykv.client.connect import connect
from raykv.client.session import settings_of

# Ray's dashboard and its job API leave out drivers whose namespace begins so; the state API still lists them.
SHELL_NAMESPACE = "_ray_internal_raykv_shell"


def join(name: str) -> None:
    """Join the Ray cluster of this machine. PoolNotFound, for the pool called `name`, where there is none."""
    connect(name, SHELL_NAMESPACE, logging.WARNING)


def administer(name: str) -> Administration:
    """The pool of that name. PoolNotFound where it does not run; ProtocolMismatch as `attach`."""
    join(name)
    settings_of(name)
    return Administration(name)
