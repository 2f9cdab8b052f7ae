"""Find an objective by the name of its loss.

load_objective("grpo", {"clip_high": 0.28})
load_objective("dapo", aggregation="sequence")
load_objective("my_project.losses:mine")
"""

from __future__ import annotations

import functools
import inspect
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidConfig
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason

from dialoop_learning.loss import losses
from dialoop_learning.loss.facts import LOSSES, facts_of
from dialoop_learning.loss.objective import Objective

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dialoop_learning.loss.losses import Loss

log = logging.getLogger(__name__)


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
