"""Find an objective by the name of its loss.

load_objective("grpo", {"clip_high": 0.28})
load_objective("dapo", aggregation="sequence")
load_objective("my_project.losses:mine")

python -m dialoop_learning.loss.loss_loading my_project.losses:mine '{"cap": 2}'

prints one JSON object: {} for a loss to train with, else `reason`, `message` and `remedy`.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from dialoop.errors import DialoopError, InvalidConfig
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason

from dialoop_learning.loss import losses
from dialoop_learning.loss.facts import LOSSES, facts_of
from dialoop_learning.loss.objective import Objective, output_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dialoop_learning.loss.losses import Loss

log = logging.getLogger(__name__)

_ASKED_S = 30.0
"""Seconds that a loss may take for six tokens."""


def load_objective(
    name: str, options: Mapping[str, Any] | None = None, **surroundings: Any
) -> Objective:
    """Return the objective of the loss called `name` (built in, or "package.module:function").

    `options` are the loss's own, `surroundings` are fields of Objective. Raises InvalidConfig for
    a name that does not exist, an option that the loss does not take, or a correction for a loss
    that reads no advantages.
    """
    facts = facts_of(name)
    function = getattr(losses, facts.formula or name) if name in LOSSES else _function_at(name)
    objective = Objective(
        loss=_with_options(name, function, {**facts.options, **(options or {})}),
        aggregation=facts.aggregation,
        whiten=facts.whiten,
        asks_for_proximal=facts.needs_proximal,
        needs_advantages=facts.needs_advantages,
        imitates=facts.imitates,
        needs_feedback=facts.needs_feedback,
    )
    fields = {key: value for key, value in surroundings.items() if value is not None}
    if fields.get("correction") is not None and (facts.imitates or not facts.needs_advantages):
        raise InvalidConfig(
            f"A correction weights advantages, and the loss {name} reads none.",
            reason=Reason.CORRECTION_WITHOUT_ADVANTAGES,
            remedy="Leave correction out of [train.objective], or take another loss.",
        )
    if fields.get("kl_coeff") and facts.holds_to_reference:
        log.warning("Loss %s holds the policy to the reference: kl_coeff counts as 0.", name)
        fields["kl_coeff"] = 0.0
    return replace(objective, **fields)


def load_loss(name: str, options: Mapping[str, Any] | None = None) -> Loss:
    """Return the loss function alone, without its surroundings."""
    return load_objective(name, options).loss


def _with_options(
    name: str, function: Callable[..., losses.LossOutput], options: Mapping[str, Any]
) -> Loss:
    parameters = inspect.signature(function).parameters
    unknown = sorted(set(options) - set(parameters))
    if unknown:
        raise InvalidConfig(
            f"The loss {name} has no option {', '.join(unknown)}.",
            reason=Reason.UNKNOWN_LOSS_OPTION,
            remedy=f"It takes {', '.join(list(parameters)[1:]) or 'none'}.",
        )
    return functools.partial(function, **options) if options else function


def _function_at(path: str) -> Callable[..., losses.LossOutput]:
    loaded: Callable[..., losses.LossOutput] = load_attribute(
        path, what="loss", reason=Reason.UNKNOWN_LOSS, built_in=LOSSES
    )
    if not callable(loaded):
        raise InvalidConfig(f"The loss '{path}' is not a function.", reason=Reason.UNKNOWN_LOSS)
    return loaded


def require_form(name: str, options: Mapping[str, Any]) -> None:
    """Call a loss once with six made-up tokens of two answers.

    Raise InvalidConfig (LOSS_FAILED) unless its loss is one finite number that depends on the
    policy's log-probs, and its metrics are single numbers.
    """
    logprobs = torch.linspace(-1.5, -0.25, 6).requires_grad_()
    before = logprobs.detach() - 0.1
    inputs = losses.LossInputs(
        policy_logprobs=logprobs,
        entropy=logprobs * -1.0,
        sequence_index=torch.tensor([0, 0, 0, 1, 1, 1]),
        loss_mask=torch.ones(6, dtype=torch.bool),
        num_tokens=6,
        num_sequences=2,
        prompt_num_tokens=torch.full((6,), 6.0),
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
        staleness=torch.zeros(6),
        depth=torch.arange(6.0),
        inference_logprobs=before,
        proximal_logprobs=before,
        ref_logprobs=before,
    )
    output = output_of(load_loss(name, options), inputs, timeout_s=_ASKED_S)
    (gradient,) = torch.autograd.grad(output.loss, logprobs, allow_unused=True)
    wrong = [
        metric
        for metric, value in output.metrics.items()
        if not (isinstance(value, int | float) or (torch.is_tensor(value) and not value.ndim))
    ]
    if not torch.isfinite(output.loss):
        problem = f"returned {output.loss.item()}"
    elif gradient is None or not torch.isfinite(gradient).all():
        problem = "has a gradient that is not there or not finite"
    elif wrong:
        problem = f"returned a metric {wrong[0]} that is not one number"
    else:
        return
    raise InvalidConfig(
        f"The loss '{name}', called with six tokens, {problem}.",
        reason=Reason.LOSS_FAILED,
        remedy="Return LossOutput(inputs.mean(terms), {}), where terms are one number for each "
        "token.",
    )


def main() -> None:
    """Check the loss of the command line, and print what is wrong as JSON."""
    problem = {}
    try:
        require_form(sys.argv[1], json.loads(sys.argv[2]))
    except DialoopError as error:
        reason = str(error.reason)
        problem = {"reason": reason, "message": error.message, "remedy": error.remedy}
    sys.stdout.write(f"{json.dumps(problem)}\n")


if __name__ == "__main__":
    main()
