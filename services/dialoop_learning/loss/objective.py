"""The whole objective of an update: a loss, how it is aggregated, and what goes with any loss.

objective = Objective(loss=losses.grpo, aggregation="sequence", kl_coeff=0.1)
objective(inputs).loss
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from dialoop.errors import DialoopError, InvalidConfig
from dialoop.reasons import Reason
from dialoop.user_functions import TimeIsUp, call_now, place_of, raised_at

from dialoop_learning.loss.losses import MAX_LOG_RATIO, LossInputs, LossOutput
from dialoop_learning.rl.buckets import buckets_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from dialoop_learning.loss.corrections import Correction
    from dialoop_learning.loss.facts import Aggregation
    from dialoop_learning.loss.losses import Loss

Estimator = Literal["k1", "k2", "k3"]
"""How to estimate KL(policy || other) from the tokens that the policy sampled, [M].

With d = log other - log policy (J. Schulman, "Approximating KL divergence", 2020):
k1 = -d, unbiased, may be negative; k2 = d^2 / 2, biased, low variance; k3 = exp(d) - 1 - d,
unbiased and never negative.

As a loss only k2 has the gradient of the KL (in expectation, on-policy). The gradient of k1 is zero
in expectation, and that of k3 is the gradient of KL(other || policy) (Tang and Munos, arXiv
2506.09477). As a penalty in a reward k1 is the right one.

TRL's GRPOTrainer adds k3 times the policy's ratio; with use_bias_correction_kl off it adds k3 as
here. TRL's RLOOTrainer subtracts k1 from the rewards, as Dialoop's scorer does. torchrl adds k3
divided by all positions of the batch, including padding and positions that are not trained.
"""

_BY_STALENESS, _BY_DEPTH = "staleness", "depth"
_TABLES = {_BY_STALENESS: "by_staleness", _BY_DEPTH: "by_depth"}
"""Sums that are named staleness/1/ratio -> the table that they become."""

_OF_UPDATES = frozenset(
    (
        *("loss_objective", "loss_kl", "loss_kl_to_inference", "loss_entropy"),
        "num_recorded_choices",
    )
)
"""Metrics of an update as a whole; the others are means over its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss and what goes with it; it is called like a loss.

    kl_coeff: factor of the KL estimate to kl_to, which is added (0: none).
    kl_inference_coeff: the same, to the engine that sampled, beside a KL to the reference.
    entropy_coeff: factor of the entropy, which is subtracted (0: none).
    whiten: normalise advantages over the train step (REINFORCE++, arXiv 2501.03262).
    imitates: the loss learns the tokens of every sequence whose advantage is not 0.
    needs_feedback: the loss learns from the policy's own log-probs behind a prompt with feedback.
    timeout_s: seconds that a loss of the user's own may take for one packed row.
    KL and entropy are aggregated as the loss is. TRL's entropy bonus is always a mean over tokens.
    The metrics loss_objective, loss_kl, loss_kl_to_inference and loss_entropy add up to the loss.
    """

    loss: Loss
    aggregation: Aggregation = "token"
    constant: float = 1.0
    kl_coeff: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_to: Literal["ref", "inference"] = "ref"
    kl_inference_coeff: float = 0.0
    entropy_coeff: float = 0.0
    correction: Correction | None = None
    whiten: bool = False
    asks_for_proximal: bool = False
    needs_advantages: bool = True
    imitates: bool = False
    needs_feedback: bool = False
    timeout_s: float = 600.0

    @property
    def needs_proximal(self) -> bool:
        """Return whether the policy's log-probs must be computed before the train step."""
        corrects = self.correction is not None and self.correction.needs_proximal
        return self.asks_for_proximal or corrects

    @property
    def needs_entropy(self) -> bool:
        """Return whether the entropy is part of the loss."""
        return bool(self.entropy_coeff)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss [] of one packed row with KL, entropy and correction, and metrics."""
        inputs = replace(inputs, aggregation=self.aggregation, constant=self.constant)
        metrics: dict[str, Tensor] = _mismatch_metrics(inputs)
        if self.correction is not None:
            inputs, corrected = self.correction.apply(inputs)
            metrics |= corrected
        output = output_of(self.loss, inputs, timeout_s=self.timeout_s)
        loss = output.loss
        terms = {"loss_objective": loss}
        for name, other, coeff in self._kl_terms():
            kl = estimate(
                self.kl_estimator, inputs.policy_logprobs, inputs.require(f"{other}_logprobs")
            )
            terms[name] = coeff * inputs.mean(kl)
            loss = loss + terms[name]
            metrics[f"kl_to_{other}"] = inputs.token_mean(kl.detach())
        if self.entropy_coeff:
            terms["loss_entropy"] = -self.entropy_coeff * inputs.mean(inputs.require("entropy"))
            loss = loss + terms["loss_entropy"]
        metrics |= {name: term.detach() for name, term in terms.items()} | output.metrics
        if output.clipped is not None:
            metrics["clip_fraction"] = inputs.token_mean(output.clipped.float())
        metrics |= _by_staleness(inputs, output.clipped) | _by_depth(inputs)
        return LossOutput(loss, metrics, output.clipped)

    def _kl_terms(self) -> list[tuple[str, str, float]]:
        """Return each KL term's metric, the log-probs it compares with, and its factor."""
        terms = [
            ("loss_kl", self.kl_to, self.kl_coeff),
            ("loss_kl_to_inference", "inference", self.kl_inference_coeff),
        ]
        return [(name, other, coeff) for name, other, coeff in terms if coeff]


