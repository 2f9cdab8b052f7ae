"""One update of the policy from packed rows: forward, loss, backward, step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from dialoop_services.learning.loss.loss_inputs import LossInputs
from dialoop_services.learning.loss.objective import Objective, combine_metrics
from dialoop_services.learning.parallel.parallel_rows import keep_pace, rows_behind
from dialoop_services.learning.parallel.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from dialoop_services.learning.loss.loss_inputs import Loss
    from dialoop_services.learning.model.policy import PolicyModel
    from dialoop_services.learning.optim import GuardedOptimizer, StepReport
    from dialoop_services.learning.packing.rows import PackedBatch, TokenRow


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """What the whole update holds, over all rows and ranks, counted before any mask of a loss."""

    num_tokens: int
    num_sequences: int
    prompt_num_tokens: dict[int, int]

    @classmethod
    def of(cls, rows: Sequence[PackedBatch], ranks: Ranks = ALONE) -> StepCounts:
        """Count trained tokens by the prompt their sequence is of, over the rows of all ranks."""
        by_prompt: dict[int, int] = {}
        for row in rows:
            owners = row.gather(row.sample_mask)
            counts = torch.bincount(owners, minlength=row.num_sequences).tolist()
            for prompt, count in zip(row.prompts, counts, strict=True):
                by_prompt[prompt] = by_prompt.get(prompt, 0) + count
        own = [sum(row.num_sequences for row in rows), list(by_prompt.items())]
        counted = ranks.gather(own)
        totals: dict[int, int] = {}
        for prompt, count in (pair for _, pairs in counted for pair in pairs):
            totals[prompt] = totals.get(prompt, 0) + count
        return cls(
            num_tokens=max(1, sum(totals.values())),
            num_sequences=sum(number for number, _ in counted),
            prompt_num_tokens={prompt: n for prompt, n in totals.items() if n},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardReport:
    """One pass forward and backward: its loss and token-mean metrics."""

    loss: float
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One optimiser update: its loss, token-mean metrics and step."""

    loss: float
    metrics: dict[str, Any]
    step: StepReport


def loss_inputs(
    batch: PackedBatch,
    logprobs: Tensor,
    *,
    entropy: Tensor | None = None,
    counts: StepCounts | None = None,
) -> LossInputs:
    """The batch's trained tokens as a loss reads them; counts default to this batch's own."""
    counts = counts or StepCounts.of([batch])

    def trained(values: Tensor | None) -> Tensor | None:
        return None if values is None else batch.gather(values).to(logprobs.dtype)

    owners = batch.gather(batch.sample_mask)
    of_prompt = torch.tensor(
        [counts.prompt_num_tokens.get(prompt, 1) for prompt in batch.prompts],
        dtype=logprobs.dtype,
        device=logprobs.device,
    )
    return LossInputs(
        policy_logprobs=logprobs,
        sequence_index=owners,
        loss_mask=torch.ones_like(logprobs, dtype=torch.bool),
        num_tokens=counts.num_tokens,
        num_sequences=counts.num_sequences,
        num_prompts=max(1, len(counts.prompt_num_tokens)),
        prompt_num_tokens=of_prompt[owners],
        inference_logprobs=trained(batch.inference_logprobs),
        proximal_logprobs=trained(batch.proximal_logprobs),
        ref_logprobs=trained(batch.ref_logprobs),
        advantages=trained(batch.advantages),
        staleness=trained(batch.staleness),
        entropy=entropy,
    )


def forward_backward(
    policy: PolicyModel,
    rows: Sequence[PackedBatch],
    loss: Loss,
    *,
    temperature: float | None = None,
    with_entropy: bool = False,
    ranks: Ranks = ALONE,
) -> BackwardReport:
    """Add the gradients of the rows' loss; the sum does not depend on how the rows are cut.

    Log-probs are at `temperature`, or else at what each sequence of the rows was sampled with.
    With several ranks each gives its own rows, and all get the same report. An objective that
    whitens does so over these rows: of a train step of several updates see `whitened_sequences`.
    """
    objective = loss if isinstance(loss, Objective) else Objective(loss=loss)
    counts, num_behind = StepCounts.of(rows, ranks), rows_behind(len(rows), ranks)
    rows = whitened(rows, ranks=ranks) if objective.whiten else rows
    total, metrics = 0.0, []
    for row in rows:
        scores = policy(
            row,
            temperature=row.temperature if temperature is None else temperature,
            with_entropy=with_entropy or objective.needs_entropy,
        )
        inputs = loss_inputs(row, scores.logprobs, entropy=scores.entropy, counts=counts)
        output = objective(inputs)
        output.loss.backward()  # type: ignore[no-untyped-call]
        total += float(output.loss.detach())
        metrics.append({name: float(value) for name, value in output.metrics.items()})
    keep_pace(policy, num_behind, ranks)
    of_ranks = ranks.gather([total, metrics])
    # The same sum on every rank, so all apply the step or all refuse it.
    return BackwardReport(
        loss=sum(loss for loss, _ in of_ranks),
        metrics=combine_metrics([row for _, of_rank in of_ranks for row in of_rank]),
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
    """One optimiser update over packed rows: `forward_backward`, then a step."""
    backward = forward_backward(
        policy, rows, loss, temperature=temperature, with_entropy=with_entropy, ranks=ranks
    )
    step = optimizer.step(backward.loss)
    return UpdateReport(loss=backward.loss, metrics=backward.metrics, step=step)


def whitened(
    rows: Sequence[PackedBatch], *, eps: float = 1e-8, ranks: Ranks = ALONE
) -> list[PackedBatch]:
    """Rows with (A - mean) / (std + eps) over all trained tokens; std over their number.

    The batch normalisation of REINFORCE++ (arXiv 2501.03262).
    """
    given = [row.advantages for row in rows if row.advantages is not None]
    if not all(ranks.gather(len(given) == len(rows))):
        return list(rows)  # a loss that needs advantages says so itself
    own = [row.gather(a).double() for row, a in zip(rows, given, strict=True)]
    tokens = ranks.gather_tensors(torch.cat(own) if own else torch.empty(0).double())
    if not rows:
        return []
    whiten = _whitening(torch.cat(tokens), eps)
    return [
        replace(row, advantages=torch.where(row.loss_mask, whiten(a), 0.0).to(a.dtype))
        for row, a in zip(rows, given, strict=True)
    ]


def whitened_sequences(rows: Sequence[TokenRow], *, eps: float = 1e-8) -> list[TokenRow]:
    """The same of a whole train step, before it is cut into updates; all ranks give all of it.

    Cut first, an update that holds but half of the answers could turn their signs.
    """
    given = [row.advantages for row in rows if row.advantages is not None]
    if not given or len(given) < len(rows):
        return list(rows)  # a loss that needs advantages says so itself
    whiten = _whitening(torch.cat(given).double(), eps)
    return [
        replace(row, advantages=whiten(a).to(a.dtype)) for row, a in zip(rows, given, strict=True)
    ]


def _whitening(tokens: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    std, mean = torch.std_mean(tokens, correction=0)
    return lambda advantages: (advantages - mean) / (std + eps)
