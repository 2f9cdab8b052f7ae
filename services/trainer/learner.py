"""The model being trained and its optimisers: steps, log-probs, export, state. No network.

Every method blocks on the CPU or GPU; the job calls them from one worker thread at a time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from dialoop.errors import InvalidConfig

from services.learning.corrections import Correction
from services.learning.lora import add_lora
from services.learning.loss_loading import load_objective
from services.learning.models import DTYPES, load_policy
from services.learning.objective import mean_metrics
from services.learning.optim import GuardedOptimizer, OptimizerSettings
from services.learning.packing import TokenRow, pack_rows
from services.learning.training import UpdateReport, update
from services.rl.packing_plan import plan_rows
from services.trainer.learner_files import ExportedWeights, LearnerFiles

if TYPE_CHECKING:
    from collections.abc import Sequence as Rows
    from pathlib import Path

    from dialoop.sequences import PolicyVersion, Sequence
    from numpy.typing import NDArray

    from services.learning.models import PolicyModel
    from services.learning.objective import Objective
    from services.learning.packing import PackedBatch
    from services.trainer.batches import TrainedSequence
    from services.trainer.settings import TrainerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStepReport:
    """One train step: the mean of its updates.

    fresh_mismatch_kl: KL in nats between engine and trainer on tokens of the present policy, before
    the first update; None without such tokens.
    """

    loss: float
    metrics: dict[str, Any]
    grad_norm: float
    num_updates: int
    num_refused: int
    num_trained_tokens: int
    fresh_mismatch_kl: float | None = None


class Learner:
    """Owns the policy model and its optimisers."""

    def __init__(self, settings: TrainerSettings) -> None:
        torch.set_num_threads(settings.torch_threads)
        torch.manual_seed(settings.seed)
        self._settings = settings
        self._random = random.Random(settings.seed)
        self._policy = policy_of(settings)
        self._objective = objective_of(settings)
        self._sft = load_objective("sft")
        parameters = list(self._policy.parameters())
        self._warm_start_optimizer = GuardedOptimizer(
            parameters,
            OptimizerSettings(
                name=settings.optimizer,
                learning_rate=settings.warm_start_learning_rate,
                max_grad_norm=settings.max_grad_norm,
                warmup_steps=settings.warm_start_warmup_steps,
                total_steps=max(1, settings.warm_start_steps),
            ),
            matrices=self._policy.hidden_matrices(),
        )
        self._optimizer = GuardedOptimizer(
            parameters, optimizer_of(settings), matrices=self._policy.hidden_matrices()
        )
        self._files = LearnerFiles(
            self._policy,
            {"warm_start": self._warm_start_optimizer, "train": self._optimizer},
            self._random,
            model_dir=settings.model_dir,
        )

    @property
    def num_parameters(self) -> int:
        """Trained parameters; tied ones count once."""
        return sum(p.numel() for p in self._policy.parameters() if p.requires_grad)

    @property
    def needs_advantages(self) -> bool:
        """Whether the loss learns nothing from a sequence without an advantage."""
        return self._objective.needs_advantages

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding."""
        return int(self._policy.causal_lm.get_output_embeddings().weight.shape[0])

    def warm_start_step(self, demonstrations: Rows[Sequence]) -> UpdateReport:
        """One SFT update on demonstrations."""
        rows = self._packed(_imitated(demonstrations))
        return update(self._policy, self._warm_start_optimizer, rows, self._sft)

    def sft_step(self, demonstrations: Rows[Sequence]) -> UpdateReport:
        """One update of SFT as a mode, with the optimiser and schedule of training."""
        rows = self._packed(_imitated(demonstrations))
        return update(self._policy, self._optimizer, rows, self._sft)

    @torch.no_grad()
    def heldout_loss(self, demonstrations: Rows[Sequence]) -> tuple[float, int]:
        """Mean negative log-likelihood of a demonstrated token in nats, and how many there are."""
        total, count = 0.0, 0
        for batch in self._packed(_imitated(demonstrations)):
            logprobs = self._policy(batch).logprobs
            total, count = total - float(logprobs.double().sum()), count + len(logprobs)
        return total / max(1, count), count

    def train_step(
        self, sequences: Rows[TrainedSequence], *, current: PolicyVersion, temperature: float
    ) -> TrainStepReport:
        """`num_epochs` times `num_minibatches` updates, in seeded random orders.

        `current` is the policy's version, from which staleness is counted.
        """
        rows = [
            TokenRow.from_sequence(s.sequence, prompt=s.prompt, current=current) for s in sequences
        ]
        if self._objective.needs_proximal or self._settings.objective.proximal:
            rows = self._with_proximal(rows, temperature)
        num = min(self._settings.num_minibatches, len(rows))
        reports = []
        for _ in range(self._settings.objective.num_epochs):
            self._random.shuffle(rows)
            reports += [
                update(
                    self._policy,
                    self._optimizer,
                    self._packed(rows[start::num]),
                    self._objective,
                    temperature=temperature,
                )
                for start in range(num)
            ]
        return TrainStepReport(
            loss=float(np.mean([r.loss for r in reports])),
            metrics=mean_metrics([r.metrics for r in reports]),
            grad_norm=float(np.mean([r.step.grad_norm for r in reports])),
            num_updates=sum(r.step.applied for r in reports),
            num_refused=sum(not r.step.applied for r in reports),
            num_trained_tokens=sum(s.sequence.num_model_tokens for s in sequences),
            fresh_mismatch_kl=_fresh_mismatch(reports[0]),
        )

    @torch.no_grad()
    def _with_proximal(self, rows: list[TokenRow], temperature: float) -> list[TokenRow]:
        """The rows with the log-probs of the policy as it is now."""
        lengths = [len(row.token_ids) for row in rows]
        plan = plan_rows(lengths, max_tokens=self._settings.max_row_tokens)
        known = list(rows)
        for indices in plan.rows:
            batch = pack_rows([rows[index] for index in indices])
            logprobs = self._policy(batch.to(self._device), temperature=temperature).logprobs
            scores = batch.split(logprobs.cpu())
            for index, logprobs in zip(indices, scores, strict=True):
                known[index] = replace(rows[index], proximal_logprobs=logprobs)
        return known

    @torch.no_grad()
    def logprobs(
        self, rows: Rows[Rows[int]], *, temperature: float = 1.0
    ) -> list[NDArray[np.float32]]:
        """Log-probs float32 [L - 1] of each row's tokens from position 1 on."""
        packed = [
            TokenRow.from_demonstration(list(ids), [False] + [True] * (len(ids) - 1))
            for ids in rows
        ]
        batch = pack_rows(packed)
        scores = self._policy(batch.to(self._device), temperature=temperature).logprobs
        return [values.numpy() for values in batch.split(scores.cpu())]

    def export(self, path: Path) -> ExportedWeights:
        """Write the weights as they are now; the file appears whole or not at all."""
        return self._files.export(path)

    def load_weights(self, path: Path) -> None:
        """Take weights that `export` wrote; InvalidConfig when they are another model's."""
        self._files.load_weights(path)

    def save_weights(self, directory: Path) -> None:
        """Write what is trained to a checkpoint: the weights, or with LoRA a PEFT directory."""
        self._files.save_weights(directory)

    def restore_weights(self, directory: Path) -> None:
        """Take what `save_weights` wrote; InvalidConfig when it is another model's."""
        self._files.restore_weights(directory)

    def save_state(self, path: Path) -> None:
        """Write optimisers and random state, for `load_state`."""
        self._files.save_state(path)

    def load_state(self, path: Path) -> None:
        """Continue as if never stopped."""
        self._files.load_state(path)

    def _packed(self, rows: list[TokenRow]) -> list[PackedBatch]:
        lengths = [len(row.token_ids) for row in rows]
        plan = plan_rows(lengths, max_tokens=self._settings.max_row_tokens)
        packed = (pack_rows([rows[index] for index in indices]) for indices in plan.rows)
        return [batch.to(self._device) for batch in packed]

    @property
    def _device(self) -> torch.device:
        return self._policy.head_weight.device