def output_of(loss: Loss, inputs: LossInputs, *, timeout_s: float) -> LossOutput:
    """Return what a loss gives; InvalidConfig (LOSS_FAILED) where the user's own gives none.

    One that raises is called once more: what fails twice on the same numbers fails for ever. One
    that takes longer than `timeout_s` is left behind in its thread.
    """
    place = place_of(loss)
    if not place:
        return loss(inputs)
    try:
        output = call_now(_in_this_mode(loss, inputs), inputs, timeout_s=timeout_s)
    except (DialoopError, torch.OutOfMemoryError):
        raise
    except TimeIsUp as error:
        raise _loss_failed(place, f"took more than {timeout_s:g} s for one packed row") from error
    except Exception:
        output = _second_try(loss, inputs, place)
    if not isinstance(output, LossOutput):
        raise _loss_failed(place, f"returned a {type(output).__name__} and no LossOutput")
    value: object = output.loss
    if not isinstance(value, torch.Tensor) or value.ndim:
        shape = (
            f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.40}"
        )
        raise _loss_failed(place, f"returned {shape} as the loss, not a scalar tensor")
    if not isinstance(output.metrics, Mapping):
        raise _loss_failed(place, f"returned metrics {output.metrics!r:.40}, not a dict")
    is_trained = torch.is_grad_enabled() and inputs.policy_logprobs.requires_grad
    if is_trained and not value.requires_grad:
        raise _loss_failed(place, "returned a loss that depends on no weight of the policy")
    return output


def _in_this_mode(loss: Loss, inputs: LossInputs) -> Loss:
    """Return the loss for another thread, which computes there as it would in this one."""
    has_gradients, device = torch.is_grad_enabled(), inputs.policy_logprobs.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def compute(inputs: LossInputs) -> LossOutput:
        with torch.set_grad_enabled(has_gradients), torch.cuda.stream(stream):
            return loss(inputs)

    return compute


def _second_try(loss: Loss, inputs: LossInputs, place: str) -> LossOutput:
    try:
        return loss(inputs)
    except Exception as error:
        raise _loss_failed(place, f"raised {raised_at(error)}") from error


