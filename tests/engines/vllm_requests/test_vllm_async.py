"""Features of vLLM's AsyncLLM alone: sessions whose prompt grows, and resets while requests load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
from helpers.engines import left_over
from helpers.pools import MIB, eventually, node_store, other_node, pid, stopped
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import ENVIRONMENT, close_engines, engine_on, save_model
from helpers.engines.vllm.session import StreamedEngine

from raykv.integrations.vllm.compat import TRIMS_HASHES

pytestmark = pytest.mark.timeout(600)
CHUNK = 128  # tokens


class Engines(NamedTuple):
    """streamed: an AsyncLLM. reader: an engine on the other node."""

    pool: raykv.KVPool
    streamed: Any
    reader: Any

    def afresh(self, prompt: list[int], cold: bool = False) -> tuple[list[int], int]:
        """(answer, how many tokens were read) from the reader, after it has emptied its own cache."""
        eventually(lambda: ray.get(self.reader.reset.remote()))
        return ray.get(self.reader.answer.remote(prompt, cold=cold))[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def engines(
    start_for_module: Callable[..., raykv.KVPool], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    pool, model = start_for_module(cpu_memory=256 * MIB), tmp_path_factory.mktemp("model")
    save_model(model)
    kind = ray.remote(StreamedEngine).options(
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(pool.node_id, soft=False),
        runtime_env={"env_vars": ENVIRONMENT},
    )
    weights = model / "weights"
    weights.write_text("step 1")
    arguments = (pool.name, str(model), 128 * MIB)
    with left_over.removed():
        streamed: Any = kind.remote(*arguments, {"weights": str(weights)})
        reader = engine_on(other_node(pool), *arguments, extra={"weights": str(weights)})
        engines = Engines(pool, streamed, reader)
        ray.get([engine.answer.remote([7] * 40) for engine in (streamed, reader)])
        yield engines
        ray.get(streamed.close.remote())
        ray.kill(streamed)
        close_engines(engines.reader)


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        ((128, 128, 128), 1),
        ((127, 128, 128), 1),  # the sampled token ends a block, and is dropped
        ((100, 60, 200, 31), 29),
        ((300, 10, 10, 300), 8),
    ],
    ids=["whole_chunks", "a_dropped_token_ends_a_block", "answers_are_kept", "turns_within_a_chunk"],
)
def test_a_session_that_grows_is_read_right_by_others(engines: Engines, lengths: tuple[int, ...], tokens: int) -> None:
    random = np.random.default_rng(sum(lengths) + tokens)
    turns: list[list[int]] = [random.integers(3, 500, length).tolist() for length in lengths]
    answers = ray.get(engines.streamed.session.remote(turns, tokens))
    assert [len(answer) for answer in answers] == [tokens] * len(turns)
    # vLLM drops the last token of an answer when the next turn comes
    kept = [turn + answer[:-1] for turn, answer in zip(turns, answers, strict=True)]
    said = [token for turn in kept for token in turn]
    stored = len(said if TRIMS_HASHES else kept[0]) // CHUNK * CHUNK
    for end in range(CHUNK, stored + 1, CHUNK):
        prompt = said[:end] + [7] * 40
        eventually(lambda prompt=prompt, end=end: engines.afresh(prompt)[1] == end)  # type: ignore[misc]
        assert engines.afresh(prompt) == (engines.afresh(prompt, cold=True)[0], end)


@pytest.mark.parametrize("how", ["reset_all", "pause"])
def test_a_reset_while_a_request_loads_succeeds_when_tried_again(engines: Engines, how: str) -> None:
    """The blocks are on a node whose store hangs, so the load can't end before the first try."""
    prompt = np.random.default_rng(len(how)).integers(3, 500, 3 * CHUNK + 40).tolist()
    before = engines.pool.stats()["keys"]
    right = engines.afresh(prompt)[0]
    eventually(lambda: engines.pool.stats()["keys"] >= before + 3)
    with stopped(pid(node_store(engines.pool, other_node(engines.pool)))):
        asked = engines.streamed.answer.remote(prompt)
        eventually(lambda: not ray.get(engines.streamed.reset.remote()))  # refused: the request has blocks
        with pytest.raises(Exception, match="Failed to reset"):
            ray.get(engines.streamed.reset.remote(reset_running_requests=True, reset_connector=True))
        ray.get(getattr(engines.streamed, how).remote())
    assert ray.get(asked)[0] == right

    def read() -> bool:
        eventually(lambda: ray.get(engines.streamed.reset.remote()))
        return bool(ray.get(engines.streamed.answer.remote(prompt)) == (right, 3 * CHUNK))

    eventually(read)
