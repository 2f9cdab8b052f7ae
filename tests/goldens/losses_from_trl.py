"""What TRL's own trainers make of the goldens' tensors: losses, gradients, advantages.

Nothing of TRL is replaced but what stands around a loss: a model that answers with the goldens'
log-probs, and a rollout that answers with their tokens.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from tests.goldens.losses_samples import GROUP_SIZE, MAX_COMPLETION_LENGTH, PROMPTS, variant
from tests.goldens.samples import SPECIAL, golden_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_IS = "vllm_importance_sampling_"
_TRUNCATE = {f"{_IS}mode": "token_truncate", f"{_IS}clip_max": 1.3}
_MASK = {f"{_IS}mode": "token_mask", f"{_IS}clip_min": 0.7, f"{_IS}clip_max": 1.5}
_SEQUENCE_MASK = {f"{_IS}mode": "sequence_mask", f"{_IS}clip_min": 0.3, f"{_IS}clip_max": 3.0}
_SEQUENCE_TRUNCATE = {f"{_IS}mode": "sequence_truncate", f"{_IS}clip_max": 1.3}
_KL = {"beta": 0.1, "use_bias_correction_kl": False}
_GSPO = {"importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.15}

GRPO_CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo_asymmetric": {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.28},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.4},
    "gspo": {"loss_type": "grpo", **_GSPO},
    "gspo_by_token": {"loss_type": "dapo", **_GSPO},
    "luspo": {"loss_type": "luspo", **_GSPO},
    "dual_clip": {"loss_type": "grpo", "delta": 1.4},
    "dual_clip_inside": {"loss_type": "grpo", "epsilon_high": 0.5, "delta": 1.2},
    "unclipped": {"loss_type": "dapo", "epsilon": 1.0, "epsilon_high": 1e6},
    "grpo_kl": {"loss_type": "grpo", **_KL},
    "dapo_kl": {"loss_type": "dapo", **_KL},
    "cispo_kl": {"loss_type": "cispo", "epsilon_high": 1.4, **_KL},
    "gspo_kl": {"loss_type": "grpo", **_KL, **_GSPO},
    "kl_times_ratio": {"loss_type": "dapo", "beta": 0.1},
    "entropy": {"loss_type": "dapo", "entropy_coef": 0.05},
    "entropy_by_sequence": {"loss_type": "grpo", "entropy_coef": 0.05},
    "token_truncate": {"loss_type": "dapo", "use_vllm": True, **_TRUNCATE},
    "token_truncate_kl": {"loss_type": "grpo", **_KL, "use_vllm": True, **_TRUNCATE},
    "token_mask": {"loss_type": "dapo", "use_vllm": True, **_MASK},
    "token_mask_dual_clip": {"loss_type": "grpo", "delta": 1.4, "use_vllm": True, **_MASK},
    "token_mask_cispo": {
        **{"loss_type": "cispo", "epsilon_high": 1.4, "use_vllm": True},
        **_MASK,
    },
    "sequence_mask": {"loss_type": "grpo", "use_vllm": True, **_SEQUENCE_MASK},
    "sequence_truncate": {"loss_type": "grpo", "use_vllm": True, **_SEQUENCE_TRUNCATE},
    "dapo_micro_batches": {"loss_type": "dapo", "num_micro_batches": 2},
    "bnpo_micro_batches": {"loss_type": "bnpo", "num_micro_batches": 2},
    "dapo_two_steps": {"loss_type": "dapo", "steps_per_generation": 2},
    "wild": {"loss_type": "grpo", "variant": "wild"},
}
"""GRPOConfig's settings, and ours: variant of the tensors, use_vllm, num_micro_batches."""

RLOO_CASES: dict[str, dict[str, Any]] = {
    "rloo_all_trained": {"variant": "all_trained"},
    "rloo_on_policy": {"variant": "on_policy"},
    "rloo_one_token": {"variant": "one_token"},
}

ADVANTAGE_CASES: dict[str, dict[str, Any]] = {
    "group": {"scale_rewards": "group"},
    "none": {"scale_rewards": "none"},
    "rloo": {},
    "rloo_kl": {"beta": 0.1},
    "rloo_normalized": {"normalize_advantages": True},
}


def trl_results(tensors: dict[str, Any]) -> dict[str, Any]:
    """Every case by name: its settings, TRL's loss, and its gradient by the policy's log-probs."""
    with _double():
        cases = {name: _loss_of_grpo(tensors, case) for name, case in GRPO_CASES.items()}
        cases |= {name: _loss_of_rloo(tensors, case) for name, case in RLOO_CASES.items()}
        cases |= {name: _loss_of_sft(tensors, name) for name in ("nll", "nll_micro_batches")}
        advantages = {
            name: _score(*_trainer_of(name, tensors, case))["advantages"].tolist()
            for name, case in ADVANTAGE_CASES.items()
        }
    return {"cases": cases, "advantages": advantages}