def policy_of(settings: TrainerSettings) -> PolicyModel:
    """The model as the settings have it; InvalidConfig (NEEDS_CUDA) without the device."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig(
            "The trainer's device is cuda, and this machine has no CUDA device.",
            reason="NEEDS_CUDA",
            remedy='Set device = "cpu" in [train], or run where there is one.',
        )
    policy = load_policy(settings.model_dir, dtype=settings.dtype, device=settings.device)
    lora = settings.lora
    if lora.rank:
        add_lora(policy.causal_lm, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
    if settings.activation_checkpointing:
        policy.checkpoint_activations()
    policy.autocast = DTYPES[settings.autocast] if settings.autocast else None
    return policy


def _imitated(demonstrations: Rows[Sequence]) -> list[TokenRow]:
    return [
        TokenRow.from_demonstration(s.token_ids.tolist(), s.response_mask().tolist())
        for s in demonstrations
    ]


def _fresh_mismatch(first: UpdateReport) -> float | None:
    fresh = first.metrics.get("by_staleness", {}).get(0, {})
    return float(fresh["mismatch_kl"]) if "mismatch_kl" in fresh else None


def objective_of(settings: TrainerSettings) -> Objective:
    """The loss and its surroundings, as the settings name them."""
    asked = settings.objective
    correction = None
    if asked.correction:
        correction = Correction(
            kind=asked.correction, low=asked.correction_low, high=asked.correction_high
        )
    return load_objective(
        settings.loss,
        settings.loss_options,
        aggregation=asked.aggregation or None,
        constant=asked.constant or float(settings.max_new_tokens),
        kl_coeff=asked.kl_coeff,
        kl_estimator=asked.kl_estimator,
        kl_to=asked.kl_to,
        entropy_coeff=asked.entropy_coeff,
        correction=correction,
    )


def optimizer_of(settings: TrainerSettings) -> OptimizerSettings:
    """RL's optimiser and schedule, which counts the updates of all train steps."""
    per_step = settings.num_minibatches * settings.objective.num_epochs
    updates = settings.num_train_steps * (per_step if settings.mode == "rl" else 1)
    return OptimizerSettings(
        name=settings.optimizer,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        warmup_steps=settings.num_warmup_updates,
        total_steps=None if settings.schedule == "constant" else max(1, updates),
        schedule="cosine" if settings.schedule == "cosine" else "linear",
    )
