"""Ray Serve on a pool: a request goes to the replica whose node holds its prompt's blocks.

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

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.system.extras import to_install

try:
    from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
    from ray.serve.request_router import PendingRequest, RunningReplica
except ImportError as error:
    raise ImportError(f"this needs Ray Serve: {to_install('serve')}") from error

from raykv import keys
from raykv.client.cache import KVCache
from raykv.integrations import prefix_lookup

log = logging.getLogger("raykv")

WORTH = 4  # how many more requests may wait at a replica with the whole prompt before others come first
ASKED = 64  # the directory is asked about at most so many blocks of a prompt, evenly spaced
NO_KEYS = np.zeros((0, 16), np.uint8)


def announce(cache: KVCache, model: str) -> None:
    """Tell the routers of `model` how prompts become keys of `cache`. Call it in the constructor of a deployment.

    model: the name in the routers' request_router_kwargs. RayError if Ray does not answer.
    """
    prefix_lookup.announce(cache.session.name, model, root=cache.root.hex(), block_tokens=cache.block_tokens)


class PrefixRouter(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Prefers replicas on nodes that hold much of a prompt to replicas with shorter queues, within limits.

    The whole prompt on a node makes up for a queue that is longer by WORTH requests, half of the prompt for half as
    many. Where no node holds enough to matter, or the pool does not answer in time, Serve chooses as always: the better
    of two random replicas.

    request_router_kwargs: `model`, as announced, and `pool`. The request's keyword argument `token_ids` is the prompt.
    Its `lora` and `salt` are those of KVCache.keys. Override `keys` for requests of another form.
    """

    def initialize_state(self, model: str, pool: str = "default") -> None:
        """Called by Serve with request_router_kwargs. model: its announced name. pool: its name."""
        self.lookup = prefix_lookup.PrefixLookup(pool, model)
        self._warned = False

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.lookup.look()  # new replicas may announce another cache

    def announced(self, request: PendingRequest) -> dict[str, Any] | None:
        """The announcement of a request's model; None until it is known."""
        return self.lookup.announced

    async def keys(self, request: PendingRequest, announced: dict[str, Any]) -> NDArray[np.uint8]:
        """Keys of a request's prompt, (n, 16) uint8; n is 0 if the pool can't help.

        announced: the fields that a replica gave to `announce`. A ValueError leaves the choice to Serve.
        """
        token_ids = request.kwargs.get("token_ids")
        if token_ids is None or len(token_ids) < announced["block_tokens"]:
            return NO_KEYS
        fields = {name: request.kwargs.get(name) for name in ("lora", "salt")}
        return keys.chain(bytes.fromhex(announced["root"]), token_ids, announced["block_tokens"], **fields)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        refused = pending_request is not None and pending_request.routing_context.should_backoff  # before Serve sets it
        by_chance: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is None or refused:
            return by_chance
        adapter = pending_request.metadata.multiplexed_model_id  # to load it would take longer than to compute a prefix
        able = [replica for replica in candidate_replicas if not adapter or adapter in replica.multiplexed_model_ids]
        if len({replica.node_id for replica in able}) < 2:
            return by_chance
        shares = await self._shares(pending_request)
        queues = [self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in able]  # no recent news: idle
        return ranked(able, shares, queues) or by_chance

    async def _shares(self, request: PendingRequest) -> dict[str, float]:
        """By node id, the share of the prompt that is there, from 0 to 1."""
        announced = self.announced(request)
        if announced is None:
            return {}
        try:
            prompt = await self.keys(request, announced)
        except ValueError:  # the replica will say what is wrong with the prompt
            return {}
        except Exception as error:  # if a router raised, the request would wait for good
            if not self._warned:
                self._warned = True
                log.warning("requests are routed without a look at the pool, since a request's keys failed: %r", error)
            return {}
        if not len(prompt):
            return {}
        every = -(-len(prompt) // ASKED)
        asked = np.ascontiguousarray(prompt[every - 1 :: every])  # parents outlive children: blocks between are there
        blocks = await self.lookup.locate_prefix(asked)
        return {node: count / len(asked) for node, count in blocks.items()}

    def _get_pending_request_matching_metadata(self, request_metadata: Any = None) -> PendingRequest | None:
        """The request that a replica was chosen for. Serve would give the replica to the request that waits longest."""
        waiting = self._pending_requests_to_fulfill
        return next((r for r in waiting if r.metadata is request_metadata and not r.future.done()), None)


def ranked(
    replicas: Sequence[RunningReplica], shares: dict[str, float], queues: Sequence[int]
) -> list[list[RunningReplica]]:
    """Replicas in groups, best first; [] if no node has enough of the prompt to matter.

    shares: by node id, the share of the prompt that is there. queues: length of each replica's queue.
    """
    gains = [int(WORTH * shares.get(replica.node_id, 0.0)) for replica in replicas]
    if not any(gains):
        return []
    groups = defaultdict(list)
    for replica, gain, queue in zip(replicas, gains, queues, strict=True):
        groups[gain - queue].append(replica)
    return [groups[score] for score in sorted(groups, reverse=True)]