def padded_step(directory: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    """GRPOTrainer's DAPO loss with a KL term, and gradients, of a real model in float64.

    Its ratios are to the goldens' "old", rounded to float32 as packed rows hold them.
    """
    from trl import GRPOConfig, GRPOTrainer

    with _double():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda **_kwargs: list(tensors["rewards"]),
            args=GRPOConfig(**_training(), num_generations=GROUP_SIZE, epsilon_high=0.28, **_KL),
            train_dataset=_prompt_rows(),
            processing_class=AutoTokenizer.from_pretrained(directory),
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, _padded_inputs(tensors))
        loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters()}
    return {"loss": float(loss.detach()), "gradients": gradients}


def _padded_inputs(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the trainer would have made itself: prompts padded left, completions right."""
    width = max(len(ids) for ids in PROMPTS)
    prompts = [[0] * (width - len(ids)) + ids for ids in _prompt_ids()]
    lengths = torch.tensor(tensors["lengths"])[:, None]
    completion = torch.arange(len(tensors["tokens"][0])) < lengths
    trained = torch.tensor(tensors["trained"])
    single = {k: torch.tensor(tensors[k]).float().double() for k in ("old", "ref", "advantages")}
    return {
        "prompt_ids": torch.tensor(prompts),
        "prompt_mask": torch.tensor(
            [[int(k >= width - len(ids)) for k in range(width)] for ids in _prompt_ids()]
        ),
        "completion_ids": torch.tensor(tensors["tokens"]),
        "completion_mask": completion.long(),
        "tool_mask": trained.long(),
        "num_items_in_batch": trained.sum(),
        "advantages": single["advantages"],
        "old_per_token_logps": single["old"],
        "ref_per_token_logps": single["ref"],
    }


class GivenModel(torch.nn.Module):
    """Answers with the rows of given log-probs and entropies, one chunk after the other."""

    is_gradient_checkpointing = False

    def __init__(self, logprobs: list[list[float]], entropy: list[list[float]]) -> None:
        super().__init__()
        self.logprobs = torch.nn.Parameter(torch.tensor(logprobs))
        self.entropy = torch.tensor(entropy)
        self._next = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_options: Any) -> Any:
        """TRL's own output type; nothing but the completion's columns is set."""
        from trl.trainer.utils import FusedCausalLMOutput

        rows = slice(self._next, self._next + len(input_ids))
        self._next = rows.stop % len(self.logprobs)
        before = input_ids.shape[1] - 1 - self.logprobs.shape[1]
        pad = torch.zeros(len(input_ids), before)
        label_mask = labels[:, 1:] != -100
        logprobs = torch.cat([pad, self.logprobs[rows]], 1)
        return FusedCausalLMOutput(
            log_probs=torch.where(label_mask, logprobs, 0.0),
            entropy=torch.cat([pad, self.entropy[rows]], 1),
            is_top1=label_mask,
            label_mask=label_mask,
        )


def _loss_of_grpo(tensors: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    from trl.trainer.utils import split_tensor_dict

    settings = {k: v for k, v in case.items() if k != "variant"}
    tensors = variant(tensors, case.get("variant", "plain"))
    trainer, rows = _grpo_trainer(tensors, settings)
    scored = _score(trainer, rows)
    policy = GivenModel(tensors["policy"], tensors["entropy"])
    num_pieces = settings.get("num_micro_batches", settings.get("steps_per_generation", 1))
    pieces = split_tensor_dict(scored, num_pieces)
    return _result(case, policy, [trainer.compute_loss(policy, piece) for piece in pieces])


def _loss_of_rloo(tensors: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    tensors = variant(tensors, case["variant"])
    trainer, rows = _rloo_trainer(tensors, {})
    scored = _score(trainer, rows)
    policy = GivenModel(_cut(tensors, "policy"), _cut(tensors, "entropy"))
    return _result(case, policy, [trainer.compute_loss(policy, scored)])


def _loss_of_sft(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    """nll: all sequences at once; nll_micro_batches: three at a time, over the tokens of all."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(**_training(), dataset_kwargs={"skip_prepare_dataset": True})
    trainer = SFTTrainer(
        model=_tiny_model(),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]}),
        processing_class=_tokenizer(),
    )
    trained = torch.tensor(tensors["trained"])
    ids = torch.cat([torch.full((len(trained), 2), 7), torch.tensor(tensors["tokens"])], 1)
    labels = ids.clone()
    labels[:, :2] = -100
    labels[:, 2:][~trained] = -100
    policy = GivenModel(tensors["policy"], tensors["entropy"])
    step = 3 if name == "nll_micro_batches" else len(ids)
    losses = []
    for start in range(0, len(ids), step):
        rows = slice(start, start + step)
        inputs = {"input_ids": ids[rows], "labels": labels[rows]}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        losses.append(trainer.compute_loss(policy, inputs, num_items_in_batch=trained.sum()))
    return _result({"trainer": "sft"}, policy, losses)


