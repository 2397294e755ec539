"""How a process joins the Ray cluster of its pool."""

import logging
import os
import socket

import ray

from raykv.client import token
from raykv.config import NAMESPACE
from raykv.errors import PoolNotFound

CONNECT_S = 5.0  # for Ray's head to answer; after that, RAY_ADDRESS counts as wrong


def connect(name: str, namespace: str = NAMESPACE, logging_level: int = logging.INFO) -> None:
    """Join the Ray cluster of RAY_ADDRESS, or else of this machine, unless this process is in a cluster already.

    name: of the wanted pool. namespace: of this process's Ray job; raykv's actors are in NAMESPACE.
    logging_level: of Ray's lines in this process. Raises PoolNotFound if there is no cluster, and RayKVError if the
    cluster asks for another token.
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


def _check_address(address: str) -> None:
    """PoolNotFound unless a process listens at RAY_ADDRESS: Ray itself would try for minutes, and say nothing."""
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
