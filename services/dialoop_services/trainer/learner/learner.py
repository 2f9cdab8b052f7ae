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

from dialoop_services.config.losses import DEMONSTRATION_LOSS, facts_of
from dialoop_services.config.tables import ModelSection
from dialoop_services.learning.lora.layers import add_lora
from dialoop_services.learning.loss.corrections import Correction
from dialoop_services.learning.loss.loss_loading import load_objective
from dialoop_services.learning.loss.objective import mean_metrics
from dialoop_services.learning.model.policy import DTYPES, load_policy
from dialoop_services.learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_services.learning.packing.oversize import fitting
from dialoop_services.learning.packing.rows import TokenRow
from dialoop_services.learning.packing.trainable import alike, require_trainable
from dialoop_services.learning.parallel.moving import move_training
from dialoop_services.learning.parallel.parallel_rows import own_rows, score_rows
from dialoop_services.learning.parallel.ranks import ALONE, Ranks, sharded
from dialoop_services.learning.training import UpdateReport, update, whitened_sequences
from dialoop_services.trainer.learner.learner_files import ExportedWeights, LearnerFiles

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Rows
    from pathlib import Path

    from dialoop.sequences import PolicyVersion, Sequence
    from numpy.typing import NDArray

    from dialoop_services.learning.loss.objective import Objective
    from dialoop_services.learning.model.policy import PolicyModel
    from dialoop_services.trainer.data.batches import TrainedSequence
    from dialoop_services.trainer.settings import TrainerSettings


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
    """Owns the policy model and its optimisers, or this rank's part of them.

    With several ranks every method is collective, and answers the same on each of them.
    """

    def __init__(self, settings: TrainerSettings, ranks: Ranks | None = None) -> None:
        torch.set_num_threads(settings.num_threads)
        torch.manual_seed(settings.seed)
        self._settings = settings
        self._ranks = ranks = ranks or Ranks(device=torch.device(settings.device))
        self._random = random.Random(settings.seed)
        self._ask_before_computing: Callable[[], None] | None = None
        self._policy = sharded(policy_of(settings, ranks), ranks)
        self._objective = objective_of(settings)
        self._imitation, self._sft = (
            load_objective(DEMONSTRATION_LOSS),
            supervised_objective_of(settings),
        )
        self._warm_start_optimizer = self._optimizer_of(warm_start_optimizer_of(settings))
        self._optimizer = self._optimizer_of(optimizer_of(settings))
        self._reference = reference_of(settings, ranks)
        self.files = LearnerFiles(
            self._policy,
            {"warm_start": self._warm_start_optimizer, "train": self._optimizer},
            self._random,
            model_dir=settings.model_dir,
            is_sharded=settings.sharded_checkpoints,
            ranks=ranks,
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

    def ask_before_computing(self, ask: Callable[[], None]) -> None:
        """From now on, call `ask` before anything is computed; it may block."""
        self._ask_before_computing = ask

    def move_to(self, device: str) -> None:
        """Move the policy and the optimisers' state there, and leave nothing behind."""
        move_training(self._policy, (self._warm_start_optimizer, self._optimizer), device)
        if self._reference is not None:
            move_training(self._reference, (), device)

    def rows_to_imitate(self, demonstrations: Rows[Sequence]) -> list[TokenRow]:
        """Demonstrations as rows; a DialoopError where one cannot be packed."""
        rows = [
            TokenRow.from_demonstration(s.token_ids.tolist(), s.response_mask().tolist())
            for s in demonstrations
        ]
        return self._fitting(rows)

    def rows_to_train(
        self, sequences: Rows[TrainedSequence], *, current: PolicyVersion
    ) -> list[TokenRow]:
        """Sequences as rows; a DialoopError where one does not fit or lacks what the loss needs.

        `current` is the policy's version, from which staleness is counted. A loss that imitates
        leaves out those that the scorer did not choose.
        """
        rows = [
            TokenRow.from_sequence(
                s.sequence, prompt=s.prompt, current=current, temperature=s.temperature
            )
            for s in sequences
        ]
        if self._objective.imitates:
            rows = [row for row in rows if row.advantages is not None and row.advantages.any()]
        rows = alike(self._fitting(rows))
        require_trainable(rows, self._objective)
        return rows

    def warm_start_step(self, demonstrations: Rows[Sequence]) -> UpdateReport:
        """One SFT update on demonstrations."""
        return self.warm_start_rows(self.rows_to_imitate(demonstrations))

    def warm_start_rows(self, rows: list[TokenRow]) -> UpdateReport:
        """One SFT update on rows to imitate."""
        return self._update(rows, self._warm_start_optimizer, self._imitation)

    def sft_step(self, demonstrations: Rows[Sequence]) -> UpdateReport:
        """One update of SFT as a mode, with the optimiser and schedule of training."""
        return self.sft_rows(self.rows_to_imitate(demonstrations))

    def sft_rows(self, rows: list[TokenRow]) -> UpdateReport:
        """The same on rows to imitate."""
        if self._reference is not None:
            scores = self._scores(rows, policy=self._reference)
            pairs = zip(rows, scores, strict=True)
            rows = [replace(row, ref_logprobs=logprobs) for row, logprobs in pairs]
        return self._update(rows, self._optimizer, self._sft)

    def heldout_loss(self, demonstrations: Rows[Sequence]) -> tuple[float, int]:
        """Mean negative log-likelihood of a demonstrated token in nats, and how many there are."""
        return self.heldout_loss_of(self.rows_to_imitate(demonstrations))

    def heldout_loss_of(self, rows: list[TokenRow]) -> tuple[float, int]:
        """The same of rows to imitate."""
        scores = self._scores(rows)
        count = sum(len(values) for values in scores)
        return -sum(float(values.double().sum()) for values in scores) / max(1, count), count

    def train_step(
        self, sequences: Rows[TrainedSequence], *, current: PolicyVersion
    ) -> TrainStepReport:
        """`num_epochs` times `num_minibatches` updates, in seeded random orders.

        `current` is the policy's version, from which staleness is counted.
        """
        return self.train_rows(self.rows_to_train(sequences, current=current))

    def train_rows(self, rows: list[TokenRow]) -> TrainStepReport:
        """The same on rows to train."""
        if self._objective.needs_proximal or self._settings.objective.proximal:
            rows = self._with_proximal(rows)
        objective = self._objective
        if objective.whiten:
            rows, objective = whitened_sequences(rows), replace(objective, whiten=False)
        num_tokens = sum(int(row.response_mask.sum()) for row in rows)
        num = min(self._settings.num_minibatches, len(rows))
        reports = []
        for _ in range(self._settings.objective.num_epochs):
            self._random.shuffle(rows)
            reports += [
                self._update(
                    rows[start::num],
                    self._optimizer,
                    objective,
                    with_entropy=self._measures_entropy,
                )
                for start in range(num)
            ]
        return TrainStepReport(
            loss=float(np.mean([r.loss for r in reports])),
            metrics=mean_metrics([r.metrics for r in reports]),
            grad_norm=float(np.mean([r.step.grad_norm for r in reports])),
            num_updates=sum(r.step.applied for r in reports),
            num_refused=sum(not r.step.applied for r in reports),
            num_trained_tokens=num_tokens,
            fresh_mismatch_kl=_fresh_mismatch(reports[0]),
        )

    def logprobs(
        self, rows: Rows[Rows[int]], *, temperature: float = 1.0
    ) -> list[NDArray[np.float32]]:
        """Log-probs float32 [L - 1] of each row's tokens from position 1 on."""
        wanted = [
            TokenRow.from_demonstration(
                list(ids), [False] + [True] * (len(ids) - 1), temperature=temperature
            )
            for ids in rows
        ]
        longest = max(len(ids) for ids in rows)
        return [scores.numpy() for scores in self._scores(wanted, longest)]

    def export(self, path: Path) -> ExportedWeights:
        """Write the weights as they are now; the file appears whole or not at all."""
        return self.files.export(path)

    def load_weights(self, path: Path) -> None:
        """Take weights that `export` wrote; InvalidConfig when they are another model's."""
        self.files.load_weights(path)

    def save(self, directory: Path) -> None:
        """Write all that a checkpoint keeps of this learner into a directory."""
        self.files.save(directory)

    def restore(self, directory: Path) -> None:
        """Continue from what `save` wrote, as if never stopped; InvalidConfig for another model."""
        self.files.restore(directory)

    def _with_proximal(self, rows: list[TokenRow]) -> list[TokenRow]:
        """The rows with the log-probs of the policy as it is now."""
        scores = self._scores(rows)
        pairs = zip(rows, scores, strict=True)
        return [replace(row, proximal_logprobs=logprobs) for row, logprobs in pairs]

    def _scores(
        self, rows: Rows[TokenRow], longest: int = 0, *, policy: PolicyModel | None = None
    ) -> list[torch.Tensor]:
        self._ask()
        most = max(longest, self._settings.packed_row_tokens)
        return score_rows(policy or self._policy, rows, self._ranks, max_tokens=most)

    def _update(
        self,
        rows: Rows[TokenRow],
        optimizer: GuardedOptimizer,
        loss: Objective,
        *,
        with_entropy: bool = False,
    ) -> UpdateReport:
        self._ask()
        return update(
            self._policy,
            optimizer,
            own_rows(rows, self._ranks, max_tokens=self._settings.packed_row_tokens),
            loss,
            with_entropy=with_entropy,
            ranks=self._ranks,
        )

    @property
    def _measures_entropy(self) -> bool:
        settings = self._settings
        return settings.objective.entropy_metric and settings.logprob_kernel != "cut"

    def _ask(self) -> None:
        if self._ask_before_computing is not None:
            self._ask_before_computing()

    def _fitting(self, rows: Rows[TokenRow]) -> list[TokenRow]:
        settings = self._settings
        return fitting(rows, max_tokens=settings.packed_row_tokens, oversize=settings.oversize)

    def _optimizer_of(self, settings: OptimizerSettings) -> GuardedOptimizer:
        parameters, matrices = self._policy.parameters(), self._policy.hidden_matrices()
        return GuardedOptimizer(parameters, settings, matrices=matrices)


def policy_of(settings: TrainerSettings, ranks: Ranks = ALONE) -> PolicyModel:
    """The model as the settings have it, whole; InvalidConfig (NEEDS_CUDA) without the device."""
    if settings.device_lock is not None and settings.device == "cuda" and ranks.size > 1:
        raise InvalidConfig(
            f"{ranks.size} processes have a device each, and one is to be shared.",
            reason="SHARED_DEVICE",
            remedy="Start one process, or leave DIALOOP_TRAINER_DEVICE_LOCK out.",
        )
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig(
            "The trainer's device is cuda, and this machine has no CUDA device.",
            reason="NEEDS_CUDA",
            remedy='Set device = "cpu" in [train], or run where there is one.',
        )
    # A device that is shared may not be ours yet.
    device = ranks.loading_device if settings.device_lock is None else "cpu"
    policy = load_policy(settings.model_dir, dtype=settings.dtype, device=device)
    model = settings.model
    if model.lora_rank:
        add_lora(
            policy.causal_lm,
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            targets=model.lora_targets,
        )
    if settings.activation_checkpointing:
        policy.checkpoint_activations()
    policy.autocast = DTYPES[settings.autocast] if settings.autocast else None
    policy.take_kernel(settings.logprob_kernel, device=torch.device(settings.device))
    return policy


def reference_of(settings: TrainerSettings, ranks: Ranks = ALONE) -> PolicyModel | None:
    """The starting model, which stays as it is, where SFT is held to it; RL's is the scorer's."""
    facts = facts_of(settings.demonstration_loss)
    if settings.mode == "rl" or not (settings.objective.kl_coeff or facts.needs_reference):
        return None
    plain = {"model": ModelSection(), "activation_checkpointing": False}
    return sharded(policy_of(settings.model_copy(update=plain), ranks), ranks)


def _fresh_mismatch(first: UpdateReport) -> float | None:
    fresh = first.metrics.get("by_staleness", {}).get(0, {})
    return float(fresh["mismatch_kl"]) if "mismatch_kl" in fresh else None


def objective_of(settings: TrainerSettings) -> Objective:
    """The loss and its surroundings, as the settings name them."""
    asked = settings.objective
    correction = None
    if asked.correction:
        correction = Correction(
            kind=asked.correction,
            low=asked.correction_low,
            high=asked.correction_high,
            against=asked.correction_to,
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


def supervised_objective_of(settings: TrainerSettings) -> Objective:
    """SFT's loss and what goes with it, as the settings say; warm starts before RL have theirs."""
    asked = settings.objective
    if settings.mode == "rl":
        return load_objective(DEMONSTRATION_LOSS)
    return load_objective(
        settings.demonstration_loss,
        settings.loss_options,
        aggregation=asked.aggregation or None,
        constant=asked.constant or float(settings.max_new_tokens),
        kl_coeff=asked.kl_coeff,
        kl_estimator=asked.kl_estimator,
        entropy_coeff=asked.entropy_coeff,
    )


def warm_start_optimizer_of(settings: TrainerSettings) -> OptimizerSettings:
    """SFT's optimiser before RL: up, then down to a tenth over its steps."""
    return OptimizerSettings(
        name=settings.optimizer,
        learning_rate=settings.warm_start.learning_rate,
        max_grad_norm=settings.max_grad_norm,
        warmup_steps=settings.warm_start.num_warmup_steps,
        total_steps=max(1, settings.warm_start.num_steps),
    )


def optimizer_of(settings: TrainerSettings) -> OptimizerSettings:
    """RL's optimiser and schedule, which counts the updates of all train steps."""
    per_step = settings.num_minibatches * settings.objective.num_epochs
    updates = settings.num_steps * (per_step if settings.mode == "rl" else 1)
    return OptimizerSettings(
        name=settings.optimizer,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        warmup_steps=settings.num_warmup_updates,
        total_steps=None if settings.schedule == "constant" else max(1, updates),
        schedule="cosine" if settings.schedule == "cosine" else "linear",
    )
