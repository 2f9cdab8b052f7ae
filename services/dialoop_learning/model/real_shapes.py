"""Checkpoints of the shape that people have, with random weights: to measure what a job needs.

python -m dialoop_learning.model.real_shapes DIRECTORY

writes one of Qwen3-0.6B's shape: 596 million parameters in bfloat16, in several safetensors files,
a tied head, and a byte-level tokenizer of 151,936 entries. transformers and vLLM load it. Nothing
is downloaded. What such a model says is noise; what it takes in memory, bytes and time is not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from itertools import islice, product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Qwen3Config

from dialoop_learning.model.checkpoint import save_model
from dialoop_learning.model.tiny import CHAT_TEMPLATE, CONTROL_TOKENS

NUM_TOKENS = 151_936
"""Entries of the tokenizer, as many as the model embeds."""
MAX_POSITIONS = 40_960
QWEN3_06B: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": NUM_TOKENS,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    }
)
"""The fields of Qwen3-0.6B's config.json that say its shape."""
_SHARD = "300MB"


def make_real_shape(
    directory: Path | str,
    *,
    seed: int = 0,
    fields: Mapping[str, Any] = MappingProxyType({}),
    shard: str = _SHARD,
) -> Path:
    """Write tokenizer and random weights to `directory`; `fields` replace those of the shape."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = wide_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    text = json.dumps(_tokenizer_config(), indent=2)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = Qwen3Config(**{**QWEN3_06B, **ends, **fields})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    save_model(model, directory, max_shard_size=shard)
    return directory


def wide_tokenizer() -> Tokenizer:
    """Return a byte-level BPE of 151,936 entries: 256 bytes, then pairs and longer runs of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(islice(_merges(alphabet), NUM_TOKENS - len(alphabet) - len(CONTROL_TOKENS)))
    symbols = alphabet + [left + right for left, right in merges]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    return tokenizer


def _merges(alphabet: list[str]) -> Iterator[tuple[str, str]]:
    """Yield merges whose results all differ: pairs of bytes, then a pair of letters and a byte."""
    yield from product(alphabet, alphabet)
    letters = [symbol for symbol in alphabet if symbol.isascii() and symbol.isalnum()]
    for left, right, last in product(letters, letters, alphabet):
        yield left + right, last


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }


def main() -> None:
    """Run the command line: where to write."""
    parser = argparse.ArgumentParser(description="Write a checkpoint of Qwen3-0.6B's shape.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.stdout.write(f"{make_real_shape(arguments.directory, seed=arguments.seed)}\n")


if __name__ == "__main__":
    main()