def _loss_failed(place: str, how: str) -> InvalidConfig:
    return InvalidConfig(
        f"The loss function at {place} {how}.",
        reason=Reason.LOSS_FAILED,
        remedy="Correct that function: it takes LossInputs and returns LossOutput(loss, metrics), "
        "whose loss is a scalar made of policy_logprobs.",
    )


def combine_metrics(rows: Iterable[Mapping[str, Tensor | float]]) -> dict[str, Any]:
    """Add up the metrics of an update's rows, and derive those that are not sums.

    routing_differs: the share of replayed choices of experts that the trainer would make otherwise.
    ess: the effective sample size as a share of all tokens, mean(r)^2 / mean(r^2), 1 on-policy.
    by_staleness: {versions behind: {num_tokens, mismatch_kl, ratio, ess, ...}}, means over the
    tokens of that age. by_depth: the same for tokens of the current policy by how many tokens
    precede them, under the smallest number of a bucket (`dialoop_learning.rl.buckets`).
    """
    totals: dict[str, Any] = {}
    tables: dict[str, dict[int, dict[str, float]]] = {name: {} for name in _TABLES}
    for row in rows:
        for name, value in row.items():
            number = float(torch.as_tensor(value).detach())
            table, _, rest = name.partition("/")
            if rest and table in _TABLES:
                key, _, sum_of = rest.partition("/")
                sums = tables[table].setdefault(int(key), {})
                sums[sum_of] = sums.get(sum_of, 0.0) + number
            else:
                totals[name] = totals.get(name, 0.0) + number
    if totals.get("ratio_squared"):
        totals["ess"] = totals["ratio"] ** 2 / totals["ratio_squared"]
    num_differing = totals.pop("num_differing_choices", 0.0)
    if totals.get("num_recorded_choices"):
        totals["routing_differs"] = num_differing / totals["num_recorded_choices"]
    for table, rows_of_table in tables.items():
        if rows_of_table:
            totals[_TABLES[table]] = {
                key: _means(rows_of_table[key]) for key in sorted(rows_of_table)
            }
    return totals


def mean_metrics(
    updates: Sequence[Mapping[str, Any]], num_tokens: Sequence[int], *, num_epochs: int = 1
) -> dict[str, Any]:
    """Return the means over a train step of what `combine_metrics` returned for each update.

    num_tokens: trained tokens of each update. num_epochs: how often the updates went over them. A
    token counts once for each update that trained it, so means over tokens are means over all of
    them, however the step was cut. Parts of the loss are plain means over updates, as the loss is,
    and so is num_recorded_choices. The num_tokens of by_staleness are those of one epoch.
    by_depth is left out: after the first update the policy differs from the one that sampled.
    """
    names = dict.fromkeys(
        name for update in updates for name in update if name not in _TABLES.values()
    )
    means: dict[str, Any] = {}
    for name in names:
        pairs = [
            (update[name], _weight(name, update, count))
            for update, count in zip(updates, num_tokens, strict=True)
            if name in update
        ]
        total = sum(weight for _, weight in pairs) or 1.0
        means[name] = sum(value * weight for value, weight in pairs if weight) / total
    if means.get("ratio_squared"):
        means["ess"] = means["ratio"] ** 2 / means["ratio_squared"]
    ages = sorted({age for u in updates for age in u.get("by_staleness", {})})
    if ages:
        means["by_staleness"] = {age: _of_age(updates, age, num_epochs) for age in ages}
    return means


def _weight(name: str, update: Mapping[str, Any], num_tokens: int) -> float:
    """Return how much an update counts in the mean of a metric."""
    if name in _OF_UPDATES:
        return 1.0
    return float(update["num_recorded_choices"] if name == "routing_differs" else num_tokens)


