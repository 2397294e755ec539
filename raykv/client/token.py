"""Ray's token: whether this process has the token that its Ray cluster asks for."""

import os
import subprocess
import sys

from ray._private.authentication.authentication_token_setup import (
    ensure_token_if_auth_enabled,
    maybe_enable_token_auth_if_token_available,
)
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RpcError

from raykv.errors import RayKVError

FILE = "~/.ray/auth_token"
ASK = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1])
except AuthenticationError:
    sys.exit(77)
"""
ASKED_FOR = 77  # exit status
ASK_S = 30.0  # for a separate Python process to ask Ray's head


def check() -> None:
    """RayKVError unless the cluster that `ray.init("auto")` would join takes this process's token.

    Ray itself would try for half a minute, then say that there is no cluster. ConnectionError if no cluster answers.
    """
    if os.environ.get("RAY_ADDRESS", "") in ("", "auto"):
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # ray.init does so for these values only
    if (address := canonicalize_bootstrap_address("auto")) is None:
        return  # RAY_ADDRESS=local: ray.init will start that cluster
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


def is_sent() -> bool:
    """Whether this process has a token, and wants the same token from its callers."""
    return is_token_auth_enabled()


def is_asked_for(address: str) -> bool:
    """Whether the Ray cluster at an address refuses clients without a token. It takes a second."""
    without = {**os.environ, "RAY_AUTH_MODE": "disabled"}  # not this process's mode, so a new process asks
    try:
        command = [sys.executable, "-P", "-c", ASK, address]  # -P: the working folder may have another ray
        asked = subprocess.run(command, env=without, capture_output=True, timeout=ASK_S)
    except subprocess.TimeoutExpired:
        return True  # Ray keeps trying where a cluster refuses it
    return asked.returncode == ASKED_FOR


def source() -> str:
    """Where this process's token comes from, as Ray looks for it."""
    return next((name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if name in os.environ), FILE)


def _refused(address: str, error: AuthenticationError) -> str:
    if not is_sent():
        return f"the Ray cluster at {address} asks for a token, and this process sends none (RAY_AUTH_MODE)"
    return f"the Ray cluster at {address} does not take this process's token (of {source()}): {error.message}"
