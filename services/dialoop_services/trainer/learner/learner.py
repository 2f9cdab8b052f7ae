"""The trainer's core: forward_backward, optim_step, snapshot and restore over a state. No network.

    rows = learner.rows_to_train(sequences, current=version)     # raises if one cannot be trained
    plan = learner.plan(rows)                  # which rank trains which rows in which update
    learner.prepare(plan)                      # sends the rows; once for a whole train step
    for update in range(plan.num_updates):
        backward = learner.forward_backward(update)
        learner.optim_step(backward.loss)
    wait = learner.snapshot(directory)         # it is written beside the next train step
    wait()

`train_step`, `sft_step` and `warm_start_step` are made of these, and the job calls them. Every
method blocks on the CPU or GPU; one runs at a time.
"""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.user_functions import place_of
from dialoop_learning.loss.corrections import Correction
from dialoop_learning.loss.facts import DEMONSTRATION_LOSS, OPTIMIZERS
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.loss.objective import Objective, k3, mean_metrics
from dialoop_learning.model.policy import DTYPES, PolicyModel
from dialoop_learning.model.products import library_of
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings, StepReport
from dialoop_learning.packing.rows import PackedBatch, TokenRow
from dialoop_learning.parallel.group_commands import RankGroup, collective
from dialoop_learning.parallel.ranks import Ranks
from dialoop_learning.parallel.step_plan import (
    RankShare,
    StepPlan,
    gather_scores,
    num_trained_in,
    pack_own,
    plan_step,
    score_rows,
)
from dialoop_learning.rl.bounds import BOUNDS, MAX_SIZE
from dialoop_learning.rl.routed_experts import recorded_experts
from dialoop_learning.training import (
    BackwardReport,
    UpdateReport,
    fit_rows,
    forward_backward,
    keep_common_values,
    require_trainable,
    whiten_sequences,
)

from dialoop_services.runtime.cores import threads_of
from dialoop_services.trainer.data.self_teacher import SelfTeacher, taught_rows
from dialoop_services.trainer.learner.learner_state import LearnerState, move_training
from dialoop_services.trainer.learner.policies import policy_of, reference_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as Rows
    from pathlib import Path

    from dialoop.sequences import PolicyVersion, Sequence
    from numpy.typing import NDArray
    from torch import Tensor

    from dialoop_services.trainer.data.batches import TrainedSequence
    from dialoop_services.trainer.learner.learner_state import CapturedWeights, ExportedWeights
    from dialoop_services.trainer.settings import TrainerSettings

Kind = Literal["warm_start", "sft", "rl"]
"""The kind of an update: each has its own loss, and warm starts have their own optimiser."""

