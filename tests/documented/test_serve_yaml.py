"""`deploy/serve.yaml` by `serve deploy`. The test replaces the model's name, and has answers tell their cached tokens.

The file is for GPUs. Here each node claims a GPU, and a platform plugin has vLLM run on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from helpers.engines.serve.status import serves
from helpers.faces.shell import typed
from helpers.pools import eventually
from helpers.project.pages import ROOT

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from examples import serve_vllm

pytestmark = pytest.mark.timeout(900)
BLOCK, WORDS = 128, 1500  # tokens of a block, of vLLM on CPUs and of the pool; tokens of a document


class App(NamedTuple):
    pool: raykv.KVPool

    def ask(self, document: int, question: int, max_tokens: int = 8, **params: Any) -> serve_vllm.Answer:
        """params: the request's kv_transfer_params."""
        prompt = f"{serve_vllm.words(document, WORDS)} {serve_vllm.words(question, 20)}"
        return serve_vllm.ask(prompt, max_tokens, kv_transfer_params=params)


@pytest.fixture
def app(cluster: Any, pool: raykv.KVPool, tmp_path: Path) -> Iterator[App]:
    file, written = tmp_path / "serve.yaml", (ROOT / "deploy/serve.yaml").read_text()
    (application,) = yaml.safe_load(written)["applications"]
    (config,) = application["args"]["llm_configs"]
    name = config["model_loading_config"]["model_source"]
    untold = "# enable_prompt_tokens_details"
    assert untold in written
    file.write_text(written.replace(untold, untold[2:]).replace(name, serve_vllm.make_model(tmp_path / "model")))
    try:
        typed("serve deploy serve.yaml", tmp_path, RAY_DASHBOARD_ADDRESS=f"http://{cluster.webui_url}")
        eventually(lambda: serves(cluster.webui_url, "llm"), deadline=600)
        yield App(pool)
    finally:
        serve_vllm.shutdown()


def test_requests_follow_their_prefix_and_a_session_ends(app: App) -> None:
    for document in range(100, 104):
        before = app.pool.stats()["keys"]
        assert app.ask(document, 0).cached == 0
        eventually(lambda before=before: app.pool.stats()["keys"] >= before + WORDS // BLOCK)  # type: ignore[misc]
        assert all(app.ask(document, question).cached >= WORDS // BLOCK * BLOCK for question in (1, 2))
    assert app.pool.stats()["remote_hits"] == 0, "one by one, each was answered where its document is"
    with ThreadPoolExecutor(24) as threads:
        answers = list(threads.map(lambda question: app.ask(100, question, max_tokens=100), range(3, 27)))
    assert all(answer.cached >= WORDS // BLOCK * BLOCK and answer.text for answer in answers)
    assert app.pool.stats()["remote_hits"] >= WORDS // BLOCK, (
        "the other replica helped, and read the document from the pool"
    )
    keys, name = app.pool.stats()["keys"], dict[str, Any](raykv_session="an agent's")
    assert app.ask(200, 0, **name).cached == 0
    eventually(lambda: app.pool.stats()["keys"] >= keys + WORDS // BLOCK)
    assert app.pool.stats().get("done", 0) == 0
    app.ask(200, 0, **name, raykv_done=True)
    eventually(lambda: app.pool.stats().get("done", 0) >= WORDS // BLOCK)  # at the session's replica
