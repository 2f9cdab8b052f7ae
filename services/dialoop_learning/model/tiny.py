"""A model small enough to learn arithmetic on a laptop in a minute: 0.83M parameters, 314 tokens.

python -m dialoop_learning.model.tiny DIRECTORY

writes tokenizer.json, tokenizer_config.json, config.json, generation_config.json and
model.safetensors, which transformers, vLLM and the tokenizers library load.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dialoop_learning.loss.facts import TINY_CHAT_TEMPLATE, TINY_MODEL_POSITIONS
from dialoop_learning.model.checkpoint import save_model

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens of the chat template. They are special, so they never count as content."""

SYNTAX_TOKENS = ("<request>", "<call>", "<response>", "<submit>", "<Calculator>")
"""Markers that the policy writes and the environment reads: single tokens that are content."""

CHAT_TEMPLATE = TINY_CHAT_TEMPLATE

# The merges are fixed, so that the vocabulary is the same everywhere. Ġ stands for a space.
_MERGES = (
    "e s|s t|a n|e r|u l|u s|us er|e m|s y|sy st|syst em|a s|i st|s ist|an t|as sist|assist ant|"
    "o l|t o|to ol|es ul|esul t|R esult|r esult|Ġ t|h e|Ġt he|i n|in g|an d|Ġ and|i s|Ġ is|r e|"
    "o n|o r|a t|e n|l l|o u|e d|a r|a l|l e|Ġ w|h at|Ġw hat|o m|u m|i c"
)

# Qwen2's own pattern, with every digit alone. For this model type transformers does not read the
# pattern from tokenizer.json, so with another one the two libraries would tokenise differently.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

INITIALIZER_RANGE = 0.08
"""Standard deviation of the initial weights; at the usual 0.02 so small a model learns nothing."""

_SMALL: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": INITIALIZER_RANGE,
    "dtype": "float32",
}


def make_tiny_model(directory: Path | str, *, seed: int = 0) -> Path:
    """Write tokenizer and seeded random weights to `directory`; make it if it is missing."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(tiny_config())
    save_model(model, directory)
    return directory


def tiny_config() -> Qwen2Config:
    """Return a Qwen2 of 4 layers, 128 wide, 4 heads on 2 key-value heads, with tied embeddings."""
    tokenizer = tiny_tokenizer()
    return Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TINY_MODEL_POSITIONS,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        dtype="float32",
    )


def make_random_model(
    directory: Path | str,
    model_type: str,
    *,
    fields: Mapping[str, Any] = MappingProxyType({}),
    seed: int = 0,
) -> Path:
    """Write a tiny checkpoint of any model type of transformers; make its folder if it is missing.

    Every tensor has noise, so that a bias or a norm that is left out shows in log-probs. `fields`
    replace those of its config.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(random_config(model_type, fields))
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn_like(tensor) * (0.2 if tensor.ndim < 2 else 0.05))
    save_model(model, directory)
    return directory


def random_config(model_type: str, fields: Mapping[str, Any]) -> Any:
    """Return transformers' config of such a model."""
    tokenizer = tiny_tokenizer()
    tokens = {
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    values = {**_SMALL, **tokens, **fields}
    return AutoConfig.for_model(model_type, **deepcopy(values))  # it writes into tables


def tiny_tokenizer() -> Tokenizer:
    """Return a byte-level BPE of 256 bytes, 50 merges and 8 added tokens, every digit alone."""
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in _MERGES.split("|"))]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in merges]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in SYNTAX_TOKENS])
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json to `directory`."""
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.dumps(_tokenizer_config(tokenizer), indent=2)
    (directory / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in CONTROL_TOKENS,
        }
        for token in (*CONTROL_TOKENS, *SYNTAX_TOKENS)
    }
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": TINY_MODEL_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }


def main() -> None:
    """Run the command line: where to write, and the seed of the weights."""
    parser = argparse.ArgumentParser(description="Write the tiny model of the demo.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_tiny_model(arguments.directory, seed=arguments.seed)


if __name__ == "__main__":
    main()
