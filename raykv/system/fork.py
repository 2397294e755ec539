"""Refuses calls in processes that were forked from a process connected to Ray: they can't use Ray."""

import os

import ray

from raykv.errors import RayKVError

_forked = False  # whether this process was forked while connected


def _after_fork() -> None:
    global _forked
    _forked = ray.is_initialized()


os.register_at_fork(after_in_child=_after_fork)


def refuse_forked() -> None:
    """Raise RayKVError if this process was forked from a process connected to Ray: calls of Ray would hang here."""
    if _forked:
        raise RayKVError(
            "this process was forked from one that was connected to Ray, whose connections and threads a fork does not "
            "copy: fork before ray.init, raykv.start and raykv.attach and attach in the child, or start processes by "
            "spawn (multiprocessing.get_context('spawn'))"
        )
