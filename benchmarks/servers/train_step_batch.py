"""Write the model and the batch on which every way of a train step is measured to a folder.

Two prompts of 64 to 256 tokens, eight answers each, as a GRPO step trains. Answers are ragged, 16
to 1024 tokens, log-normal (median 160, sigma 0.9); with `answer_tokens` all have that length. The
sampler's log-probs are the model's own with noise, so that the clip has something to do.
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

DEVICE = torch.device(os.environ.get("TRAIN_STEP_DEVICE", "cpu"))
"""Where every way computes: in float32 on a CPU, and with autocast to bfloat16 on a GPU."""

CLIP, MAX_GRAD_NORM, LEARNING_RATE = 0.2, 1.0, 1e-12
"""The learning rate moves nothing, so that every repeat computes the same."""

ENTROPY_COEFF = 0.01
"""torchrl's default, with which its GRPOLoss ships."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequence:
    """One prompt with one answer of M tokens; inference_logprobs float32 [M]."""

    ids: Tensor
    num_prompt: int
    prompt: int
    inference_logprobs: Tensor
    advantage: float

    @property
    def num_trained(self) -> int:
        """M: how many tokens the policy wrote."""
        return len(self.ids) - self.num_prompt


def make(
    folder: Path,
    *,
    vocabulary: int,
    num_prompts: int,
    group_size: int,
    seed: int,
    answer_tokens: int = 0,
) -> None:
    """Write model and batch; with `answer_tokens` every answer is that long."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    model.save_pretrained(folder / "model")
    make_batch(
        folder,
        num_prompts=num_prompts,
        group_size=group_size,
        seed=seed,
        answer_tokens=answer_tokens,
    )


def make_batch(
    folder: Path, *, num_prompts: int, group_size: int, seed: int, answer_tokens: int = 0
) -> None:
    """Write a batch for the model that is in the folder."""
    model = load_model(folder)
    vocabulary = int(model.config.vocab_size)
    made = [
        sequence
        for prompt in range(num_prompts)
        for sequence in _group(
            model, prompt, vocabulary, group_size, random.Random(seed + prompt), answer_tokens
        )
    ]
    torch.save([{name: getattr(s, name) for name in s.__slots__} for s in made], folder / "batch")


def load_batch(folder: Path) -> list[Sequence]:
    """Return the batch that `make` wrote."""
    return [Sequence(**row) for row in torch.load(folder / "batch", weights_only=True)]


def load_model(folder: Path, *, attention: str = "sdpa") -> Any:
    """Return the model in float32, without dropout."""
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation=attention, dtype=torch.float32
    )
    return model.to(DEVICE).eval()


def _group(
    model: Any,
    prompt: int,
    vocabulary: int,
    group_size: int,
    rng: random.Random,
    answer_tokens: int,
) -> list[Sequence]:
    beginning = torch.randint(2, vocabulary, (rng.randint(64, 256),))
    rewards = [rng.gauss(0, 1) for _ in range(group_size)]
    mean = sum(rewards) / group_size
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / group_size)
    made = []
    for reward in rewards:
        drawn = min(1024, max(16, int(rng.lognormvariate(math.log(160), 0.9))))
        size = answer_tokens or drawn
        ids = torch.cat([beginning, torch.randint(2, vocabulary, (size,))])
        with torch.no_grad():
            output = model(input_ids=ids[None].to(DEVICE), use_cache=False)
        logits = output.logits[0, len(beginning) - 1 : -1].float()
        chosen = ids[len(beginning) :, None].to(DEVICE)
        own = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1).cpu()
        made.append(
            Sequence(
                ids=ids,
                num_prompt=len(beginning),
                prompt=prompt,
                inference_logprobs=own + 0.15 * torch.randn(size),
                advantage=(reward - mean) / (std + 1e-4),
            )
        )
    return made
