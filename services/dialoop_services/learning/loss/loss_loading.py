"""Finding an objective by the name of its loss.

load_objective("grpo", {"clip_high": 0.28})
load_objective("dapo", aggregation="sequence")
load_objective("my_project.losses:mine")
"""

from __future__ import annotations

import functools
import inspect
import logging
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidConfig
from dialoop.import_paths import load_attribute

from dialoop_services.learning.loss import losses
from dialoop_services.learning.loss.objective import Objective

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dialoop_services.learning.loss.loss_inputs import Aggregation, Loss


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A built-in loss as its paper sets it; every option can be set otherwise.

    Advantages are the scorer's and not set from here: dr_grpo, dppo_mask, reinforce_pp and rloo are
    meant for divide_by_std = false, rloo for leave_one_out = true beside it. needs_advantages is
    false where tokens are trained whatever their advantage; one that imitates reads no more of it
    than whether the scorer chose the sequence (`top_k`). One that holds to the reference by itself
    takes no KL term beside it.
    """

    loss: Callable[..., losses.LossOutput]
    options: Mapping[str, float] = field(default_factory=dict)
    aggregation: Aggregation = "token"
    whiten: bool = False
    asks_for_proximal: bool = False
    needs_advantages: bool = True
    imitates: bool = False
    holds_to_reference: bool = False


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "grpo": Preset(loss=losses.grpo),
        "dr_grpo": Preset(loss=losses.grpo, aggregation="constant"),
        "dapo": Preset(loss=losses.grpo, options={"clip_low": 0.2, "clip_high": 0.28}),
        "cispo": Preset(loss=losses.cispo),
        "gspo": Preset(loss=losses.gspo, aggregation="sequence"),
        "rloo": Preset(loss=losses.reinforce),
        "reinforce_pp": Preset(loss=losses.grpo, whiten=True),
        "dppo_mask": Preset(loss=losses.dppo_mask),
        "decoupled_ppo": Preset(loss=losses.decoupled_ppo, asks_for_proximal=True),
        "distill": Preset(loss=losses.distill, needs_advantages=False),
        "sft": Preset(loss=losses.sft, imitates=True),
        "minor_sft": Preset(
            loss=losses.minor_sft, aggregation="sequence", imitates=True, holds_to_reference=True
        ),
    }
)
"""The losses that need no import path."""


def load_objective(
    name: str, options: Mapping[str, Any] | None = None, **surroundings: Any
) -> Objective:
    """The objective of the loss called `name` (built in, or "package.module:function").

    `options` are the loss's own, `surroundings` fields of Objective. Raises InvalidConfig for a
    name that leads nowhere, an option the loss does not take, or a correction it would not feel.
    """
    preset = PRESETS.get(name) or Preset(loss=_function_at(name))
    objective = Objective(
        loss=_with_options(name, preset.loss, {**preset.options, **(options or {})}),
        aggregation=preset.aggregation,
        whiten=preset.whiten,
        asks_for_proximal=preset.asks_for_proximal,
        needs_advantages=preset.needs_advantages,
        imitates=preset.imitates,
    )
    given = {key: value for key, value in surroundings.items() if value is not None}
    if given.get("correction") is not None and (preset.imitates or not preset.needs_advantages):
        raise InvalidConfig(
            f"A correction weighs advantages, and loss {name} reads none.",
            reason="CORRECTION_WITHOUT_ADVANTAGES",
            remedy="Leave correction out of [train.objective], or take another loss.",
        )
    if given.get("kl_coeff") and preset.holds_to_reference:
        log.warning("Loss %s holds the policy to the reference: kl_coeff counts as 0.", name)
        given["kl_coeff"] = 0.0
    return replace(objective, **given)


def load_loss(name: str, options: Mapping[str, Any] | None = None) -> Loss:
    """The loss itself, without its surroundings."""
    return load_objective(name, options).loss


def _with_options(
    name: str, function: Callable[..., losses.LossOutput], options: Mapping[str, Any]
) -> Loss:
    parameters = inspect.signature(function).parameters
    unknown = sorted(set(options) - set(parameters))
    if unknown:
        raise InvalidConfig(
            f"Loss {name} has no option {', '.join(unknown)}.",
            reason="UNKNOWN_LOSS_OPTION",
            remedy=f"It takes {', '.join(list(parameters)[1:]) or 'none'}.",
        )
    return functools.partial(function, **options) if options else function


def _function_at(path: str) -> Callable[..., losses.LossOutput]:
    loaded: Callable[..., losses.LossOutput] = load_attribute(
        path, what="loss", reason="UNKNOWN_LOSS", built_in=PRESETS
    )
    if not callable(loaded):
        raise InvalidConfig(f"The loss '{path}' is not a function.", reason="UNKNOWN_LOSS")
    return loaded
