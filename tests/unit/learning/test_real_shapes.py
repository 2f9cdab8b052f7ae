"""The checkpoint of a real shape: its tokenizer, its files, and that it is loaded as any other."""

from __future__ import annotations

import json

import torch
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.model.real_shapes import NUM_TOKENS, QWEN3_06B, make_real_shape
from dialoop_learning.model.weight_files import is_tied, num_parameters
from transformers import AutoModelForCausalLM

SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def test_it_has_the_head_and_tokenizer_of_the_shape_in_several_files(tmp_path) -> None:
    directory = make_real_shape(tmp_path / "model", fields=SMALL, shard="4MB")
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.vocab_size == NUM_TOKENS == QWEN3_06B["vocab_size"]
    text = "What is 12 + 34? Größe, 漢字"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    assert tokenizer.end_of_turn_ids == (NUM_TOKENS - 1,)
    assert len(list(directory.glob("*.safetensors"))) > 1
    config = json.loads((directory / "config.json").read_text("utf-8"))
    assert (config["vocab_size"], config["dtype"]) == (NUM_TOKENS, "bfloat16")
    assert is_tied(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype is torch.bfloat16
    assert num_parameters(directory) == sum(p.numel() for p in model.parameters())
