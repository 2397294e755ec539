"""Each file of examples/ does what its docstring says, by the commands that are written there."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.pages import ROOT
from helpers.serving import serves
from helpers.shell import running, typed

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from examples import serve_vllm

pytestmark = pytest.mark.timeout(900)
COMMAND = re.compile(r"(?m)^    (\S(?:.*\\\n)*.*)$")
# what is printed where prefixes were found
FOUND = {
    "batch_ray_data": r"stored, [1-9]\d* read from the pool",
    "engine": r"\[\d{4}, \d{4}\] of \d{5} prompt tokens computed",
    "serve_pd": r"decode engine computed +1\n",
    "serve_transformers": r"[1-9]\d* tokens from node",
    "serve_vllm": r"[1-9]\d* tokens cached",
}
ANSWERED = r'"token": \d+|data: \[DONE\]'


def commands(example: str) -> list[str]:
    """Those of its docstring."""
    return COMMAND.findall(ast.get_docstring(ast.parse(source(example).read_text()), clean=False) or "")


def source(example: str) -> Path:
    return ROOT / "examples" / f"{example}.py"


def test_every_example_is_here() -> None:
    assert {path.stem for path in (ROOT / "examples").iterdir() if path.suffix == ".py"} == FOUND.keys()


@pytest.mark.parametrize("example", FOUND)
def test_an_example_runs_by_itself(example: str) -> None:
    (command,) = (command for command in commands(example) if command.startswith("python "))
    assert re.search(FOUND[example], typed(command, ROOT))


@pytest.mark.parametrize("example", [example for example in FOUND if "serve run" in source(example).read_text()])
def test_an_example_serves_in_a_cluster_that_has_a_pool(
    example: str, cluster: Any, pool: raykv.KVPool, tmp_path: Path
) -> None:
    serve_run, *questions = (command for command in commands(example) if not command.startswith("python "))
    if "/path/to/model" in serve_run:
        serve_run = serve_run.replace("/path/to/model", serve_vllm.make_model(tmp_path))
    with running(serve_run, ROOT, lambda: serves(cluster.webui_url, "default"), RAY_ADDRESS=cluster.address):
        assert all(re.search(ANSWERED, typed(question, ROOT)) for question in questions)
