"""Make a train step as TRL and torchrl ship it, on a batch that is already generated."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.servers.train_step_batch import (
    CLIP,
    DEVICE,
    ENTROPY_COEFF,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    Sequence,
    load_batch,
    load_model,
)

Took = Callable[[Any, float], None]
"""Told (model, loss) once gradients are there and before the optimiser takes them."""


def _pad(rows: list[torch.Tensor], *, left: bool = False, fill: float = 0) -> torch.Tensor:
    side = "left" if left else "right"
    return pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)


def trl_inputs(batch: list[Sequence]) -> dict[str, torch.Tensor]:
    """Return what GRPOTrainer generates and scores: prompts padded left, answers right."""
    prompts = [s.ids[: s.num_prompt] for s in batch]
    answers = [s.ids[s.num_prompt :] for s in batch]
    return {
        "prompt_ids": _pad(prompts, left=True),
        "prompt_mask": _pad([torch.ones_like(p) for p in prompts], left=True),
        "completion_ids": _pad(answers),
        "completion_mask": _pad([torch.ones_like(a) for a in answers]),
        "advantages": torch.tensor([s.advantage for s in batch]),
        "old_per_token_logps": _pad([s.inference_logprobs for s in batch]),
        "num_items_in_batch": torch.tensor(float(sum(s.num_trained for s in batch))),
    }


class Finished(Exception):
    """Ends TRL's training loop from inside."""


def run_trl(folder: Path, between: Callable[[], None], took: Took, options: dict[str, Any]) -> None:
    """GRPOTrainer.train, without its generation; `between` is called before every step.

    Every setting is TRL's default but for what is named here: the device, the number of sequences
    and of answers to a prompt, no files and logs, and `options`.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    batch = load_batch(folder)
    ready = {name: values.to(DEVICE) for name, values in trl_inputs(batch).items()}
    losses: list[float] = []

    class OnReadyBatch(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            return dict(ready)

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            loss = super().compute_loss(*arguments, **named)
            losses.append(float(loss.detach()))
            return loss

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            losses.clear()
            between()

        def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
            took(model, sum(losses))

    options_of_batch = {"per_device_train_batch_size": 8, "num_generations": 8, **options}
    accumulated = len(batch) // options_of_batch["per_device_train_batch_size"]
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=DEVICE.type == "cpu",
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        max_steps=10**6,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_completion_length=1024,
        gradient_accumulation_steps=accumulated,
        **options_of_batch,
    )
    trainer = OnReadyBatch(
        model=load_model(folder),
        reward_funcs=lambda prompts, **_: [0.0] * len(prompts),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["1+1"] * len(batch)}),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer", padding_side="left"),
        callbacks=[Steps()],
    )
    try:
        trainer.train()
    except Finished:
        return


class TorchrlStep:
    """torchrl's GRPOLoss over its TransformersWrapper, AdamW, clipping, micro-batches of four.

    A micro-batch's mean counts by its share of the tokens, so that their sum is the batch's mean.
    """

    def __init__(self, folder: Path, *, entropy_bonus: bool, micro_batch: int = 4) -> None:
        from torchrl.modules.llm import TransformersWrapper
        from torchrl.objectives.llm.grpo import GRPOLoss
        from transformers import AutoTokenizer

        self.model = load_model(folder)
        policy = TransformersWrapper(
            self.model,
            tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
            input_mode="tokens",
            generate=False,
            return_log_probs=True,
            pad_output=False,
            pad_model_input=True,
        )
        policy.model.eval()
        self._loss = GRPOLoss(policy, clip_epsilon=CLIP, entropy_bonus=entropy_bonus)
        assert not entropy_bonus or self._loss.entropy_coeff == ENTROPY_COEFF
        batch = load_batch(folder)
        total = sum(s.num_trained for s in batch)
        self._parts = [
            (_tensordict(part), sum(s.num_trained for s in part) / total)
            for part in (batch[i : i + micro_batch] for i in range(0, len(batch), micro_batch))
        ]
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self, took: Took) -> None:
        """One update."""
        total = 0.0
        for batch, share in self._parts:
            losses = self._loss(batch.clone())
            loss = losses.loss_objective.mean()
            if self._loss.entropy_bonus:
                loss = loss + losses.loss_entropy.mean()
            loss = loss * share
            loss.backward()
            total += float(loss.detach())
        took(self.model, total)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _tensordict(batch: list[Sequence]) -> Any:
    """Sequences as torchrl's collectors leave them: ragged, the prompt's log-probs not a number."""
    from tensordict import TensorDict, lazy_stack

    longest = max(len(s.ids) for s in batch)
    rows = []
    for s in batch:
        logprobs = torch.cat([torch.full((s.num_prompt,), math.nan), s.inference_logprobs])
        rows.append(
            TensorDict(
                {
                    "tokens": TensorDict({"full": s.ids, "prompt": s.ids[: s.num_prompt]}),
                    "masks": TensorDict(
                        {"all_attention_mask": torch.ones_like(s.ids, dtype=torch.bool)}
                    ),
                    "log_probs": TensorDict({"full": logprobs}),
                    # GRPOLoss pads it on the right, and what it goes with on the left.
                    "advantage": torch.full((longest, 1), s.advantage),
                }
            )
        )
    return lazy_stack(rows)
