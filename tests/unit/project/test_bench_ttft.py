"""The models of `raykv bench ttft`."""

from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'raykv[transformers]'")

from transformers import AutoConfig

from raykv.bench.engines import ttft
from raykv.cli.main import main


def test_help_names_all_models() -> None:
    said = CliRunner().invoke(main, ["bench", "ttft", "--help"], terminal_width=200).output
    assert f"[{'|'.join(ttft.MODELS)}]" in "".join(said.split())
    refused = CliRunner().invoke(main, ["bench", "ttft", "--model", "gpt-2"])
    assert refused.exit_code == 2 and "gpt-oss-shape" in refused.output


@pytest.mark.parametrize("model", ttft.MODELS)
def test_every_layer_has_a_kind(model: str, tmp_path: Path) -> None:
    """Each model is as large as the Llama, and its layers have the pattern of the model's family."""
    config = AutoConfig.from_pretrained(ttft.save_model(str(tmp_path), model))
    assert config.hidden_size == ttft.SIZES["hidden_size"]
    kinds = getattr(config, "layer_types", None) or []
    assert len(kinds) in (0, config.num_hidden_layers)
    full = {"gpt-oss-shape": 8, "gemma3-shape": 3, "qwen3-next-shape": 4}.get(model)
    assert full is None or kinds.count("full_attention") == full