def _result(case: dict[str, Any], policy: GivenModel, losses: list[Any]) -> dict[str, Any]:
    loss = torch.stack(losses).sum()
    loss.backward()
    assert policy.logprobs.grad is not None
    gradient = policy.logprobs.grad.tolist()
    return {"settings": case, "loss": float(loss.detach()), "gradient": gradient}


def _trainer_of(name: str, tensors: dict[str, Any], settings: dict[str, Any]) -> Any:
    if name.startswith("rloo"):
        return _rloo_trainer(variant(tensors, "all_trained"), settings)
    return _grpo_trainer(tensors, settings)


def _score(trainer: Any, rows: list[dict[str, Any]]) -> Any:
    """Their rollout, sampler ratios, reference log-probs and advantages."""
    return trainer._generate_and_score_completions(rows)


def _grpo_trainer(tensors: dict[str, Any], settings: dict[str, Any]) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    own = {k: v for k, v in settings.items() if k not in ("use_vllm", "num_micro_batches")}
    pieces = settings.get("num_micro_batches", 1)
    arguments = GRPOConfig(
        **_training(
            len(tensors["lengths"]) // settings.get("steps_per_generation", pieces), pieces
        ),
        num_generations=GROUP_SIZE,
        num_iterations=2,  # so that log-probs of the policy before the step are asked for
        max_completion_length=MAX_COMPLETION_LENGTH,
        **own,
    )

    def rollout(_prompts: Any, _trainer: Any) -> dict[str, Any]:
        cut = {name: _cut_to_lengths(tensors, name) for name in ("tokens", "sampler", "trained")}
        return {
            "prompt_ids": _prompt_ids(),
            "completion_ids": cut["tokens"],
            "logprobs": cut["sampler"],
            "env_mask": [[int(is_trained) for is_trained in row] for row in cut["trained"]],
        }

    trainer = GRPOTrainer(
        model=_tiny_model(),
        reward_funcs=lambda **_kwargs: list(tensors["rewards"]),
        args=arguments,
        train_dataset=_prompt_rows(),
        processing_class=_tokenizer(),
        rollout_func=rollout,
    )
    trainer.current_gradient_accumulation_steps = pieces
    trainer.use_vllm = settings.get("use_vllm", False)
    trainer._last_loaded_step = trainer.state.global_step
    _give_models(trainer, tensors["old"], tensors["ref"], tensors["entropy"])
    return trainer, [{"prompt": "a"}] * len(tensors["lengths"])


def _rloo_trainer(tensors: dict[str, Any], settings: dict[str, Any]) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    arguments = RLOOConfig(
        **_training(len(tensors["lengths"])),
        num_generations=GROUP_SIZE,
        **({"beta": 0.0} | settings),
    )
    trainer = RLOOTrainer(
        model=_tiny_model(),
        reward_funcs=lambda **_kwargs: list(tensors["rewards"]),
        args=arguments,
        train_dataset=_prompt_rows(),
        processing_class=_tokenizer(),
    )
    completions = _cut_to_lengths(tensors, "tokens")
    trainer._generate = lambda _prompts: (_prompt_ids(), completions, ["x"] * len(completions))
    _give_models(trainer, *(_cut(tensors, name) for name in ("old", "ref", "entropy")))
    return trainer, [{"prompt": "a"}] * len(completions)


def _give_models(trainer: Any, old: Any, ref: Any, entropy: Any) -> None:
    trainer.model, trainer.ref_model = GivenModel(old, entropy), GivenModel(ref, entropy)


def _cut_to_lengths(tensors: dict[str, Any], name: str) -> list[list[Any]]:
    return [row[:n] for row, n in zip(tensors[name], tensors["lengths"], strict=True)]


def _cut(tensors: dict[str, Any], name: str) -> list[list[float]]:
    return [row[: max(tensors["lengths"])] for row in tensors[name]]


def _prompt_ids() -> list[list[int]]:
    return [ids for ids in PROMPTS for _ in range(GROUP_SIZE)]


def _prompt_rows() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": ["a", "b"]})


def _training(batch_size: int = 6, num_steps: int = 1) -> dict[str, Any]:
    return {
        "output_dir": _place(),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": num_steps,
    }


def _tokenizer() -> PreTrainedTokenizerFast:
    names = {**SPECIAL, "pad_token": SPECIAL["eos_token"]}
    return PreTrainedTokenizerFast(tokenizer_object=golden_tokenizer(), **names)


def _tiny_model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(_place())


@functools.cache
def _place() -> str:
    """A folder with a model that TRL can also load a reference from."""
    place = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, place)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=len(_tokenizer()), num_attention_heads=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(place)
    return place


@contextlib.contextmanager
def _double() -> Iterator[None]:
    """float64 for whatever TRL makes of lists, and none of its notices."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)
