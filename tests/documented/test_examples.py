"""Each file of examples/ does what its docstring says, started by the command that needs no cluster."""

import re

import pytest
from helpers.faces.shell import typed
from helpers.project.examples import NAMES, commands
from helpers.project.pages import ROOT

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

pytestmark = pytest.mark.timeout(900)
# output that shows that prefixes were found
FOUND = {
    "batch_ray_data": r"stored, [1-9]\d* read from the pool",
    "engine": r"\[\d{4}, \d{4}\] of \d{5} prompt tokens computed",
    "serve_pd": r"decode engine computed +1\n",
    "serve_transformers": r"[1-9]\d* tokens from node",
    "serve_vllm": r"[1-9]\d* tokens cached",
}


def test_every_example_is_here() -> None:
    assert set(NAMES) == FOUND.keys()


@pytest.mark.parametrize("example", FOUND)
def test_an_example_runs_by_itself(example: str) -> None:
    (command,) = (command for command in commands(example) if command.startswith("python "))
    assert re.search(FOUND[example], typed(command, ROOT))
