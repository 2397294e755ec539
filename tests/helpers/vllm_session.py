"""A vLLM engine as an actor that is sent a prompt in pieces, as by who speaks to it."""

import asyncio
from collections.abc import AsyncGenerator

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from raykv.integrations.vllm import kv_transfer_config


class StreamedEngine:
    """vLLM's AsyncLLM on a pool, in float32: whatever was computed together gives the same tokens."""

    def __init__(self, pool: str, model: str, cache_bytes: int, role: str = "kv_both") -> None:
        arguments = AsyncEngineArgs(
            model=model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_cache_memory_bytes=cache_bytes,
            kv_transfer_config=kv_transfer_config(pool, role),
            dtype="float32",
            max_model_len=3200,
            block_size=32,
        )
        self.engine = AsyncLLM.from_engine_args(arguments)

    async def session(self, turns: list[list[int]], tokens: int) -> list[list[int]]:
        """Send each turn when the one before is answered. Returns the answers, of so many greedy tokens each."""
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

    async def close(self) -> None:
        self.engine.shutdown()