# Of the tokens of a train step so many are scored twice more, to see what the replay changes.
_PROBED_PART = 8
_PARTS_OF_A_STEP = ("prepare_s", "forward_backward_s", "optim_s")
_OPTIMIZERS: dict[Kind, str] = {"warm_start": "warm_start", "sft": "train", "rl": "train"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStepReport:
    """The result of one train step: loss and gradient norm are means over its updates.

    metrics: as `mean_metrics` describes them. num_trained_tokens: of one epoch. learning_rate: that
    of the last update. num_forwarded_tokens: what the updates' forward passes computed.
    num_saved_tokens: what they did not, as sequences have it in common. forwarded_per_distinct:
    forwarded tokens for each distinct prefix of an update. seconds: of the step's parts on this
    rank, by their names in docs/metrics.md. fresh_mismatch_kl: KL in nats
    between engine and trainer on the first update's tokens of the current policy, before that
    update. None without such tokens. fresh_by_depth: the same tokens by bucket of depth, as
    `combine_metrics` describes by_depth.
    """

    loss: float
    metrics: dict[str, Any]
    grad_norm: float
    num_updates: int
    num_refused: int
    num_trained_tokens: int
    learning_rate: float = 0.0
    num_forwarded_tokens: int = 0
    num_saved_tokens: int = 0
    forwarded_per_distinct: float = 1.0
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    fresh_mismatch_kl: float | None = None
    fresh_by_depth: dict[int, dict[str, float]] = field(default_factory=dict)


class StepObserver:
    """Sees the numbers of train steps and changes none. This one looks away."""

    def begin(self, rows: Rows[TokenRow], orders: random.Random) -> None:
        """See the rows of a step, and the generator of orders as it is before them."""

    def end_prepare(self, rows: Rows[TokenRow]) -> None:
        """See the same rows with the values that are computed once."""

    def begin_update(self, rows: Rows[TokenRow], packing: tuple[tuple[int, ...], ...]) -> None:
        """See which of the prepared rows an update trains, and which of these share a row."""

    def watch(self, batch: PackedBatch, logprobs: Tensor, loss: Tensor) -> None:
        """See a packed row, its log-probs [M] and its loss [], before it is differentiated."""

    def end_backward(self, loss: float, policy: PolicyModel) -> None:
        """See the update's loss, and the policy with the gradients before they are clipped."""

    def end_update(self, step: StepReport) -> None:
        """See what the optimiser did."""


class Learner:
    """The policy model and its optimisers, or this rank's part of them.

    With several ranks each has a learner. The first rank calls its methods, and those that are
    `collective` then run on all ranks.
    """

    def __init__(self, settings: TrainerSettings, group: RankGroup[Learner] | None = None) -> None:
        self.group = group or RankGroup(Ranks(device=torch.device(settings.device)))
        num_here = self.group.ranks.num_local
        torch.set_num_threads(threads_of(settings.num_threads, num_processes=num_here))
        torch.manual_seed(settings.seed)
        self._settings = settings
        self._ranks = ranks = self.group.ranks
        self.observer = StepObserver()
        """Sees the train steps from now on, where one process trains."""
        policy = policy_of(settings, ranks)
        objective = objective_of(settings)
        # `prepare` whitens over the whole train step, so an update of a part must not whiten again.
        self._whitens = objective.whiten
        self._objectives: dict[Kind, Objective] = {
            "warm_start": load_objective(DEMONSTRATION_LOSS),
            "sft": supervised_objective_of(settings),
            "rl": replace(objective, whiten=False),
        }
        self._reference = reference_of(settings, ranks)
        teaches = objective.needs_feedback and ranks.is_first
        self._teacher = SelfTeacher.of(settings) if teaches else None
        self._seconds = dict.fromkeys(_PARTS_OF_A_STEP, 0.0)
        self._share: RankShare | None = None  # of the step that `prepare` began
        self.state = LearnerState(
            policy,
            {
                "warm_start": _optimizer(policy, warm_start_optimizer_of(settings)),
                "train": _optimizer(
                    policy, optimizer_of(settings), decays_all=settings.weight_decay_all
                ),
            },
            random.Random(settings.seed),
            model_dir=settings.model_dir,
            is_sharded=_is_sharded(settings, ranks),
            ranks=ranks,
        )

    @property
    def matrix_products(self) -> str:
        """Return whose float32 matrix products it uses: "oneDNN" or "torch"."""
        return library_of(self._ranks.device)

    @property
    def num_parameters(self) -> int:
        """Return the number of trained parameters; tied ones count once."""
        return sum(p.numel() for p in self.state.policy.parameters() if p.requires_grad)

    @property
    def needs_advantages(self) -> bool:
        """Return whether the loss learns nothing from a sequence without an advantage."""
        return self._objectives["rl"].needs_advantages

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the output embedding."""
        return int(self.state.policy.causal_lm.get_output_embeddings().weight.shape[0])

    def found_in(self, loss: float, grad_norm: float, kind: Kind = "rl") -> str:
        """Return what a refused update found, and where the loss is, if the user wrote it."""
        place = place_of(self._objectives[kind].loss)
        named = f" (the loss function is at {place})" if place else ""
        return f"the loss is {loss:g} and the norm of its gradients {grad_norm:g}{named}"

    def ask_before_computing(self, ask: Callable[[], None]) -> None:
        """Call `ask` before every method that computes, from now on; it may block."""
        self.group.ask_before_computing(ask)

    def rows_to_imitate(self, demonstrations: Rows[Sequence]) -> list[TokenRow]:
        """Return demonstrations as rows; raise a DialoopError where one cannot be packed."""
        return self._fit(
            [
                TokenRow.from_demonstration(s.token_ids.tolist(), s.response_mask().tolist())
                for s in demonstrations
            ]
        )

    def rows_to_train(
        self, sequences: Rows[TrainedSequence], *, current: PolicyVersion
    ) -> list[TokenRow]:
        """Return sequences as rows; raise a DialoopError where one cannot be trained.

        `current` is the policy's version, from which staleness is counted. For a loss that
        imitates, sequences without an advantage other than 0 are left out; for one that needs
        feedback, those without. Without a reward there is no advantage for one that needs some.
        """
        if self.needs_advantages:
            sequences = [s for s in sequences if not (s.trajectory and s.trajectory.is_unrewarded)]
        for row in sequences:
            _require_known_tokens(row, self.vocab_size)
            _require_numbers(row)
        rows = [
            replace(
                TokenRow.from_sequence(
                    s.sequence,
                    group_index=s.group_index,
                    trajectory_index=s.trajectory_index,
                    current=current,
                    temperature=s.temperature,
                ),
                routed_experts=self._experts_to_replay(s),
            )
            for s in sequences
        ]
        objective = self._objectives["rl"]
        if objective.imitates:
            rows = [row for row in rows if row.advantages is not None and row.advantages.any()]
        if self._teacher is not None:
            rows = taught_rows(self._teacher, sequences, rows)
        rows = keep_common_values(self._fit(rows))
        require_trainable(rows, objective)
        return rows

    def _experts_to_replay(self, row: TrainedSequence) -> torch.Tensor | None:
        if not self._settings.replay_routed_experts:
            return None
        experts = recorded_experts(row.sequence, self.state.policy.routing)
        return None if experts is None else torch.from_numpy(experts)

    def plan(self, rows: Rows[TokenRow], kind: Kind = "rl") -> StepPlan:
        """Choose which rank trains which rows in which update; the first rank alone calls this.

        RL takes `num_epochs` times `num_minibatches` updates, in seeded random orders. An update
        trains whole trajectories, however many sequences they have. Other kinds take one of all.
        Advantages are whitened here, where all rows of a train step are.
        """
        if kind != "rl":
            return self._plan(rows, [range(len(rows))])
        rows = whiten_sequences(rows) if self._whitens else list(rows)
        trajectories = _by_trajectory(rows)
        num = min(self._settings.num_minibatches, len(trajectories))
        updates = []
        for _ in range(self._settings.objective.num_epochs):
            self.state.orders.shuffle(trajectories)
            updates += [[i for own in trajectories[n::num] for i in own] for n in range(num)]
        return self._plan(rows, updates)

    @collective(computes=True)
    def prepare(self, plan: StepPlan, kind: Kind = "rl") -> tuple[TokenRow, ...]:
        """Send each rank its rows, and add the values that are computed once for a whole step.

        Return this rank's rows. For RL the values are the current policy's log-probs, where the
        loss or the config needs them, and those behind the teacher's prompt. For SFT they are the
        reference's log-probs, where it has one.
        """
        rows: Rows[TokenRow] = plan.own.rows
        objective = self._objectives["rl"]
        if kind == "sft" and self._reference is not None:
            scores = self._scores(rows, policy=self._reference)
            rows = [replace(row, ref_logprobs=own) for row, own in zip(rows, scores, strict=True)]
        if kind == "rl" and (objective.needs_proximal or self._settings.objective.proximal):
            pairs = zip(rows, self._scores(rows), strict=True)
            rows = [replace(row, proximal_logprobs=logprobs) for row, logprobs in pairs]
        if kind == "rl" and objective.needs_feedback:
            scores = self._scores([row.behind_teacher_prompt() for row in rows])
            rows = [replace(row, ref_logprobs=own) for row, own in zip(rows, scores, strict=True)]
        self._share = replace(plan.own, rows=tuple(rows))
        return self._share.rows

    @collective(computes=True)
    def forward_backward(self, update: int = 0, kind: Kind = "rl") -> BackwardReport:
        """Add the gradients of an update's loss to the present ones; no weight changes.

        Its rows are those of the plan that was prepared last.
        """
        settings, share = self._settings, self._share
        assert share is not None, "prepare a plan first"
        measures_entropy = settings.objective.entropy_metric and settings.logprob_kernel != "cut"
        rows = [share.rows[place] for place in share.orders[update]]
        packing = share.packings[update]
        self.observer.begin_update(rows, packing)
        backward = forward_backward(
            self.state.policy,
            pack_own(rows, packing, self._ranks),
            self._objectives[kind],
            with_entropy=kind == "rl" and measures_entropy,
            ranks=self._ranks,
            watch=self.observer.watch,
        )
        self.observer.end_backward(backward.loss, self.state.policy)
        return backward

    @collective(computes=True)
    def optim_step(self, loss: float, kind: Kind = "rl") -> StepReport:
        """Apply the gradients and clear them; `loss` is the value that was differentiated.

        The weights stay as they are when the loss or the gradients are not finite.
        """
        step = self.state.optimizers[_OPTIMIZERS[kind]].step(loss)
        self.observer.end_update(step)
        return step

    def warm_start_step(self, rows: Rows[TokenRow]) -> UpdateReport:
        """Take one update of SFT before RL, on rows to imitate."""
        return self._imitate(self.plan(rows, "warm_start"), "warm_start")

    def sft_step(self, rows: Rows[TokenRow]) -> UpdateReport:
        """Take one update of the mode SFT, with the optimiser and schedule of training."""
        return self._imitate(self.plan(rows, "sft"), "sft")

    @collective(computes=True)
    def _imitate(self, plan: StepPlan, kind: Kind) -> UpdateReport:
        self.prepare(plan, kind)
        return self._update(0, kind)

    def train_step(self, rows: Rows[TokenRow]) -> TrainStepReport:
        """Take all updates of a train step, as `plan` has them."""
        self.observer.begin(rows, self.state.orders)
        orders = self.state.orders.getstate()
        report = self._train(self.plan(rows), num_trained_in(rows))
        if not report.num_updates:
            self.state.orders.setstate(orders)  # a batch that changed nothing is not repeated
        return report

    @collective(computes=True)
    def _train(self, plan: StepPlan, num_trained_tokens: int) -> TrainStepReport:
        seconds = self._seconds = dict.fromkeys(_PARTS_OF_A_STEP, 0.0)
        with _adding_to(seconds, "prepare_s"):
            ready = self.prepare(plan)
            self.observer.end_prepare(ready)
            mismatch = self._replay_mismatch(ready)
        reports = [self._update(update, "rl") for update in range(plan.num_updates)]
        fresh = reports[0].metrics.get("by_staleness", {}).get(0, {})
        num_forwarded = sum(r.num_forwarded_tokens for r in reports)
        metrics = mean_metrics(
            [r.metrics for r in reports],
            plan.num_trained,
            num_epochs=self._settings.objective.num_epochs,
        )
        return TrainStepReport(
            loss=float(np.mean([r.loss for r in reports])),
            metrics=metrics | mismatch,
            grad_norm=float(np.mean([r.step.grad_norm for r in reports])),
            num_updates=sum(r.step.applied for r in reports),
            num_refused=sum(not r.step.applied for r in reports),
            num_trained_tokens=num_trained_tokens,
            learning_rate=reports[-1].step.learning_rate,
            num_forwarded_tokens=num_forwarded,
            num_saved_tokens=plan.num_given - num_forwarded,
            forwarded_per_distinct=num_forwarded / max(1, plan.num_distinct),
            seconds=seconds,
            fresh_mismatch_kl=fresh.get("mismatch_kl"),
            fresh_by_depth=dict(reports[0].metrics.get("by_depth", {})),
        )

    def logprobs_of_rows(self, rows: Rows[TokenRow]) -> list[torch.Tensor]:
        """Return the policy's log-probs float32 [M] of each row, at the row's temperature."""
        longest = max((len(row.token_ids) for row in rows), default=0)
        return self._score(self._plan(rows, [range(len(rows))], longest))

    def heldout_loss(self, rows: Rows[TokenRow]) -> tuple[float, int]:
        """Return the mean negative log-likelihood in nats of a token, and the number of tokens."""
        scores = self.logprobs_of_rows(rows)
        count = sum(len(values) for values in scores)
        return -sum(float(values.double().sum()) for values in scores) / max(1, count), count

    def logprobs(
        self, rows: Rows[Rows[int]], *, temperature: float = 1.0
    ) -> list[NDArray[np.float32]]:
        """Return log-probs float32 [L - 1] of each row's tokens from position 1 on."""
        token_rows = [
            TokenRow.from_demonstration(
                list(ids), [False] + [True] * (len(ids) - 1), temperature=temperature
            )
            for ids in rows
        ]
        return [scores.numpy() for scores in self.logprobs_of_rows(token_rows)]

    @collective(computes=True)
    def _score(self, plan: StepPlan) -> list[torch.Tensor]:
        return gather_scores(self._scores(plan.own.rows), plan, self._ranks)

    @collective()
    def move_to(self, device: str) -> None:
        """Move the policy and the optimisers' state to the device, and leave nothing behind."""
        move_training(self.state.policy, self.state.optimizers.values(), device)
        if self._reference is not None:
            move_training(self._reference, (), device)

    def export(self, path: Path, first: Path | None = None) -> ExportedWeights:
        """Write the weights as they are now at `path`; it appears whole or not at all.

        first: where to write it instead, until `ExportedWeights.keep` brings it to `path`. Whole
        weights are in the engine's number format, where that is narrower than the trainer's.
        """
        return self.capture(path, first).measured()

    @collective()
    def capture(self, path: Path, first: Path | None = None) -> CapturedWeights:
        """Write as `export` does; the rest of a publish can run beside the next train step."""
        settings = self._settings
        is_narrower = settings.published_dtype != settings.dtype
        dtype = DTYPES[settings.published_dtype] if is_narrower else None
        return self.state.capture(path, first, dtype=dtype)

    @collective()
    def snapshot(self, directory: Path) -> Callable[[], None]:
        """Copy everything that a checkpoint keeps of this learner, and begin to write it.

        Return what waits until all of it is in the directory. It may run beside the next train
        step. It raises PreconditionFailed (WRITE_FAILED) where a rank could not write.
        """
        return self.state.write(directory)

    @collective()
    def damage_in(self, directory: Path) -> str:
        """Return why a rank cannot use a snapshot's files, such as a missing one; "" if all can.

        Raises PreconditionFailed (READ_FAILED) where a rank could not read them to the end.
        """
        return self.state.find_damage(directory)

    def _require_snapshot(self, directory: Path) -> None:
        self.state.require_readable(directory)

    @collective(check=_require_snapshot)
    def restore(self, directory: Path) -> None:
        """Continue from a snapshot as if never stopped; raise InvalidConfig for another model's."""
        self.state.read(directory)

    def _plan(self, rows: Rows[TokenRow], updates: Rows[Rows[int]], longest: int = 0) -> StepPlan:
        most = max(longest, self._settings.packed_row_tokens)
        return plan_step(rows, updates, self._ranks, max_tokens=most)

    def _update(self, update: int, kind: Kind) -> UpdateReport:
        with _adding_to(self._seconds, "forward_backward_s"):
            backward = self.forward_backward(update, kind)
        with _adding_to(self._seconds, "optim_s"):
            step = self.optim_step(backward.loss, kind)
        return UpdateReport(
            loss=backward.loss,
            metrics=backward.metrics,
            step=step,
            num_forwarded_tokens=backward.num_forwarded_tokens,
        )

    def _scores(
        self, rows: Rows[TokenRow], *, policy: PolicyModel | None = None
    ) -> list[torch.Tensor]:
        """Return the log-probs of each of this rank's own rows."""
        longest = max((len(row.token_ids) for row in rows), default=0)
        most = max(longest, self._settings.packed_row_tokens)
        return score_rows(policy or self.state.policy, rows, self._ranks, max_tokens=most)

    def _replay_mismatch(self, rows: Rows[TokenRow]) -> dict[str, float]:
        """Return the KL between engine and trainer with replayed experts and without, in nats.

        Before the first update, of each rank's first recorded rows, up to an eighth of its tokens
        or a packed row; at least of one. Nothing without any.
        """
        probed: list[TokenRow] = []
        sampled, num_tokens = [torch.empty(0)], 0
        total = sum(len(row.token_ids) for row in rows)
        most = min(self._settings.packed_row_tokens, total // _PROBED_PART)
        for row in rows:
            logprobs, needed = row.inference_logprobs, num_tokens + len(row.token_ids)
            if logprobs is None or row.routed_experts is None:
                continue
            if needed <= most or not probed:
                probed.append(row)
                sampled.append(logprobs)
                num_tokens = needed
        if not any(self._ranks.gather(len(probed))):
            return {}
        own = [replace(row, routed_experts=None) for row in probed]
        found = {}
        for name, part in (("replayed_mismatch_kl", probed), ("own_routing_mismatch_kl", own)):
            scores = torch.cat([torch.empty(0), *self._scores(part)])
            differences = k3(torch.cat(sampled), scores)
            sums = self._ranks.gather_once([float(differences.sum()), len(scores)])
            found[name] = sum(own for own, _ in sums) / sum(count for _, count in sums)
        return found

    def _fit(self, rows: Rows[TokenRow]) -> list[TokenRow]:
        settings = self._settings
        return fit_rows(rows, max_tokens=settings.packed_row_tokens, oversize=settings.oversize)


@contextmanager
def _adding_to(seconds: dict[str, float], part: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[part] += time.perf_counter() - started


def _is_sharded(settings: TrainerSettings, ranks: Ranks) -> bool:
    """Return whether checkpoints are written in parts: the whole may not fit the first rank."""
    named = settings.sharded_checkpoints
    return ranks.size > 1 and settings.optimizer in OPTIMIZERS if named == "auto" else named


def _by_trajectory(rows: Rows[TokenRow]) -> list[list[int]]:
    """Return the indices of each trajectory's rows; a row that is part of none stands alone."""
    parts: dict[object, list[int]] = {}
    for number, row in enumerate(rows):
        is_alone = row.trajectory_index is None
        key = number if is_alone else (row.group_index, row.trajectory_index)
        parts.setdefault(key, []).append(number)
    return list(parts.values())


def _optimizer(
    policy: PolicyModel, settings: OptimizerSettings, *, decays_all: bool = False
) -> GuardedOptimizer:
    return GuardedOptimizer(
        policy.causal_lm.named_parameters(),
        settings,
        matrices=policy.hidden_matrices(),
        undecayed=() if decays_all else policy.norms_and_biases(),
    )


def _require_known_tokens(row: TrainedSequence, vocab_size: int) -> None:
    """Raise InvalidInput for ids outside the embedding, which on a GPU would end the process."""
    ids = row.sequence.token_ids
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise InvalidInput(
            f"Token id {wrong[0]} is outside the model's vocabulary of {vocab_size}.",
            reason=Reason.TOKEN_OUT_OF_RANGE,
            remedy="Play with the tokenizer of the model that is trained.",
        )


def _require_numbers(row: TrainedSequence) -> None:
    """Raise InvalidInput for numbers that the queue refuses today, which an older file may hold."""
    sequence = row.sequence
    columns = {name: getattr(sequence, name) for name in BOUNDS}
    columns["advantage"] = np.array([sequence.advantage or 0.0])
    for name, values in columns.items():
        low, high = BOUNDS.get(name, (-MAX_SIZE, MAX_SIZE))
        wrong = values[~((values >= low) & (values <= high))]  # so that NaN is wrong, too
        if len(wrong):
            is_number = np.isfinite(wrong[0])
            raise InvalidInput(
                f"{name} has {wrong[0]:g}, and may have {low:g} to {high:g}.",
                reason=Reason.OUT_OF_RANGE if is_number else Reason.NON_FINITE,
                remedy="Play or score the group again: nothing can be learned from this number.",
            )


def objective_of(settings: TrainerSettings) -> Objective:
    """Return RL's loss with its surroundings, as the settings name them."""
    section = settings.objective
    correction = None
    if section.correction:
        correction = Correction(
            kind=section.correction,
            low=section.correction_low,
            high=section.correction_high,
            against=section.correction_to,
        )
    return load_objective(
        settings.loss,
        settings.loss_options,
        aggregation=section.aggregation or None,
        constant=section.constant or float(settings.max_new_tokens),
        timeout_s=settings.loss_timeout_s,
        kl_coeff=section.kl_coeff,
        kl_estimator=section.kl_estimator,
        kl_to=section.kl_to,
        kl_inference_coeff=section.kl_inference_coeff,
        entropy_coeff=section.entropy_coeff,
        correction=correction,
    )


def supervised_objective_of(settings: TrainerSettings) -> Objective:
    """Return the loss of the mode SFT with its surroundings, or a warm start's plain loss."""
    section = settings.objective
    if settings.mode == "rl":
        return load_objective(DEMONSTRATION_LOSS)
    return load_objective(
        settings.demonstration_loss,
        settings.loss_options,
        aggregation=section.aggregation or None,
        constant=section.constant or float(settings.max_new_tokens),
        timeout_s=settings.loss_timeout_s,
        kl_coeff=section.kl_coeff,
        kl_estimator=section.kl_estimator,
        entropy_coeff=section.entropy_coeff,
    )


def warm_start_optimizer_of(settings: TrainerSettings) -> OptimizerSettings:
    """Return the warm start's optimiser: the rate rises, then falls to a tenth over its steps."""
    return OptimizerSettings(
        name=settings.optimizer,
        learning_rate=settings.warm_start.learning_rate,
        max_grad_norm=settings.max_grad_norm,
        warmup_steps=settings.warm_start.num_warmup_steps,
        total_steps=max(1, settings.warm_start.num_steps),
    )


def optimizer_of(settings: TrainerSettings) -> OptimizerSettings:
    """Return the optimiser of training; its schedule counts the updates of all train steps."""
    per_step = settings.num_minibatches * settings.objective.num_epochs
    updates = settings.num_steps * (per_step if settings.mode == "rl" else 1)
    return OptimizerSettings(
        name=settings.optimizer,
        learning_rate=settings.learning_rate,
        betas=settings.betas,
        final_share=settings.learning_rate_floor,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        warmup_steps=settings.num_warmup_updates,
        total_steps=None if settings.schedule == "constant" else max(1, updates),
        schedule="cosine" if settings.schedule == "cosine" else "linear",
    )
