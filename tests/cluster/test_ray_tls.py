"""A pool of a Ray cluster that uses TLS: its sockets use it too, and where they can't, Ray's own ways are left."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
from helpers import certificates

RUN = """
import json
import numpy as np
import ray
from helpers.command_line import command
from helpers.pools import a_cache, eventually, other_node, payload, served, store, tokens, worker
from ray.cluster_utils import Cluster
import raykv
from raykv.system import wire

wire.HANDSHAKE_S = 60.0  # a machine may be busy
node = {"num_cpus": 2, "object_store_memory": 100 << 20}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
cluster.add_node(wait=True, **node)
ray.init(address=cluster.address, log_to_driver=False)
pool = raykv.start(raykv.PoolConfig(name="tls", cpu_memory=64 << 20, deadline=5))
eventually(lambda: served(pool, 2))
cache = a_cache(pool)
keys = cache.keys(tokens(1, 30))
stored = ray.get(worker(pool, other_node(pool)).store.remote(keys))
out = np.zeros((30, cache.block_bytes), np.uint8)
with cache.match(keys) as match:
    read = match.read(out)
doctor = command("doctor", "--json", address=cluster.address)
print(json.dumps({
    "stored": stored,
    "read": read,
    "right": bool((out == payload(keys, cache.block_bytes)).all()),
    "way": pool.session.directory.line.way,
    "by": sorted({lane["transport"] for lane in pool.stats()["transports"]}),
    "tls": [
        [check["state"], check["text"]]
        for check in json.loads(doctor.stdout.splitlines()[-1])["checks"]
        if check["check"] == "tls"
    ],
}))
pool.stop()
ray.shutdown()
cluster.shutdown()
"""
RIGHT = {"stored": 30, "read": 30, "right": True}


def run(settings: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", RUN], env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_sockets_use_the_certificates_of_ray(tmp_path: Path) -> None:
    said = run(certificates.settings(tmp_path, ray.util.get_node_ip_address(), certificates.HOST))
    assert said == RIGHT | {"way": "socket", "by": ["tcp"], "tls": 2 * [["ok", "with Ray's certificate"]]}


def test_with_certificates_that_ray_takes_and_openssl_does_not_all_goes_through_ray(tmp_path: Path) -> None:
    """Ray's own for tests have addresses as names."""
    said = run(certificates.of_ray(tmp_path))
    (state, text), _ = said.pop("tls")
    assert said == RIGHT | {"way": "ray", "by": ["object_store"]}
    assert state == "wrong" and "go through Ray, which is slower: other nodes refuse" in text
