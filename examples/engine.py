"""A serving engine on a pool: continuous batching of a transformers model, paged KV, and scheduling by cached prefixes.

    python examples/engine.py

starts two Ray nodes with an engine each, asks prompts that share three headers, and shows how many of their tokens were
computed. In a cluster that has a pool (`raykv start`):

    serve run examples.engine:build

`BlockPool` finds prefixes among the engine's own blocks. `Engine.step` plans, loads from the pool, computes a batch and
stores new blocks. The model is a small Llama with random weights, and each byte is a token. Put your own model in
`load_model`.
"""

import asyncio
import itertools
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ray import serve
from ray.serve.config import RequestRouterConfig
from transformers import Cache, LlamaConfig, LlamaForCausalLM

import raykv
from raykv.bench.testbed import local_cluster, local_pool
from raykv.config import MIB
from raykv.integrations.serve import PrefixRouter, announce
from raykv.integrations.transformers import block_shape, model_cache
from raykv.scheduling import Budget, Request, plan

MODEL, TOKENS, PATIENCE_S = "random-llama", 512, 10.0  # TOKENS: maximum number of tokens per step


class BlockPool:
    """The engine's blocks. The name of a full block is its key. Blocks without holders are reused, oldest first."""

    def __init__(self, blocks: int) -> None:
        self._resting: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))  # first block is reused first
        self._holders: Counter[int] = Counter()
        self._by_name: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._resting)

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Return the blocks with these names, up to the first name that no block has."""
        return [self._by_name[name] for name in itertools.takewhile(self._by_name.__contains__, names)]

    def held(self, blocks: Sequence[int]) -> int:
        """Return how many leading blocks are held by requests."""
        return sum(1 for _ in itertools.takewhile(self._holders.__contains__, blocks))

    def hold(self, blocks: Sequence[int]) -> None:
        self._holders.update(blocks)
        for block in blocks:
            self._resting.pop(block, None)

    def take(self, count: int) -> list[int]:
        """Take `count` blocks to write to. The blocks lose their names."""
        taken = [self._resting.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._by_name.pop(self._names.pop(block, b""), None)
        self._holders.update(taken)
        return taken

    def name(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Name full blocks. A block stays unnamed if another block already has its name."""
        for block, name in zip(blocks, names, strict=False):
            if name not in self._by_name:
                self._by_name[name], self._names[block] = block, name

    def release(self, blocks: Sequence[int]) -> None:
        """Release blocks. Unnamed blocks are reused first, and a prompt's last blocks before its first blocks."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._resting[block] = None
                self._resting.move_to_end(block, last=block in self._names)


class PagedKV(Cache):  # type: ignore[misc]
    """KV that the model's layers read and write in one step. kv: (blocks, layers, 2, heads, block_tokens, dim).

    write: (2, n) int64, the block and the place in it for each token to compute. read: the same for each token to read.
    """

    def __init__(self, kv: torch.Tensor, write: torch.Tensor, read: torch.Tensor) -> None:
        super().__init__(layers=[])
        self.kv, self.write, self.read = kv, write, read

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        (write, at), (read, of) = self.write, self.read
        for which, new in enumerate((keys, values)):  # (1, heads, n, dim)
            self.kv[write, layer_idx, which, :, at] = new[0].transpose(0, 1)
        return tuple(self.kv[read, layer_idx, which, :, of].transpose(0, 1)[None] for which in range(2))


@dataclass(eq=False)
class Job:
    """A request in the engine. computed: number of tokens with KV in `blocks`. stored: number of blocks in the pool."""

    prompt: list[int]
    max_tokens: int
    keys: raykv.Keys
    match: raykv.Match  # holds the prompt's blocks in the pool until the job starts
    tokens: list[int]
    names: list[bytes]
    answer: Future[list[int]] = field(default_factory=Future)
    arrival: float = field(default_factory=time.monotonic)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    stored: int = 0


class Engine:
    """An engine with continuous batching. computed_tokens: number of prompt tokens that the model has computed."""

    def __init__(self, model: Any, cache: raykv.KVCache, blocks: int, schedule: Any = plan) -> None:
        """blocks: number of blocks in the engine's own memory. schedule: a function like `raykv.scheduling.plan`."""
        self.model, self.cache, self.schedule = model, cache, schedule
        self.kv = torch.zeros((blocks, *block_shape(model.config, cache.block_tokens)), dtype=model.dtype)
        self.pages = self.kv.view(blocks, -1).view(torch.uint8).numpy()
        self.pool, self.blocks = BlockPool(blocks), blocks
        self.new: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.waiting, self.running = list[Job](), list[Job]()
        self.computed_tokens = 0

    def add(self, prompt: Sequence[int], max_tokens: int) -> Future[list[int]]:
        """Return a future of the tokens after a prompt. Thread-safe. Raises ValueError for a bad or too long prompt."""
        if len(prompt) + max_tokens > self.blocks * self.cache.block_tokens:
            raise ValueError(f"{len(prompt)} + {max_tokens} tokens do not fit into {self.blocks} blocks")
        if not prompt or not 0 <= min(prompt) <= max(prompt) < self.model.config.vocab_size:
            raise ValueError(f"a prompt is a list of token ids below {self.model.config.vocab_size}")
        keys = self.cache.keys(list(prompt))
        job = Job(list(prompt), max_tokens, keys, self.cache.match(keys), list(prompt), [bytes(key) for key in keys])
        job.answer.set_running_or_notify_cancel()  # from now on the future can't be cancelled
        self.new.put(job)
        return job.answer

    def run(self) -> None:
        while True:
            try:
                if not self.step():
                    self.waiting.append(self.new.get())
            except Exception as error:  # current requests fail, but later requests are served
                for job in self.waiting + self.running:
                    self._end(job)
                    job.answer.set_exception(error)

    def step(self) -> bool:
        """Compute one batch. Returns False if there is nothing to do."""
        while not self.new.empty():
            self.waiting.append(self.new.get())
        waiting = {self._as_request(job): job for job in self.waiting}
        running = {Request(job.keys, len(job.tokens), job.arrival, job.computed): job for job in self.running}
        budget = Budget(TOKENS, self.pool.free, self.cache.block_tokens)
        scheduled = self.schedule(list(waiting), list(running), budget, time.monotonic(), PATIENCE_S)
        if not scheduled:
            return self._preempt()
        for request, _ in scheduled:
            if request in waiting:
                self._start(waiting[request])
        jobs = [{**waiting, **running}[request] for request, _ in scheduled]
        news = [min(new, len(job.tokens) - job.computed) for job, (_, new) in zip(jobs, scheduled, strict=True)]
        for job, new in zip(jobs, news, strict=True):
            lacking = -(-(job.computed + new) // self.cache.block_tokens) - len(job.blocks)
            job.blocks += self.pool.take(max(0, lacking))
        for job, new, token in zip(jobs, news, self._forward(jobs, news), strict=True):
            self._advance(job, new, token)
        return True

    def _as_request(self, job: Job) -> Request:
        own = self.pool.find(job.names[: self._most(job)])
        cached = min(max(len(own), job.match.num_blocks), self._most(job)) * self.cache.block_tokens
        return Request(job.keys, len(job.tokens), job.arrival, cached, self.pool.held(own))

    def _most(self, job: Job) -> int:
        """Return how many blocks may come from a cache: not the last token's block, as this token must be computed."""
        return (len(job.tokens) - 1) // self.cache.block_tokens

    def _start(self, job: Job) -> None:
        """Start a job with the blocks of its prefix that the engine has, and read further blocks from the pool."""
        self.waiting.remove(job)
        self.running.append(job)
        job.blocks = self.pool.find(job.names[: self._most(job)])
        self.pool.hold(job.blocks)
        own = job.stored = len(job.blocks)
        stop = min(job.match.num_blocks, self._most(job))
        if stop > own:
            with self.cache.match(job.keys[own:stop]) as match:
                job.blocks += self.pool.take(match.num_blocks)
                job.stored += match.read_into(self.pages, job.blocks[own:])
            self.pool.name(job.blocks[own : job.stored], job.names[own:])
        job.match.release()
        job.computed = job.stored * self.cache.block_tokens

    @torch.no_grad()
    def _forward(self, jobs: list[Job], news: list[int]) -> list[int]:
        """Compute the next tokens of each job. news: their number, by job. Returns the token that follows, by job."""
        ends = [job.computed + new for job, new in zip(jobs, news, strict=True)]
        places = [np.arange(job.computed, end) for job, end in zip(jobs, ends, strict=True)]
        write = np.concatenate([self._at(job, at) for job, at in zip(jobs, places, strict=True)], axis=1)
        read = np.concatenate([self._at(job, np.arange(end)) for job, end in zip(jobs, ends, strict=True)], axis=1)
        mask = torch.full((write.shape[1], read.shape[1]), torch.finfo(self.model.dtype).min, dtype=self.model.dtype)
        row = column = 0
        for at, end in zip(places, ends, strict=True):  # a token attends to its own job's tokens, up to itself
            own = mask[row : row + len(at), column : column + end]
            own[torch.arange(end)[None] <= torch.from_numpy(at)[:, None]] = 0
            row, column = row + len(at), column + end
        tokens = [token for job, at in zip(jobs, places, strict=True) for token in job.tokens[at[0] : at[-1] + 1]]
        output = self.model(
            torch.tensor([tokens]),
            position_ids=torch.from_numpy(np.concatenate(places))[None],
            attention_mask=mask[None, None],
            past_key_values=PagedKV(self.kv, torch.from_numpy(write), torch.from_numpy(read)),
            logits_to_keep=torch.from_numpy(np.cumsum([len(at) for at in places]) - 1),
        )
        return output.logits[0].argmax(-1).tolist()  # type: ignore[no-any-return]

    def _at(self, job: Job, places: Any) -> Any:
        return np.stack([np.array(job.blocks)[places // self.cache.block_tokens], places % self.cache.block_tokens])

    def _advance(self, job: Job, new: int, token: int) -> None:
        self.computed_tokens += max(0, min(new, len(job.prompt) - job.computed))
        job.computed += new
        full = min(job.computed // self.cache.block_tokens, len(job.names))
        if full > job.stored:
            blocks = job.blocks[job.stored : full]
            self.pool.name(blocks, job.names[job.stored : full])
            self.cache.store_from(job.keys[:full], self.pages, blocks, job.stored)
            job.stored = full
        if job.computed == len(job.tokens):
            job.tokens.append(token)
        if len(job.tokens) - len(job.prompt) >= job.max_tokens:
            self._end(job)
            job.answer.set_result(job.tokens[len(job.prompt) :])

    def _end(self, job: Job) -> None:
        (self.running if job in self.running else self.waiting).remove(job)
        job.match.release()
        self.pool.release(job.blocks)
        job.blocks = []

    def _preempt(self) -> bool:
        for job in self.running[-1:]:  # no job can continue, so the job that started last waits again
            self._end(job)
            job.match, job.computed = self.cache.match(job.keys), 0
            self.waiting.insert(0, job)
        return bool(self.waiting)


def load_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.1)).eval()


@serve.deployment(num_replicas=2, max_replicas_per_node=1, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 1})
class Replica:
    """Answers a prompt with the greedy tokens that follow it. The engine runs in its own thread."""

    def __init__(self, pool: str, blocks: int = 1000, schedule: Any = plan) -> None:
        model = load_model()
        self.engine = Engine(model, model_cache(raykv.attach(pool), model, name=MODEL), blocks, schedule)
        announce(self.engine.cache, MODEL)
        threading.Thread(target=self.engine.run, daemon=True).start()

    async def __call__(self, token_ids: list[int], max_tokens: int) -> list[int]:
        return await asyncio.wrap_future(await asyncio.to_thread(self.engine.add, token_ids, max_tokens))

    def computed_tokens(self) -> int:
        return self.engine.computed_tokens


def build(arguments: dict[str, Any]) -> serve.Application:
    """Build the application for `serve run`. arguments: `pool` (default: "default"); `schedule`, to replace `plan`."""
    known = {"pool": arguments.get("pool", "default"), "model": MODEL}
    router = RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs=known)
    return Replica.options(request_router_config=router).bind(  # type: ignore[attr-defined]
        known["pool"], schedule=arguments.get("schedule", plan)
    )


def main() -> None:
    with local_cluster(2), local_pool("default", 512 * MIB):
        engines = serve.run(build({}))
        headers = [bytes(f"You are assistant {i}. " * 40, "ascii") for i in range(3)]
        prompts = [list(headers[i % 3] + bytes(f"Question {i}: what is {i} times {i}?", "ascii")) for i in range(40)]
        for answer in [engines.remote(token_ids=prompt, max_tokens=16) for prompt in prompts]:
            print(bytes(answer.result()))
        print(engines.broadcast("computed_tokens").results(), "of", sum(map(len, prompts)), "prompt tokens computed")
        serve.shutdown()


if __name__ == "__main__":
    main()
