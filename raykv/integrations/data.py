"""Batch inference with Ray Data: rows that share a prefix go to the same engine, one after another.

    rows = prefix_ordered(dataset, tokenizer, engines=2)
    rows.map_batches(LLMPredictor, fn_constructor_kwargs={"model": ...}, compute=ActorPoolStrategy(size=2))

Ray Data gives a whole block of rows to one actor, so the rows within a block follow the order that
`raykv.scheduling.order` computes. Ray Data gives the next block to any actor with room, so actors take turns.
So the ordered rows are divided into one stretch for each engine, and blocks are taken from the stretches in turn.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from raykv.system.extras import to_install

try:
    import pyarrow as pa
    import ray.data
except ImportError as error:
    raise ImportError(f"this needs Ray Data: {to_install('data')}") from error

from raykv.keys import ROOT_BYTES, chain
from raykv.scheduling import split
from raykv.scheduling.batches import Prompts

BLOCK_TOKENS = 64  # tokens per compared piece of a prompt; a shorter shared prefix saves almost nothing
KEY_BYTES = 8  # bytes kept of each key; if two keys are equal by chance, a row only gets a worse place
BLOCKS = 8  # minimum number of Ray Data blocks per engine, so that the load is even
ROWS = 1000  # approximate maximum number of rows in a block
RANK = "__raykv_rank"


def prefix_ordered(dataset: ray.data.Dataset, tokenizer: Any, engines: int, column: str = "prompt") -> ray.data.Dataset:
    """Return the materialized rows of a dataset, ordered so that few prefixes are computed twice.

    tokenizer: the tokenizer of the engines' model, or a function that turns a value of `column`, such as messages, into
    token ids. It runs in Ray tasks. engines: number of actors that will process blocks. Each actor gets about the same
    number of prompt tokens to compute; generated tokens are not counted.

    All rows are in depth-first order of the tree of prefixes, so the rows of a block share prefixes. If batches are no
    larger than blocks, an actor gets a whole block, with its rows in order. Ray Data chooses which actor gets which
    block. `preserve_order` is set for the result, so that later stages keep the order of blocks.

    Ray's object store holds all returned rows. While the rows are being ordered, it holds them twice. This process
    holds 8 bytes for every 64 tokens of every prompt, and about 550 bytes for each prompt. Raises KeyError for an
    unknown column, and ValueError if `engines` is below 1 or the tokenizer does not return lists of token ids.
    """
    encode = getattr(tokenizer, "encode", tokenizer)
    tables, put = dataset.to_arrow_refs(), ray.put(encode)
    keys = ray.get([_keys.remote(table, column, put) for table in tables])
    blocks = dealt([prompt for of_table in keys for prompt in of_table], engines)
    if not blocks:
        return dataset
    ranks = np.empty(sum(map(len, keys)), np.int64)
    ranks[list(itertools.chain(*blocks))] = np.arange(len(ranks))
    ends = np.cumsum([len(of_table) for of_table in keys])
    with_ranks: Any = [_with_ranks.remote(*pair) for pair in zip(tables, np.split(ranks, ends[:-1]), strict=True)]
    rows = ray.data.from_arrow_refs(with_ranks)
    rows.context.execution_options.preserve_order = True
    starts = np.cumsum([len(block) for block in blocks])[:-1].tolist()
    ordered: ray.data.Dataset = rows.sort(RANK, boundaries=starts).drop_columns([RANK]).materialize()
    return ordered


def dealt(prompts: Prompts, engines: int) -> list[list[int]]:
    """Divide prompts into blocks. Returns the prompts' indices, by block: one block for each engine in turn."""
    stretches = split(prompts, engines)
    blocks = max(BLOCKS, -(-len(prompts) // (engines * ROWS)))
    cut = [[[part[i] for i in run] for run in split([prompts[i] for i in part], blocks)] for part in stretches]
    return [block for turn in zip(*cut, strict=True) for block in turn if block]


@ray.remote
def _keys(table: pa.Table, column: str, encode: Callable[[Any], Any]) -> list[NDArray[np.uint8]]:
    """Compute the keys of each row's prompt: (blocks, KEY_BYTES) uint8."""
    prompts = table.column(column).to_pylist() if table.num_rows else []  # an empty table may lack columns
    return [chain(bytes(ROOT_BYTES), encode(prompt), BLOCK_TOKENS)[:, :KEY_BYTES].copy() for prompt in prompts]


@ray.remote
def _with_ranks(table: pa.Table, ranks: NDArray[np.int64]) -> pa.Table:
    return table.append_column(RANK, pa.array(ranks))


class LLMPredictor:
    """vLLM's `LLM` on a pool, for `map_batches`: adds `generated_text` to the rows of a batch.

    It also adds `num_cached_tokens`, the number of a prompt's tokens that were not computed.
    """

    def __init__(
        self,
        model: str,
        sampling_params: dict[str, Any] | None = None,
        engine_kwargs: dict[str, Any] | None = None,
        pool: str = "default",
        column: str = "prompt",
    ) -> None:
        """model: name or folder. sampling_params: arguments of `SamplingParams`. engine_kwargs: arguments of `LLM`.

        pool: name of the pool. column: the column with prompts as text.
        """
        from vllm import LLM, SamplingParams

        from raykv.integrations.vllm import kv_transfer_config

        self.llm = LLM(model, **{"kv_transfer_config": kv_transfer_config(pool), **(engine_kwargs or {})})
        self.sampling_params = SamplingParams(**(sampling_params or {}))
        self.column = column

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """batch: arrays by column, all with the same number of rows."""
        outputs = self.llm.generate(batch[self.column].tolist(), self.sampling_params, use_tqdm=False)
        return {
            **batch,
            "generated_text": np.array([output.outputs[0].text for output in outputs], object),
            "num_cached_tokens": np.array([output.num_cached_tokens or 0 for output in outputs], np.int64),
        }
