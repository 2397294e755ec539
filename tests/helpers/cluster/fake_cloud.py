"""A Ray cluster that Ray's autoscaler makes larger and smaller: its fake cloud starts real raylets on this machine."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

MIB = 1 << 20
IDLE_S = 6.0  # until Ray takes an idle node away


class Cloud(FakeMultiNodeProvider):
    """Gives nodes random ids, not ffff...01 and ffff...02: raykv names a store by the first digits of the node id."""

    def _next_hex_node_id(self) -> str:
        return secrets.token_hex(28)

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        return cluster_config


@contextmanager
def autoscaled(v2: bool) -> Iterator[str]:
    """The address of a cluster whose head has 1 CPU. Requests of 2 CPUs add nodes. v2: use Ray's second autoscaler."""
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="ray") as tmp:  # short, for sockets
        free.bind(("", 0))
        address, head = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}", secrets.token_hex(28)
        config = Path(tmp) / "config.json"
        config.write_text(json.dumps(_config(address, head)), encoding="utf-8")
        free.close()
        environment = {
            **os.environ,
            "RAY_TMPDIR": tmp,
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_enable_autoscaler_v2": str(int(v2)),
            "RAY_CLOUD_INSTANCE_ID": head,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": head,
        }
        ray_start = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=1"]
        ray_start += [f"--port={address.rpartition(':')[2]}", f"--autoscaling-config={config}"]
        ray_start += ["--include-dashboard=false", f"--object-store-memory={100 * MIB}", "--disable-usage-stats"]
        with open(Path(tmp) / "log", "wb") as log, subprocess.Popen(ray_start, env=environment, stdout=log) as started:
            try:
                yield address
            finally:
                started.send_signal(signal.SIGTERM)
                started.wait(60)
                for process in psutil.process_iter(["cmdline"]):  # processes of nodes that the cloud still has
                    if any(tmp in word for word in process.info["cmdline"] or ()):
                        with suppress(psutil.NoSuchProcess):
                            process.kill()


def _config(address: str, head: str) -> dict[str, Any]:
    provider = {
        "type": "external",
        "module": f"{__name__}.Cloud",
        "gcs_address": address,
        "launch_multiple": True,
        "head_node_id": head,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    worker = {"resources": {"CPU": 2, "object_store_memory": 100 * MIB}, "node_config": {}, "max_workers": 2}
    lists = ["initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray"]
    return {
        "cluster_name": "cloud",
        "max_workers": 2,
        "provider": provider,
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "worker": worker,
        },
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_S / 60,
        "auth": {},
        "docker": {},
        **{f"{name}_commands": [] for name in lists},
        "file_mounts": {},
        "cluster_synced_files": [],
        "rsync_exclude": [],
        "rsync_filter": [],
        "file_mounts_sync_continuously": False,
    }
