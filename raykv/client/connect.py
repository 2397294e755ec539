"""How a process joins the Ray cluster that its pool is in."""

import logging
import os
import socket

import ray

from raykv.client import token
from raykv.config import NAMESPACE
from raykv.errors import PoolNotFound, RayKVError

CONNECT_S = 5.0  # for Ray's head to answer; then RAY_ADDRESS is taken for wrong


def connect(name: str, namespace: str = NAMESPACE, logging_level: int = logging.INFO) -> None:
    """Join the Ray cluster of RAY_ADDRESS, or of this machine, if this process is in none.

    name: of the pool that is asked for. namespace: of this process's Ray job; our actors have one of their own.
    logging_level: of Ray's lines in this process. Raises PoolNotFound where there is no cluster, and RayKVError where
    it asks for another token.
    """
    if not ray.is_initialized():
        _check_address(os.environ.get("RAY_ADDRESS", ""))
        try:
            token.check()
            ray.init(address="auto", namespace=namespace, log_to_driver=False, logging_level=logging_level)
        except ConnectionError as error:
            raise PoolNotFound(
                f"no Ray cluster runs here: start one with `ray start --head` (or `ray up`), "
                f"then the pool with `raykv start --name {name}`"
            ) from error


def check_connected(name: str) -> None:
    """RayKVError in a process that has left its Ray cluster. name: of the pool that is asked for."""
    if not ray.is_initialized():
        raise RayKVError(
            f"this process has left the Ray cluster of pool {name!r} by ray.shutdown(): join it again with "
            f"raykv.attach({name!r})"
        )


def _check_address(address: str) -> None:
    """PoolNotFound unless somebody listens at RAY_ADDRESS: Ray itself would try for minutes, and say nothing."""
    if address in ("", "auto", "local"):
        return
    what_to_do = (
        "set it to the head's address and port, as `ray start --head` prints them, or unset it for the cluster of this "
        "machine"
    )
    if "://" in address:
        raise PoolNotFound(
            f"RAY_ADDRESS={address!r} is for Ray Client, by which raykv's commands don't work: run this on a node, and "
            f"{what_to_do}. A program on a node may call ray.init({address!r}) itself, and then attach"
        )
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise PoolNotFound(f"RAY_ADDRESS={address!r}: no Ray cluster answers there ({error}): {what_to_do}") from error
