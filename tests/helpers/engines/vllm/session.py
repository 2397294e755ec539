"""vLLM's AsyncLLM as an actor. It takes a prompt in pieces, as from a user who speaks, and may have several ranks."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any
from uuid import uuid4

import psutil
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from helpers.engines.vllm.engine import processes
from helpers.pools import PATIENCE_S
from raykv.integrations.vllm import kv_transfer_config


class StreamedEngine:
    """vLLM's AsyncLLM on a pool, in float32: a prompt gives the same tokens whatever it is computed together with."""

    def __init__(
        self, pool: str, model: str, cache_bytes: int, extra: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """extra: for the connector's configuration. options: vLLM's."""
        transfer = kv_transfer_config(pool)
        transfer["kv_connector_extra_config"] |= {"verify_tokens": True} | (extra or {})
        arguments = AsyncEngineArgs(
            model=model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_cache_memory_bytes=cache_bytes,
            kv_transfer_config=transfer,
            dtype="float32",
            max_model_len=3200,
            block_size=32,
            **options,
        )
        self.engine = AsyncLLM.from_engine_args(arguments)

    async def session(self, turns: list[list[int]], tokens: int) -> list[list[int]]:
        """Send each turn when the turn before is answered. Returns the answers, each of `tokens` greedy tokens."""
        answers: list[list[int]] = [[]]
        answered = asyncio.Event()

        async def inputs() -> AsyncGenerator[StreamingInput, None]:
            for turn in turns:
                yield StreamingInput(prompt={"prompt_token_ids": turn})
                await answered.wait()
                answered.clear()

        sampling = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in self.engine.generate(inputs(), sampling, "session"):
            answers[-1].extend(output.outputs[0].token_ids)
            if len(answers[-1]) == tokens:
                answers.append([])
                answered.set()
        return answers[: len(turns)]

    async def answer(self, prompt: list[int], tokens: int = 8, rank: int | None = None) -> tuple[list[int], int]:
        """(tokens that follow, how many of the prompt's tokens were cached). rank: the data-parallel rank to ask."""
        sampling = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        asked: Any = {"prompt_token_ids": prompt}
        given = self.engine.generate(asked, sampling, uuid4().hex, data_parallel_rank=rank)
        outputs = [output async for output in given]
        return list(outputs[-1].outputs[0].token_ids), outputs[-1].num_cached_tokens or 0

    async def reset(self, **options: bool) -> bool:
        return bool(await self.engine.reset_prefix_cache(**options))

    async def pause(self) -> None:
        """Pause, reset and resume as the docs do."""
        await self._again(lambda: self.engine.pause_generation(mode="keep", clear_cache=True))
        await self.engine.resume_generation()

    async def reset_all(self) -> None:
        """Reset as the docs do, even while requests run and load."""
        await self._again(lambda: self.engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True))

    async def _again(self, call: Callable[[], Awaitable[Any]]) -> None:
        while True:
            try:
                await call()
                return
            except Exception:
                await self.engine.resume_generation()
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        started = processes()
        self.engine.shutdown()
        psutil.wait_procs(started, timeout=PATIENCE_S)
