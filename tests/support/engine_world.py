"""An engine on a small random model, what its numbers ought to be, and how to publish to it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers
from dialoop.sequences import PolicyVersion
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_services.inference.engine import Engine, EngineOptions, Sampled, StopTokens

if TYPE_CHECKING:
    from pathlib import Path

MAX_MODEL_LEN = 256
VOCAB = 300
NO_STOP = StopTokens()
SPECIAL = ("<|im_start|>", "<|im_end|>", "<call>", "<submit>")


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>"
    ).save_pretrained(folder)


def make_model(*, seed: int, tied: bool) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.08,
        eos_token_id=257,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif "norm" in name:
                parameter.normal_(mean=1.0, std=0.2)
    return model


def save_model(folder: Path, *, seed: int, tied: bool) -> Path:
    make_model(seed=seed, tied=tied).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_weights(path: Path, *, seed: int, tied: bool) -> Path:
    from safetensors.torch import save_file

    state = make_model(seed=seed, tied=tied).state_dict()
    if tied:
        del state["lm_head.weight"]
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return path


def forward_logprobs(
    ids: list[int], *, seed: int, tied: bool, temperature: float = 1.0
) -> np.ndarray:
    with torch.inference_mode():
        logits = make_model(seed=seed, tied=tied)(torch.tensor([ids])).logits[0, :-1].float()
    rows = torch.log_softmax(logits / temperature, dim=-1)
    return rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def worst(sampled: Sampled, prompt: list[int], **model: object) -> float:
    expected = forward_logprobs([*prompt, *sampled.token_ids], **model)[len(prompt) - 1 :]
    return float(np.abs(expected - np.array(sampled.logprobs)).max())


def version(number: int) -> PolicyVersion:
    return PolicyVersion(lineage="main", number=number)


async def start(kind: str, folder: Path) -> Engine:
    if kind == "vllm":
        os.environ["HF_HUB_OFFLINE"] = "1"
        pytest.importorskip("vllm")
        from dialoop_services.inference.vllm_engine.engine import VllmEngine

        return await VllmEngine.start(folder, EngineOptions(max_model_len=MAX_MODEL_LEN))
    from dialoop_services.inference.transformers_engine.engine import TransformersEngine

    return await TransformersEngine.start(folder, EngineOptions(max_model_len=MAX_MODEL_LEN))


KINDS = [
    pytest.param((kind, tied), id=f"{kind}-{'tied' if tied else 'untied'}", marks=marks)
    for kind, marks in (("transformers", ()), ("vllm", (pytest.mark.heavy, pytest.mark.vllm)))
    for tied in (True, False)
]


class Running:
    """An engine, and the seed its present weights were drawn with."""

    def __init__(self, engine: Engine, model: Path, folder: Path, *, tied: bool) -> None:
        self.engine, self.folder, self.tied, self.seed, self.number = engine, folder, tied, 0, 0
        self.tokenizer = Tokenizer.from_directory(model)

    @property
    def model(self) -> dict[str, object]:
        return {"seed": self.seed, "tied": self.tied}

    async def load(self, seed: int) -> PolicyVersion:
        self.number += 1
        path = save_weights(self.folder / f"{self.number}.safetensors", seed=seed, tied=self.tied)
        await self.engine.load_weights(path, version(self.number))
        self.seed = seed
        return version(self.number)


def prompts(count: int, *, shortest: int = 5) -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(0, 256, size=shortest + i).tolist() for i in range(count)]
