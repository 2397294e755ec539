"""Ray Serve on a pool: a request goes to the replica that can give its first token soonest.

@serve.deployment(
    num_replicas=2,
    request_router_config=RequestRouterConfig(
        request_router_class=PrefixRouter, request_router_kwargs={"pool": "default", "model": "my-model"}
    ),
)
class Engine:
    def __init__(self):
        self.cache = model_cache(raykv.attach("default"), model)
        announce(self.cache, "my-model")  # so that the router knows how prompts become keys

    def __call__(self, token_ids): ...

handle.remote(token_ids=[...])
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.system.extras import to_install

try:
    from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica
except ImportError as error:
    raise ImportError(f"this needs Ray Serve: {to_install('serve')}") from error

from raykv import keys
from raykv.client.cache import KVCache
from raykv.integrations import prefix_lookup
from raykv.protocol.location import KEY_BYTES
from raykv.scheduling.routes import Found, Prompt, Replica, Routes

log = logging.getLogger("raykv")

ASKED = 64  # maximum number of blocks in a question to the directory; of a longer prompt, every n-th block is asked for
NAME_CHARS = 256  # maximum characters of a session's name; the rest is ignored
NO_KEYS = np.zeros((0, 16), np.uint8)


def announce(cache: KVCache, model: str) -> None:
    """Tell the routers of `model` how prompts become keys of `cache`. Call it in the constructor of a deployment.

    model: the name in the routers' request_router_kwargs. Raises RayError if Ray does not answer.
    """
    prefix_lookup.announce(cache.session.name, model, root=cache.root.hex(), block_tokens=cache.block_tokens)


class Asked(NamedTuple):
    """A request's prompt, and the part of the prompt that the pool has.

    found: None if the pool was not asked, or did not answer.
    """

    prompt: Prompt
    found: Found | None = None


class PrefixRouter(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Sends a request to the replica that has the least to compute until the request's first token.

    `raykv.scheduling.routes.Routes` counts this work. A session stays at its replica until another replica would be
    faster. For a request without a session's name and without keys, Serve chooses the less busy of two random replicas.

    request_router_kwargs: `model`, the announced name, and `pool`. A request's argument `token_ids` is the prompt.
    The arguments `lora` and `salt` are as in KVCache.keys. Override `keys` for other forms of requests. The name of a
    request's session is the header x-session-id, the handle's option `session_id`, or the keyword argument `session`.
    """

    def initialize_state(self, model: str, pool: str = "default") -> None:
        """Serve calls this with request_router_kwargs. model: the model's announced name. pool: the pool's name."""
        self.lookup = prefix_lookup.PrefixLookup(pool, model)
        self.routes = Routes()
        self._warned = False

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.routes.keep({replica.replica_id for replica in replicas})
        self.lookup.look()  # new replicas may announce another cache

    def announced(self, request: PendingRequest) -> dict[str, Any] | None:
        """Return the announcement of a request's model, or None until it is known."""
        return self.lookup.announced

    async def keys(self, request: PendingRequest, announced: dict[str, Any]) -> NDArray[np.uint8]:
        """Compute the keys of a request's prompt, (n, 16) uint8. n is 0 if the prompt is missing or fills no block.

        announced: the fields that a replica announced. If this raises ValueError, only the request's session counts.
        """
        token_ids = request.kwargs.get("token_ids")
        if token_ids is None or len(token_ids) < announced["block_tokens"]:
            return NO_KEYS
        fields = {name: request.kwargs.get(name) for name in ("lora", "salt")}
        root, size = bytes.fromhex(announced["root"]), announced["block_tokens"]
        return await asyncio.to_thread(keys.chain, root, token_ids, size, **fields)

    def session(self, request: PendingRequest) -> str:
        """Return the name of a request's session, or "" if the request has no session."""
        return str(request.metadata.session_id or request.kwargs.get("session") or "")

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_chance: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is None:
            return by_chance
        try:
            return await self._ranked(candidate_replicas, pending_request) or by_chance
        except Exception as error:  # if this raised, the request would wait forever
            self._warn(error)
            return by_chance

    async def _ranked(self, candidates: list[RunningReplica], request: PendingRequest) -> list[list[RunningReplica]]:
        """Rank the candidates for a request. Returns [] to let Serve choose."""
        adapter = request.metadata.multiplexed_model_id  # loading the adapter would take longer than computing a prefix
        able = [replica for replica in candidates if not adapter or adapter in replica.multiplexed_model_ids]
        if not hasattr(request, "raykv_asked"):  # look it up only once: Serve asks again if no replica had room
            request.raykv_asked = await self._ask(request, able)
        prompt, found = request.raykv_asked
        if len(able) < 2 or not (prompt.keys or prompt.session):
            return []
        queues = [self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in able]  # idle if unknown
        known = [Replica(one.replica_id, one.node_id, queue) for one, queue in zip(able, queues, strict=True)]
        return ranked(able, self.routes.costs(prompt, found, known, time.monotonic()))

    async def _choose_replica_for_request(self, pending_request: PendingRequest, **how: Any) -> RunningReplica:
        """Record the request before Serve sends it, so that the next requests of a burst are routed accordingly."""
        replica = await super()._choose_replica_for_request(pending_request, **how)
        prompt, found = getattr(pending_request, "raykv_asked", Asked(Prompt(None)))
        request = pending_request.metadata.internal_request_id
        self.routes.send(request, prompt, found, replica.replica_id, time.monotonic())
        return replica

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Serve calls this once for each request that it sent, whether a replica took the request or not."""
        self.routes.complete(internal_request_id, replica_id)

    async def _ask(self, request: PendingRequest, able: list[RunningReplica]) -> Asked:
        """Look up a request's prompt in the pool. able: the replicas that may serve the request."""
        unknown = Asked(Prompt(None, (), self.session(request)[:NAME_CHARS]))
        announced = self.announced(request)
        if announced is None or len(able) < 2:
            return unknown
        try:
            keys = await self.keys(request, announced)
        except Exception as error:
            if not isinstance(error, ValueError):  # the replica itself reports what is wrong with the prompt
                self._warn(error)
            return unknown
        size, packed = announced["block_tokens"], keys.tobytes()
        names = [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
        prompt = Prompt(len(keys) * size or size // 2, names, unknown.prompt.session)
        on_one_node = len({replica.node_id for replica in able}) == 1
        return Asked(prompt, None if on_one_node else await self._find(keys, size))

    async def _find(self, keys: NDArray[np.uint8], block_tokens: int) -> Found | None:
        """Return which part of a prompt the pool has, or None if the pool does not answer."""
        if not len(keys):
            return None
        every = -(-len(keys) // ASKED)
        asked = np.ascontiguousarray(keys[every - 1 :: every])  # skipped blocks are evicted later than the asked block
        located = await self.lookup.locate_prefix(asked)
        if located is None:
            return None
        tokens = every * block_tokens
        return Found(located.blocks * tokens, {node: count * tokens for node, count in located.nodes.items()})

    def _warn(self, error: Exception) -> None:
        """Log only the first error."""
        if not self._warned:
            self._warned = True
            log.warning("requests are routed without a look at the pool, since this failed for one: %r", error)

    def _get_pending_request_matching_metadata(self, request_metadata: Any = None) -> PendingRequest | None:
        """Return the request that a replica was chosen for. Serve itself would return the longest-waiting request."""
        waiting = self._pending_requests_to_fulfill
        return next((r for r in waiting if r.metadata is request_metadata and not r.future.done()), None)


def ranked(replicas: Sequence[RunningReplica], costs: Sequence[float]) -> list[list[RunningReplica]]:
    """Group replicas of equal cost, lowest cost first. The order within a group is random."""
    groups = defaultdict(list)
    for replica, cost in zip(replicas, costs, strict=True):
        groups[round(cost)].append(replica)
    return [random.sample(groups[cost], len(groups[cost])) for cost in sorted(groups)]
