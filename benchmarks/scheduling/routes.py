"""Tokens that engines compute for a trace of sessions, and how long requests wait, by the rule of the router.

    python -m benchmarks.scheduling.routes TRACE [--engines 4] [--blocks 1500] [--memory 8000] [--routers 1]

The engines are simulated. Each engine has a prefix cache, and is on its own node of a pool. The pool has a real
directory, and moves no bytes. The rules: `by_chance` is Ray Serve's default rule. `hash` is the rule of Ray Serve's
ConsistentHashRouter (a session has one replica). `kv_aware` is the rule of NVIDIA Dynamo's selection service, which
Ray's KVAwareRouter asks. This rule chooses the engine with the lowest sum of blocks in use and blocks to compute,
including the new prompt's blocks. It knows the engines' caches, but not the pool. `share` treats a node that has the
whole prompt as if 4 fewer requests waited there. `routes` is the rule of `PrefixRouter`.
"""

import argparse
import json
import random
import zlib
from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from benchmarks.scheduling.schedule import read_trace, summary
from benchmarks.scheduling.simulated_engine import Job, SimulatedEngine, Speed
from raykv.bench.trace import formats
from raykv.bench.trace.formats import MOONCAKE_TOKENS as BLOCK_TOKENS
from raykv.bench.trace.pool import Pool, keys_of
from raykv.config import PoolConfig
from raykv.scheduling import plan
from raykv.scheduling.routes import Found, Prompt, Replica, Routes

WORTH = 4


class Setup(NamedTuple):
    """Numbers of engines, of blocks in each engine's cache, of blocks in the pool's memory, and of routers.

    Each request goes to a random router. load, pull: time to read a token from the engine's node or from another node,
    as a share of the time to compute a token.
    """

    engines: int
    blocks: int
    memory: int
    routers: int
    tokens_per_s: float
    load: float
    pull: float


class Asked(NamedTuple):
    """A request of a trace, its number, and which of its blocks the pool has."""

    number: int
    request: formats.Request
    names: list[bytes]
    found: Found

    @property
    def prompt(self) -> Prompt:
        return Prompt(self.request.tokens, self.names, self.session)

    @property
    def session(self) -> str:
        return "" if self.request.session is None else str(self.request.session)


