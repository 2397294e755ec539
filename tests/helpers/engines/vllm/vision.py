"""A small model of random weights that sees images, without torchvision, which most such models of vLLM need."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

SPECIAL = ["<bos>", "<eos>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
SPECIAL += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)] + ["<image>"]
VOCABULARY = 500
IMAGE = VOCABULARY - 1  # the token in whose place vLLM puts an image's tokens
# options of vLLM for it; its processor needs the tokenizer
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 4}}


def save_vision_model(folder: Path) -> None:
    """An Idefics3: a tile of 56 x 56 pixels has 4 tokens."""
    torch.manual_seed(0)
    sizes = {"intermediate_size": 512, "num_hidden_layers": 2, "initializer_range": 0.2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 256}
    text = {"model_type": "llama", "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "pad_token_id": 1}
    vision = {"hidden_size": 64, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    config = Idefics3Config(
        vision_config=sizes | vision,
        text_config=sizes | heads | text,
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    words = [f"t{i}" for i in range(VOCABULARY - len(SPECIAL))] + SPECIAL
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "t0", "pad_token": "t1"}
    Idefics3Processor(
        image_processor=Idefics3ImageProcessor(size={"longest_edge": 112}, max_image_size={"longest_edge": 56}),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=SPECIAL, **named),
        image_seq_len=4,
    ).save_pretrained(folder)


def image(seed: int) -> Image.Image:
    """An image of 5 tiles: 20 tokens, and tokens around them."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (100, 80, 3), dtype=np.uint8))
