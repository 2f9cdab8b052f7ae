"""Make random models of a size, with the demo's tokenizer, for the inference benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from dialoop_learning.model.tiny import make_tiny_model, tiny_config
from transformers import Qwen2Config, Qwen2ForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {
    "3m": {"hidden_size": 256, "intermediate_size": 640, "vocab_size": 1024},
    "59m": {
        "hidden_size": 640,
        "intermediate_size": 1792,
        "num_hidden_layers": 12,
        "num_attention_heads": 10,
        "vocab_size": 8192,
    },
}
"""Qwen2 with tied embeddings; what is not named is as in the demo's model."""


def make_model(folder: Path, size: str) -> Path:
    """Write a model directory of one of SIZES."""
    make_tiny_model(folder)
    fields = tiny_config().to_dict()
    del fields["layer_types"]  # one for each layer: made again for another number of them
    config = Qwen2Config.from_dict(fields | SIZES[size])
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder
