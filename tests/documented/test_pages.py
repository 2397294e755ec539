"""Runs every code block of README.md and docs/ that can run here, page by page, on one cluster."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers.pools import MIB, free_port
from helpers.project.pages import ROOT, run

import raykv
from raykv.arena.files import arenas_of
from raykv.cluster import identity

POOL = "default"  # as the pages call it
MODEL = "meta-llama/Llama-3.1-8B"
SMALL = {"--cpu-memory 0.3": "--cpu-memory 64MiB", "cpu_memory=0.3": f"cpu_memory={64 * MIB}"}


@pytest.fixture
def no_pool(cluster: Any) -> Iterator[None]:
    """End the page's pool after the test, even if the page does not."""
    yield
    with contextlib.suppress(raykv.PoolNotFound):
        raykv.attach(POOL).stop()
    assert not arenas_of(POOL, identity())


def run_here(page: str, cluster: Any, folder: Path, **replaced: str) -> dict[str, Any]:
    there = next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != ray.get_runtime_context().get_node_id())
    environment = {"RAY_ADDRESS": cluster.address, "NODE": there}
    namespace = run(ROOT / page, {**SMALL, **replaced}, environment, folder)
    for value in namespace.values():
        if isinstance(value, raykv.KVPool):
            value.close()
    return namespace


def test_readme(cluster: Any, no_pool: None, tmp_path: Path) -> None:
    page = run_here("README.md", cluster, tmp_path)
    assert page["n"] == 0, "nobody had stored it"


def test_getting_started(cluster: Any, no_pool: None, tmp_path: Path) -> None:
    page = run_here("docs/getting-started.md", cluster, tmp_path)
    assert page["stored"] and page["n"]


def test_operations(cluster: Any, no_pool: None, tmp_path: Path) -> None:
    run_here("docs/operations.md", cluster, tmp_path)
    assert (tmp_path / "status.json").read_text().startswith("{")


def test_quotas(cluster: Any, no_pool: None, tmp_path: Path) -> None:
    page = run_here("docs/quotas.md", cluster, tmp_path)
    assert page["cache"].id.tenant == "team-a"


def test_tiers(cluster: Any, no_pool: None, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of this test")
    secret.chmod(0o600)
    where = {"/mnt/nvme/raykv?capacity=200GiB": f"{tmp_path}/tier?capacity=256MiB", "/etc/raykv/secret": str(secret)}
    page = run_here("docs/tiers.md", cluster, tmp_path, **where)
    assert page["FolderTier"].shared


def test_engines(cluster: Any, no_pool: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'raykv[serve]'")
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")
    raykv.start(raykv.PoolConfig(name=POOL, cpu_memory=64 * MIB))
    serve.start(proxy_location="HeadOnly", http_options={"port": free_port()})
    try:
        page = run_here("docs/engines.md", cluster, tmp_path, **{MODEL: make_model(tmp_path / "model")})
    finally:
        serve.shutdown()
    assert page["start"].pool_tokens == 0
    assert page["first_token"] == int(page["token"])


def make_model(folder: Path) -> str:
    """Save a small Llama of random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    return str(folder)