class Cluster:
    """Simulated engines, each on its own node, and a pool of these nodes."""

    def __init__(self, setup: Setup) -> None:
        self.setup, speed = setup, Speed(token_s=1 / setup.tokens_per_s)
        engines, policy = range(setup.engines), partial(plan, patience=0.0)
        self.engines = [SimulatedEngine([], setup.blocks, BLOCK_TOKENS, policy, speed) for _ in engines]
        self.pool = (
            Pool([setup.memory // setup.engines] * setup.engines, PoolConfig().locality) if setup.memory else None
        )
        self.routers = [Routes() for _ in range(setup.routers)]
        self.requests = [0 for _ in engines]  # number of each engine's requests
        self.read = self.crossed = 0  # tokens from the pool, and how many of them came from another node
        self._asked: list[dict[int, Asked]] = [{} for _ in engines]  # requests by engine and job number
        self._links = [0.0 for _ in engines]  # when each engine's reads from the pool end

    def run(self, until: float = np.inf) -> None:
        """Run all engines up to the time `until`, and store computed prompts in the pool."""
        for place, engine in enumerate(self.engines):
            engine.run(until)
            for job in engine.answering:
                if self.pool:
                    self.pool.store(place, keys_of(self._asked[place][job].request.ids), 0)
            for job in engine.done:
                number = self._asked[place].pop(job).number
                self.requests[place] -= 1
                for router in self.routers:
                    router.complete(number, place)
            engine.answering.clear()
            engine.done.clear()

    def ask(self, number: int, request: formats.Request) -> Asked:
        request = request._replace(ids=request.ids[: request.tokens // BLOCK_TOKENS])  # only full blocks
        names = [id.to_bytes(8, "little") for id in request.ids]
        if not self.pool:
            return Asked(number, request, names, Found(0, {}))
        located = self.pool.directory.locate_prefix(keys_of(request.ids).tobytes())
        tokens = {node: float(blocks * BLOCK_TOKENS) for node, blocks in located.nodes.items()}
        return Asked(number, request, names, Found(located.blocks * BLOCK_TOKENS, tokens))

    def send(self, place: int, asked: Asked) -> None:
        """Read missing blocks from the pool to the engine's node. Then send the request to the engine."""
        engine, request, at, read = self.engines[place], asked.request, asked.request.at, 0
        own = engine.cached(asked.names)
        if self.pool:
            read, crossed = self.pool.read(place, keys_of(request.ids))
            crossed = min(crossed, max(0, read - own)) * BLOCK_TOKENS
            tokens = max(0, read - own) * BLOCK_TOKENS
            self.read, self.crossed = self.read + tokens, self.crossed + crossed
            cost = crossed * self.setup.pull + (tokens - crossed) * self.setup.load
            if cost:
                at = self._links[place] = max(at, self._links[place]) + cost / self.setup.tokens_per_s
        keys = np.frombuffer(b"".join(asked.names), np.uint8).reshape(-1, 8)
        job = engine.add(Job(keys, request.tokens, at, max(1, request.output), read, request.at))
        self._asked[place][job] = asked
        self.requests[place] += 1


Rule = Callable[[Cluster, Asked, random.Random], int]  # returns the number of an engine


def by_chance(cluster: Cluster, asked: Asked, rng: random.Random) -> int:
    return min(rng.sample(range(len(cluster.engines)), 2), key=lambda place: cluster.requests[place])


def hashed(cluster: Cluster, asked: Asked, rng: random.Random) -> int:
    return zlib.crc32((asked.session or str(asked.number)).encode()) % len(cluster.engines)


def kv_aware(cluster: Cluster, asked: Asked, rng: random.Random) -> int:
    def cost(place: int) -> float:
        engine = cluster.engines[place]
        new = asked.request.tokens - engine.cached(asked.names) * BLOCK_TOKENS
        return (engine.tokens_to_compute() + new) / BLOCK_TOKENS + engine.blocks_in_use(asked.names)

    return _least([cost(place) for place in range(len(cluster.engines))], cluster, rng)


def share(cluster: Cluster, asked: Asked, rng: random.Random) -> int:
    shares = [asked.found.by_node.get(str(place), 0) / asked.request.tokens for place in range(len(cluster.engines))]
    gains = [int(WORTH * each) for each in shares]
    if not any(gains):
        return by_chance(cluster, asked, rng)
    return _least([queue - gain for gain, queue in zip(gains, cluster.requests, strict=True)], cluster, rng)


def routes(cluster: Cluster, asked: Asked, rng: random.Random) -> int:
    router, at = rng.choice(cluster.routers), asked.request.at
    replicas = [Replica(place, str(place), requests) for place, requests in enumerate(cluster.requests)]
    place = _least(router.costs(asked.prompt, asked.found, replicas, at), cluster, rng)
    router.send(asked.number, asked.prompt, asked.found, place, at)
    return place


def _least(costs: list[float], cluster: Cluster, rng: random.Random) -> int:
    """Return the cheapest engine; of equally cheap engines, one with the fewest requests."""
    cheapest = [place for place, cost in enumerate(costs) if cost == min(costs)]
    return min(cheapest, key=lambda place: (cluster.requests[place], rng.random()))


RULES: dict[str, Rule] = {
    "by_chance": by_chance,
    "hash": hashed,
    "kv_aware": kv_aware,
    "share": share,
    "routes": routes,
}


def run(path: str | PathLike[str], setup: Setup, faster: float = 1.0, first: int | None = None) -> dict[str, Any]:
    """Return one row for each rule: millions of tokens, and seconds to the first token (mean, p50, p99, max).

    faster: divisor of the trace's times. first: maximum number of requests. Raises ValueError for a malformed line.
    """
    requests = [request._replace(at=request.at / faster) for request in read_trace(path).requests[:first]]
    results = []
    for name, rule in RULES.items():
        cluster, rng = Cluster(setup), random.Random(0)
        for number, request in enumerate(requests):
            cluster.run(request.at)
            asked = cluster.ask(number, request)
            cluster.send(rule(cluster, asked, rng), asked)
        cluster.run()
        computed = sum(engine.computed for engine in cluster.engines)
        tokens = {"computed_m": computed, "read_m": cluster.read, "crossed_m": cluster.crossed}
        in_millions = {what: round(count / 1e6, 2) for what, count in tokens.items()}
        waits = [wait for engine in cluster.engines for wait in engine.waits]
        results.append({"rule": name, **in_millions, **summary(waits)})
    prompts = sum(request.tokens for request in requests)
    return {"requests": len(requests), "prompt_tokens_m": round(prompts / 1e6, 2), "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=1500, help="of each engine's cache, of 512 tokens")
    parser.add_argument("--memory", type=int, default=8000, help="blocks of the pool, of 512 tokens; 0: no pool")
    parser.add_argument("--routers", type=int, default=1, help="which share the requests, as Serve's proxies do")
    parser.add_argument("--tokens-per-s", type=float, default=5000.0, help="that an engine computes")
    parser.add_argument("--load", type=float, default=0.05, help="time to read a token on its node, of computing it")
    parser.add_argument("--pull", type=float, default=0.2, help="the same from another node")
    parser.add_argument("--faster", type=float, default=1.0, help="divides the trace's times")
    parser.add_argument("--first", type=int, help="only so many requests")
    given = vars(parser.parse_args())
    path, faster, first = (given.pop(name) for name in ("trace", "faster", "first"))
    print(json.dumps(run(path, Setup(**given), faster, first), indent=2))


if __name__ == "__main__":
    main()
