"""Joins a process to the Ray cluster of its pool, and checks the token that the cluster asks for."""

import logging
import os
import socket
import subprocess
import sys

import ray
from ray._private.authentication.authentication_token_setup import (
    ensure_token_if_auth_enabled,
    maybe_enable_token_auth_if_token_available,
)
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RpcError

from raykv.config import NAMESPACE
from raykv.errors import PoolNotFound, RayKVError

CONNECT_S = 5.0  # deadline for Ray's head to answer; after it, RAY_ADDRESS counts as wrong
TOKEN_FILE = "~/.ray/auth_token"
ASK = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1])
except AuthenticationError:
    sys.exit(77)
"""
ASKED_FOR = 77  # exit status of ASK if the cluster asks for a token
ASK_S = 30.0  # deadline for a separate Python process to ask Ray's head


def connect(name: str, namespace: str = NAMESPACE, logging_level: int = logging.INFO) -> None:
    """Join the Ray cluster at RAY_ADDRESS, else the cluster on this machine. A process in a cluster stays there.

    name: name of the wanted pool. namespace: namespace of this process's Ray job; raykv's actors are in NAMESPACE.
    logging_level: level of Ray's log lines in this process. Raises PoolNotFound if there is no cluster, and RayKVError
    if the cluster asks for another token.
    """
    if not ray.is_initialized():
        _check_address(os.environ.get("RAY_ADDRESS", ""))
        try:
            _check_token()
            ray.init(address="auto", namespace=namespace, log_to_driver=False, logging_level=logging_level)
        except ConnectionError as error:
            raise PoolNotFound(
                f"no Ray cluster runs here: start one with `ray start --head` (or `ray up`), "
                f"then the pool with `raykv start --name {name}`"
            ) from error


def _check_address(address: str) -> None:
    """Raise PoolNotFound if no process listens at RAY_ADDRESS. Ray itself would retry for minutes without a message."""
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


def _check_token() -> None:
    """Raise RayKVError if the cluster for `ray.init("auto")` refuses this process's token, or asks for a missing token.

    Ray itself would retry for half a minute, and then report that there is no cluster. Raises ConnectionError if no
    cluster answers.
    """
    if os.environ.get("RAY_ADDRESS", "") in ("", "auto"):  # ray.init enables tokens by itself for these values only
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    if (address := canonicalize_bootstrap_address("auto")) is None:
        return  # RAY_ADDRESS=local: ray.init will start a cluster
    try:
        ensure_token_if_auth_enabled(create_token_if_missing=False)  # Ray would end a process without a token
        GcsClient(address=address)
    except AuthenticationError as error:
        raise RayKVError(
            f"{_refused(address, error)}: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to what `ray get-auth-token` "
            f"prints on the cluster's head"
        ) from error
    except RpcError as error:
        raise ConnectionError(f"{address}: {error}") from error


def sends_token() -> bool:
    """Whether this process has a token, and wants the same token from its callers."""
    return is_token_auth_enabled()


def asks_for_token(address: str) -> bool:
    """Whether the Ray cluster at an address refuses clients without a token. Takes about a second."""
    without = {**os.environ, "RAY_AUTH_MODE": "disabled"}  # this process may have another mode, so a new process asks
    try:
        command = [sys.executable, "-P", "-c", ASK, address]  # -P: ignore a `ray` in the working folder
        asked = subprocess.run(command, env=without, capture_output=True, timeout=ASK_S)
    except subprocess.TimeoutExpired:
        return True  # Ray keeps trying when a cluster refuses the process
    return asked.returncode == ASKED_FOR


def token_source() -> str:
    """Return where Ray gets this process's token: the name of an environment variable, or the path of a file."""
    return next((name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if name in os.environ), TOKEN_FILE)


def _refused(address: str, error: AuthenticationError) -> str:
    if not sends_token():
        return f"the Ray cluster at {address} asks for a token, and this process sends none (RAY_AUTH_MODE)"
    return f"the Ray cluster at {address} does not take this process's token (of {token_source()}): {error.message}"
