"""One update of the policy from packed rows: forward, loss, backward, step.

At the end are checks of rows before any forward pass: that they are short enough, with the same
values, and with what the loss reads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason

from dialoop_learning.loss.losses import LossInputs
from dialoop_learning.loss.objective import Objective, combine_metrics
from dialoop_learning.memory import resident_bytes, return_free_memory
from dialoop_learning.packing.rows import OPTIONAL, PackedBatch, TokenRow, pack_rows
from dialoop_learning.parallel.ranks import ALONE, Ranks
from dialoop_learning.parallel.step_plan import keep_pace, rows_behind
from dialoop_learning.rl.packing_plan import plan_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from dialoop_learning.loss.facts import Oversize
    from dialoop_learning.loss.losses import Loss
    from dialoop_learning.model.policy import PolicyModel
    from dialoop_learning.optim import GuardedOptimizer, StepReport


_GROWTH = 512 << 20
"""Bytes by which a row may leave the process larger than the first one did before it gives memory
back. The next row touches each page anew: with memory given back after each row, a step of 135
million parameters took 8 % longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Counts of a whole update, over all rows and ranks, before a loss masks any token."""

    num_tokens: int
    num_sequences: int
    """Trajectories, however many sequences each has, and sequences that are part of none."""
    prompt_num_tokens: dict[int, int]
    """Trained tokens by group index."""
    trajectory_num_tokens: dict[tuple[int, int | None], int]
    """Trained tokens by group index and trajectory index."""

    @classmethod
    def of(cls, rows: Sequence[PackedBatch], ranks: Ranks = ALONE) -> StepCounts:
        """Count trained tokens by group and by trajectory, over the rows of all ranks."""
        own: Counter[tuple[int, int | None]] = Counter()
        num_alone = 0
        for row in rows:
            indices = zip(row.group_indices, row.trajectory_indices, strict=True)
            for key, count in zip(indices, num_trained(row).tolist(), strict=True):
                own[key] += count
                num_alone += key[1] is None
        by_group: Counter[int] = Counter()
        by_trajectory: Counter[tuple[int, int | None]] = Counter()
        of_ranks = ranks.gather_once([num_alone, list(own.items())])
        for (group, trajectory), count in (pair for _, pairs in of_ranks for pair in pairs):
            by_group[group] += count
            if trajectory is not None:
                by_trajectory[group, trajectory] += count
        return cls(
            num_tokens=max(1, by_group.total()),
            num_sequences=max(1, sum(number for number, _ in of_ranks) + len(by_trajectory)),
            prompt_num_tokens={group: n for group, n in by_group.items() if n},
            trajectory_num_tokens=dict(by_trajectory),
        )


def num_trained(row: PackedBatch) -> Tensor:
    """Return how many tokens of each of the row's N sequences are trained, int64 [N]."""
    return torch.bincount(row.gather(row.sample_mask), minlength=row.num_sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardReport:
    """The loss and the token-mean metrics of one forward and backward pass.

    num_forwarded_tokens: that the model computed, those of shared beginnings once for each row.
    """

    loss: float
    metrics: dict[str, Any]
    num_forwarded_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """The loss, the token-mean metrics and the step of one optimiser update."""

    loss: float
    metrics: dict[str, Any]
    step: StepReport
    num_forwarded_tokens: int


def loss_inputs(
    batch: PackedBatch,
    logprobs: Tensor,
    *,
    entropy: Tensor | None = None,
    counts: StepCounts | None = None,
) -> LossInputs:
    """Return the batch's M trained tokens as a loss reads them; logprobs and entropy are [M].

    `counts` default to this batch's own.
    """
    counts = counts or StepCounts.of([batch])

    def gather(values: Tensor | None) -> Tensor | None:
        return None if values is None else batch.gather(values).to(logprobs.dtype)

    owners = batch.gather(batch.sample_mask)

    def of_tokens(of_sequences: list[int]) -> Tensor:
        values = torch.tensor(of_sequences, dtype=logprobs.dtype, device=logprobs.device)
        return values[owners]

    indices = zip(batch.group_indices, batch.trajectory_indices, strict=True)
    own = zip(indices, num_trained(batch).tolist(), strict=True)
    return LossInputs(
        policy_logprobs=logprobs,
        sequence_index=owners,
        loss_mask=torch.ones_like(logprobs, dtype=torch.bool),
        num_tokens=counts.num_tokens,
        num_sequences=counts.num_sequences,
        num_prompts=max(1, len(counts.prompt_num_tokens)),
        prompt_num_tokens=of_tokens(
            [counts.prompt_num_tokens.get(group, 1) for group in batch.group_indices]
        ),
        trajectory_num_tokens=of_tokens(
            [counts.trajectory_num_tokens.get(key, count) for key, count in own]
        ),
        inference_logprobs=gather(batch.inference_logprobs),
        proximal_logprobs=gather(batch.proximal_logprobs),
        ref_logprobs=gather(batch.ref_logprobs),
        advantages=gather(batch.advantages),
        staleness=gather(batch.staleness),
        depth=batch.gather(batch.position_ids),
        entropy=entropy,
    )


def forward_backward(  # noqa: PLR0913 - a model, its data, its loss and who looks on
    policy: PolicyModel,
    rows: Sequence[PackedBatch],
    loss: Loss,
    *,
    temperature: float | None = None,
    with_entropy: bool = False,
    ranks: Ranks = ALONE,
    watch: Callable[[PackedBatch, Tensor, Tensor], None] | None = None,
) -> BackwardReport:
    """Add the gradients of the rows' loss; the sum does not depend on how sequences are packed.

    Log-probs are at `temperature` or, without one, at each sequence's own sampling temperature.
    With several ranks each passes its own rows, and all get the same report. An objective that
    whitens does so over these rows; before several updates call `whiten_sequences` instead.
    `watch` gets each packed row, its log-probs [M] and its loss before it is differentiated.
    """
    objective = loss if isinstance(loss, Objective) else Objective(loss=loss)
    counts, num_behind = StepCounts.of(rows, ranks), rows_behind(len(rows), ranks)
    rows = whiten_rows(rows, ranks=ranks) if objective.whiten else rows
    total, metrics, num_forwarded = 0.0, [], 0
    resident: list[int] = []
    for row in rows:
        scores = policy(
            row,
            temperature=row.temperature if temperature is None else temperature,
            with_entropy=with_entropy or objective.needs_entropy,
        )
        num_forwarded += scores.num_forwarded
        inputs = loss_inputs(row, scores.logprobs, entropy=scores.entropy, counts=counts)
        output = objective(inputs)
        loss_of_row, own_metrics = output.loss, dict(output.metrics)
        if scores.balance is not None:
            # By its share of the update's tokens, so that the sum is a mean over rows.
            share = len(scores.logprobs) / counts.num_tokens
            loss_of_row = loss_of_row + policy.balance_coeff * share * scores.balance
            own_metrics["router_balance"] = share * scores.balance.detach()
        if scores.replayed is not None:
            own_metrics["num_recorded_choices"] = scores.replayed.num_recorded
            own_metrics["num_differing_choices"] = scores.replayed.num_differing
        if watch is not None:
            watch(row, scores.logprobs, loss_of_row)
        loss_of_row.backward()  # type: ignore[no-untyped-call]
        resident.append(resident_bytes())
        if resident[-1] > resident[0] + _GROWTH:
            return_free_memory()
        total += float(loss_of_row.detach())
        metrics.append({name: float(value) for name, value in own_metrics.items()})
    keep_pace(policy, num_behind, ranks)
    return_free_memory(above=_GROWTH)
    of_ranks = ranks.gather_once([total, metrics])
    # Every rank gets the same sum, so all ranks apply the step or all refuse it.
    return BackwardReport(
        loss=sum(loss for loss, _ in of_ranks),
        metrics=combine_metrics([row for _, of_rank in of_ranks for row in of_rank]),
        num_forwarded_tokens=sum(ranks.gather(num_forwarded)),
    )


def update(  # noqa: PLR0913 - a model, its step, its data and how to look at them
    policy: PolicyModel,
    optimizer: GuardedOptimizer,
    rows: Sequence[PackedBatch],
    loss: Loss,
    *,
    temperature: float | None = None,
    with_entropy: bool = False,
    ranks: Ranks = ALONE,
) -> UpdateReport:
    """Take one optimiser update over packed rows: `forward_backward`, then a step."""
    backward = forward_backward(
        policy, rows, loss, temperature=temperature, with_entropy=with_entropy, ranks=ranks
    )
    step = optimizer.step(backward.loss)
    return UpdateReport(
        loss=backward.loss,
        metrics=backward.metrics,
        step=step,
        num_forwarded_tokens=backward.num_forwarded_tokens,
    )


def whiten_rows(rows: Sequence[PackedBatch], *, ranks: Ranks = ALONE) -> list[PackedBatch]:
    """Return the rows with advantages (A - mean) / (std + 1e-8) over the N tokens of all ranks.

    std is over N, not N - 1. Source: the batch normalisation of REINFORCE++ (arXiv 2501.03262).
    """
    advantages = [row.advantages for row in rows if row.advantages is not None]
    if not all(ranks.gather(len(advantages) == len(rows))):
        return list(rows)  # a loss that needs advantages raises
    own = [row.gather(a).double() for row, a in zip(rows, advantages, strict=True)]
    tokens = ranks.gather_tensors(torch.cat(own) if own else torch.empty(0).double())[:: ranks.cp]
    if not rows:
        return []
    normalise = _whitening(torch.cat(tokens))
    return [
        replace(row, advantages=torch.where(row.loss_mask, normalise(a), 0.0).to(a.dtype))
        for row, a in zip(rows, advantages, strict=True)
    ]


def whiten_sequences(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Whiten as `whiten_rows` does, over a whole train step, before it is cut into updates.

    The first rank does so, which has all rows. Whitening each update by itself could turn the signs
    of advantages in an update that holds only some of the answers.
    """
    advantages = [row.advantages for row in rows if row.advantages is not None]
    if not advantages or len(advantages) < len(rows):
        return list(rows)  # a loss that needs advantages raises
    normalise = _whitening(torch.cat(advantages).double())
    return [
        replace(row, advantages=normalise(a).to(a.dtype))
        for row, a in zip(rows, advantages, strict=True)
    ]


def _whitening(tokens: Tensor) -> Callable[[Tensor], Tensor]:
    if not len(tokens):
        return lambda advantages: advantages
    std, mean = torch.std_mean(tokens, correction=0)
    return lambda advantages: (advantages - mean) / (std + 1e-8)


def fit_rows(rows: Sequence[TokenRow], *, max_tokens: int, oversize: Oversize) -> list[TokenRow]:
    """Return rows of at most `max_tokens` tokens.

    A longer row raises InvalidInput (SEQUENCE_TOO_LONG) or, as `oversize` says, is dropped or
    truncated. Truncation changes no token that stays, because a token depends only on earlier ones.
    A truncated row without a token left to train is dropped. Raises InvalidInput
    (SEQUENCE_TOO_LONG) as well when no row is left.
    """
    lengths = [len(row.token_ids) for row in rows]
    if oversize == "error":
        plan_rows(lengths, max_tokens=max_tokens)
        return list(rows)
    if oversize == "truncate":
        cut = (truncate(row, max_tokens) for row in rows)
        kept = [row for row in cut if bool(row.response_mask.any())]
    else:
        kept = [row for row in rows if len(row.token_ids) <= max_tokens]
    if rows and not kept:
        raise InvalidInput(
            f"None of {len(rows)} sequences can be trained in rows of {max_tokens} tokens; the "
            f"longest has {max(lengths)}.",
            reason=Reason.SEQUENCE_TOO_LONG,
            remedy="Raise max_row_tokens in [train], or shorten the episodes.",
        )
    return kept


def truncate(row: TokenRow, max_tokens: int) -> TokenRow:
    """Return the row's first `max_tokens` tokens, with their values."""
    if len(row.token_ids) <= max_tokens:
        return row
    mask = row.response_mask[:max_tokens]
    count = int(mask.sum())
    present = {name: values for name in OPTIONAL if (values := getattr(row, name)) is not None}
    cut: dict[str, Any] = {name: values[:count] for name, values in present.items()}
    if row.routed_experts is not None:
        cut["routed_experts"] = row.routed_experts[:max_tokens]
    return replace(row, token_ids=row.token_ids[:max_tokens], response_mask=mask, **cut)


def keep_common_values(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Return the rows without the values that only some have: a packed row holds all or none.

    If the loss needs these values, `require_trainable` raises.
    """
    with_response = [row for row in rows if bool(row.response_mask.any())]
    partial: dict[str, Any] = {
        name: None
        for name in ("ref_logprobs", "advantages")
        if any(getattr(row, name) is None for row in with_response)
    }
    return [replace(row, **partial) for row in rows] if partial else list(rows)


@torch.no_grad()
def require_trainable(rows: Sequence[TokenRow], objective: Objective) -> None:
    """Raise InvalidInput where rows lack what the loss reads (LOSS_INPUT_MISSING), or some do.

    It calls the loss itself, with log-probs of 0, because only the loss knows what it reads.
    """
    if not any(bool(row.response_mask.any()) for row in rows):
        return
    batch = pack_rows(rows)
    nothing = torch.zeros(batch.num_loss_tokens)
    if batch.proximal_logprobs is None and objective.needs_proximal:
        batch = replace(batch, proximal_logprobs=batch.scatter(nothing))
    if objective.needs_feedback:
        batch = replace(batch, ref_logprobs=batch.scatter(nothing))
    objective(loss_inputs(batch, nothing, entropy=nothing))
