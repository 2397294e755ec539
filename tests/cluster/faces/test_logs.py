"""The log files of a pool's actors tell what happened to the pool."""

import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from helpers.pools import BLOCK, MIB, Worker, eventually, holds, kill, part, pid, read, stopped, store, tokens, worker
from helpers.tiers.redis_server import redis_server

import raykv
from raykv.cluster import internal_kv, named_actors

PASSWORD, SECRET = "pass-of-the-tier", b"secret-of-the-pool"
Event = dict[str, str]


def texts(cluster: Any) -> str:
    """The logs of all Ray workers. Ray moves files of dead workers to a folder `old` once there are many."""
    logs, found = Path(cluster.head_node.get_logs_dir_path()), {}
    for folder in (logs, logs / "old"):
        for path in folder.glob("worker-*.err"):
            with suppress(FileNotFoundError):  # the file has just been moved to `old`, where it is read
                found[path.name] = path.read_text(errors="replace")
    return "".join(found[name] for name in sorted(found))


def events(cluster: Any, pool: str) -> list[Event]:
    """The log lines of a pool's actors. Those of one process are in order."""
    lines = [line for line in texts(cluster).splitlines() if f" pool={pool} " in line and line.startswith("time=")]
    return [dict(pair.split("=", 1) for pair in shlex.split(line)) for line in lines]


def those(found: list[Event], role: str, event: str, **fields: object) -> list[Event]:
    wanted = {"role": role, "event": event, **{name: str(value) for name, value in fields.items()}}
    return [entry for entry in found if wanted.items() <= entry.items()]


def test_the_logs_say_what_happened_and_no_secret(
    cluster: Any, start: Callable[..., raykv.KVPool], third_node: Callable[[], Any], tmp_path: Path
) -> None:
    leaving = third_node().node_id
    with redis_server(tmp_path, requirepass=PASSWORD) as server:
        pool = start(cpu_memory=64 * MIB, external=server.url(f":{PASSWORD}@"), secret=SECRET)
        here, name = pool.node_id[:8], pool.name

        def said(role: str, event: str, **fields: object) -> list[Event]:
            return eventually(lambda: those(events(cluster, name), role, event, **fields))

        cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)
        keys = cache.keys(tokens(1, 50))
        assert store(cache, keys) == 50 and read(cache, keys)[:3] == (50, 50, 0)
        first = said("directory", "serve", cpu_memory=64 * MIB, locality=1.5, write="back")
        assert said("store", "settings", node=here, bytes=64 * MIB, transport="auto")
        assert said("store", "external", node=here, url=f"redis://127.0.0.1:{server.port}/0", up=True)
        assert said("store", "join", node=here, epoch=first[0]["epoch"], bytes=64 * MIB)
        assert said("directory", "join", node=leaving[:8], epoch=first[0]["epoch"])
        assert said("supervisor", "start") and len(said("store", "start")) == 3
        server.kill()
        assert said("store", "tier_down", node=here)
        server.start()
        assert said("store", "tier_up", node=here)

    kill(pool, pool.node_id)
    assert said("store", "restart", node=here) and len(said("store", "join", node=here)) == 2
    old = internal_kv.in_charge(name).name  # on a busy machine the second directory may have taken over already
    (new,) = {named_actors.directory_name(name, number) for number in (1, 2)} - {old}
    assert said("directory", "stand_by", name=new)
    replaced = pid(part(pool, "directory"))
    with stopped(replaced):  # on a busy machine the supervisor may notice first, and end the directory itself
        taken = eventually(
            lambda: (
                those(events(cluster, name), "directory", "takeover", name=new)
                or those(events(cluster, name), "supervisor", "replace_directory", name=old)
            )
        )
    if taken[0]["role"] == "directory":
        assert said("directory", "stop", pid=replaced) and said("directory", "restart", name=old)
    assert said("directory", "stand_by", name=old)
    newest = said("directory", "serve", name=new)[-1]["epoch"]
    assert int(newest) > int(first[0]["epoch"]) and said("store", "join", node=here, epoch=newest)

    kill(pool, "directory")
    assert said("directory", "restart", name=new)

    assert eventually(lambda: pool.resize(pool.node_id, 32 * MIB)) == 32 * MIB
    assert said("store", "resize", node=here, bytes=32 * MIB) and said("store", "resized", node=here, bytes=32 * MIB)
    before, requests = len(events(cluster, name)), range(10, 40)
    for seed in requests:
        more = cache.keys(tokens(seed, 5))
        eventually(lambda more=more: store(cache, more) >= 0 and holds(cache, more))  # type: ignore[misc]
    lines = len(events(cluster, name)) - before  # some late lines may be of the kill
    assert lines < len(requests), "a line a request"
    ray.get(worker(pool, leaving, Worker).keep.remote(cache.keys(tokens(2, 5))))
    assert pool.drain(leaving, deadline=30.0) == 0
    assert said("supervisor", "drain", node=leaving[:8], deadline=30.0)
    assert said("supervisor", "drained", node=leaving[:8], left=0)
    assert pool.session.local
    os.unlink(pool.session.local.arena.path)
    assert said("store", "file_removed", node=here)
    pool.stop()
    assert len(said("store", "stop")) == 3 and said("supervisor", "stop")

    written = texts(cluster)
    assert not [
        secret for secret in (PASSWORD, SECRET.decode(), SECRET.hex(), pool.session.secret.hex()) if secret in written
    ]
