"""A pool on a Ray cluster with TLS: the pool's sockets use TLS too, or all goes through Ray."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
from helpers.line import certificates

RIGHT = {"stored": 30, "read": 30, "right": True}


def run(settings: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "helpers.line.ray_tls"], env={**os.environ, **settings}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_sockets_use_the_certificates_of_ray(tmp_path: Path) -> None:
    said = run(certificates.settings(tmp_path, ray.util.get_node_ip_address(), certificates.HOST))
    assert said == RIGHT | {"way": "socket", "by": ["tcp"], "tls": 2 * [["ok", "with Ray's certificate"]]}


def test_with_certificates_that_ray_takes_and_openssl_does_not_all_goes_through_ray(tmp_path: Path) -> None:
    """The certificates that Ray makes for tests have addresses where names belong."""
    said = run(certificates.of_ray(tmp_path))
    (state, text), _ = said.pop("tls")
    assert said == RIGHT | {"way": "ray", "by": ["object_store"]}
    assert state == "wrong" and "go through Ray, which is slower: other nodes refuse" in text