def _of_age(updates: Sequence[Mapping[str, Any]], age: int, num_epochs: int) -> dict[str, float]:
    rows = [u["by_staleness"][age] for u in updates if age in u.get("by_staleness", {})]
    total = sum(row["num_tokens"] for row in rows)

    def mean(values: Iterable[float]) -> float:
        pairs = zip(values, rows, strict=True)
        return float(sum(value * row["num_tokens"] for value, row in pairs) / total)

    means = {name: mean([row[name] for row in rows]) for name in rows[0]}
    squared = mean([row["ratio"] ** 2 / row["ess"] for row in rows])
    return {**means, "num_tokens": total / num_epochs, "ess": means["ratio"] ** 2 / squared}


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    count = sums["num_tokens"]
    means = {name: value / count for name, value in sums.items() if name != "num_tokens"}
    squared = means.pop("ratio_squared")
    return {"num_tokens": count, **means, "ess": means["ratio"] ** 2 / squared}


def _mismatch_metrics(inputs: LossInputs) -> dict[str, Tensor]:
    """Return how far the policy is from the sampler, and its entropy, over the update's tokens."""
    metrics = {name: inputs.token_mean(values) for name, values in _token_metrics(inputs).items()}
    if "mismatch_kl" in metrics:
        metrics["approx_kl"] = metrics.pop("mismatch_kl")
    return metrics


def _by_staleness(inputs: LossInputs, clipped: Tensor | None) -> dict[str, Tensor]:
    """Return sums over the tokens of each age, which `combine_metrics` divides by their number."""
    if inputs.staleness is None:
        return {}
    values = _token_metrics(inputs)
    if "ratio" not in values:
        return {}
    values["num_tokens"] = torch.ones_like(inputs.policy_logprobs)
    if clipped is not None:
        values["clip_fraction"] = clipped.float()
    return _sums_by(_BY_STALENESS, inputs.staleness, inputs.loss_mask, values)


def _by_depth(inputs: LossInputs) -> dict[str, Tensor]:
    """Return sums over the tokens of the current policy in each bucket of depth."""
    if inputs.staleness is None or inputs.depth is None or inputs.inference_logprobs is None:
        return {}
    values = _token_metrics(inputs)
    values["num_tokens"] = torch.ones_like(inputs.policy_logprobs)
    buckets = torch.from_numpy(buckets_of(inputs.depth.cpu().numpy())).to(inputs.depth.device)
    is_fresh = inputs.loss_mask & (inputs.staleness == 0)
    return _sums_by(_BY_DEPTH, buckets, is_fresh, values)


def _sums_by(
    table: str, keys: Tensor, mask: Tensor, values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return sums of values [M] over the tokens in the mask [M] that have each key [M]."""
    sums = {}
    for key in torch.unique(keys[mask]).tolist():
        own = mask & (keys == key)
        for name, value in values.items():
            sums[f"{table}/{int(key)}/{name}"] = torch.where(own, value, 0.0).sum()
    return sums


@torch.no_grad()
def _token_metrics(inputs: LossInputs) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    if inputs.inference_logprobs is not None:
        ratio = inputs.log_ratio_to("inference_logprobs").exp()
        inference = inputs.require("inference_logprobs")
        # k3 of KL(inference || policy) over the sampler's tokens: r - 1 - log r.
        values = {
            "mismatch_kl": k3(inference, inputs.policy_logprobs),
            "ratio": ratio,
            "ratio_squared": ratio.square(),
        }
    if inputs.entropy is not None:
        values["entropy"] = inputs.entropy.detach()
    return values


def k1(policy_logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return log policy - log other [M]."""
    return -_difference(policy_logprobs, other_logprobs)


def k2(policy_logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return (log policy - log other)^2 / 2 [M]."""
    return _difference(policy_logprobs, other_logprobs).square() / 2


def k3(policy_logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return exp(d) - 1 - d [M] with d = log other - log policy."""
    difference = _difference(policy_logprobs, other_logprobs)
    return difference.exp() - difference - 1


def estimate(kind: Estimator, policy_logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return the KL estimate [M] of the estimator called `kind`."""
    return {"k1": k1, "k2": k2, "k3": k3}[kind](policy_logprobs, other_logprobs)


def _difference(policy_logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    return (other_logprobs - policy_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
