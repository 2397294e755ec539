"""Each file of examples/ that serves does so in a cluster with a pool, by the commands of its docstring."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.engines.serve.status import serves
from helpers.faces.shell import running, typed
from helpers.project.examples import NAMES, commands, source
from helpers.project.pages import ROOT

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from examples import serve_vllm

pytestmark = pytest.mark.timeout(900)
SERVING = [example for example in NAMES if "serve run" in source(example).read_text()]
ANSWERED = r'"token": \d+|data: \[DONE\]'


@pytest.mark.parametrize("example", SERVING)
def test_an_example_serves_in_a_cluster_that_has_a_pool(
    example: str, cluster: Any, pool: raykv.KVPool, tmp_path: Path
) -> None:
    serve_run, *questions = (command for command in commands(example) if not command.startswith("python "))
    if "/path/to/model" in serve_run:
        serve_run = serve_run.replace("/path/to/model", serve_vllm.make_model(tmp_path))
    with running(serve_run, ROOT, lambda: serves(cluster.webui_url, "default"), RAY_ADDRESS=cluster.address):
        assert all(re.search(ANSWERED, typed(question, ROOT)) for question in questions)
