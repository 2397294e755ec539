"""`raykv trace`: prints finished requests. Clients report them to the directory, and this command polls it."""

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import click
import ray
from ray.exceptions import RayError

from raykv.client.session import settings_of
from raykv.cluster import named_actors
from raykv.config import MIB
from raykv.protocol.location import host_of
from raykv.protocol.requests import Followed, RequestLine
from raykv.ui.ray_nodes import SHORT

POLL_S = 0.5  # seconds between two polls for new lines
DEADLINE_S = 5.0  # seconds for the directory to answer a poll
TIMES = ("lookup", "pull", "copy")


class Follower:
    """Follows the requests of a pool, through take-overs of the directory."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._cursor = (0, 0, 0)
        self._names: dict[int, str] = {}  # names of nodes by index, including nodes that are gone

    def poll(self) -> list[dict[str, Any]]:
        """Return the entries reported since the last call, in the form that `--json` prints (docs/cli-json.md).

        Returns nothing at the first call, which sets the starting point, and while no directory answers.
        Raises PoolNotFound if the pool has ended.
        """
        try:
            directory = named_actors.find_directory(self._pool)
            answer = Followed(*ray.get(directory.follow.remote(self._cursor), timeout=DEADLINE_S))
        except (RayError, ValueError):
            settings_of(self._pool)
            return []
        self._cursor = answer.cursor
        self._names.update(answer.names)
        found, left_out = [], answer.left_out
        for data in answer.lines:
            try:
                found.append(self._entry(RequestLine.unpacked(data)))
            except ValueError:  # a faulty client sent bytes that are no request line
                left_out += 1
        return [*found, {"kind": "left out", "requests": left_out}] if left_out else found

    def _entry(self, line: RequestLine) -> dict[str, Any]:
        about = self._names.get(line.about) if line.about >= 0 else None
        return {
            "kind": line.kind,
            "time": line.at_ms / 1e3,
            "id": line.id,
            "request": line.request,
            "node": line.node,
            "pid": line.pid,
            "model": line.model,
            "tenant": line.tenant,
            "asked_tokens": line.asked,
            "hit_tokens": line.hit,
            "sources": {"memory": line.memory, "node": line.other, "external": line.external},
            "read_tokens": line.read,
            "bytes": line.size,
            **{f"{what}_ms": _ms(getattr(line, f"{what}_us")) for what in TIMES},
            "short": line.short,
            "short_node": host_of(about) if about else None,
        }


def _ms(us: int) -> float | None:
    return us / 1e3 if us >= 0 else None


def run(pool: str, as_json: bool) -> None:
    """Print requests until Ctrl-C. Raises PoolNotFound when the pool has ended."""
    follower = Follower(pool)
    try:
        while True:
            for entry in follower.poll():
                click.echo(json.dumps(entry) if as_json else text(entry))
            time.sleep(POLL_S)
    except (KeyboardInterrupt, BrokenPipeError):
        return


def text(entry: dict[str, Any]) -> str:
    """Format an entry as a line."""
    if entry["kind"] == "left out":
        return f"... {entry['requests']} requests were left out: there are too many to follow"
    return " ".join(_words(entry))


def _words(entry: dict[str, Any]) -> Iterator[str]:
    yield datetime.fromtimestamp(entry["time"]).strftime("%H:%M:%S.%f")[:-3]
    yield f"{entry['node'][:SHORT]}/{entry['pid']} {entry['model']}"
    yield from (f"{what}={entry[what]}" for what in ("tenant", "request") if entry[what])
    if entry["kind"] != "read":
        sources = ", ".join(f"{name} {count}" for name, count in entry["sources"].items() if count)
        yield f"hit {entry['hit_tokens']} of {entry['asked_tokens']} tokens{f' ({sources})' if sources else ''}"
    if entry["kind"] != "match" and entry["hit_tokens"]:
        yield f"read {entry['read_tokens']} ({entry['bytes'] / MIB:.1f} MiB)"
    if entry["kind"] != "request":
        yield f"{entry['kind']} {entry['id'][-8:]}"
    yield from (f"{what} {entry[f'{what}_ms']:.1f} ms" for what in TIMES if entry[f"{what}_ms"] is not None)
    if entry["short"]:
        node = f" (node {entry['short_node'][:SHORT]})" if entry["short_node"] else ""
        yield f"short: {entry['short']}{node}"
