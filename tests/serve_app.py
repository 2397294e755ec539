"""A Serve app, two replicas on two nodes, that reads and stores: `serve run --working-dir . serve_app:app`."""

from typing import Any

from pools import BLOCK, patient, read, store, tokens
from ray import serve
from starlette.requests import Request

import raykv


@serve.deployment(num_replicas=2, max_replicas_per_node=1, ray_actor_options={"num_cpus": 0})
class Prompts:
    """Answers what of the prompt that `?seed=` names was in the pool, after which all of it is."""

    def __init__(self) -> None:
        patient()
        self.pool = raykv.attach()
        self.cache = self.pool.cache(model="m", block_tokens=16, block_bytes=BLOCK)

    def __call__(self, request: Request) -> dict[str, Any]:
        keys = self.cache.keys(tokens(int(request.query_params["seed"]), 32))
        found = read(self.cache, keys)
        stored = store(self.cache, keys, start=found.read)
        return {"node": self.pool.node_id, **found._asdict(), "stored": stored}


app = Prompts.bind()  # type: ignore[attr-defined]
