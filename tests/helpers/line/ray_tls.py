"""Runs a pool on a Ray cluster of its own, with the certificates that the environment names, and prints the results."""

import json

import numpy as np
import ray
from ray.cluster_utils import Cluster

import raykv
from helpers.faces.command_line import command
from helpers.pools import a_cache, eventually, other_node, payload, served, tokens, worker
from raykv.line import wire


def main() -> None:
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
    print(
        json.dumps(
            {
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
            }
        )
    )
    pool.stop()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
