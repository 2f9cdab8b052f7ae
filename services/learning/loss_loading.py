"""Finding a loss by the name a config gives it.

load_loss("grpo", {"clip_high": 0.28})
load_loss("my_project.losses:mine")
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidConfig

from services.learning import losses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from services.learning.losses import Loss

BUILT_IN: dict[str, Callable[..., losses.LossOutput]] = {
    "grpo": losses.grpo,
    "dppo_mask": losses.dppo_mask,
    "sft": losses.sft,
}
"""The losses that need no import path."""


def load_loss(name: str, options: Mapping[str, Any] | None = None) -> Loss:
    """The loss called `name` (built in, or "package.module:function") with its options set.

    Raises InvalidConfig for a name that leads nowhere or an option the loss does not take.
    """
    function = BUILT_IN[name] if name in BUILT_IN else _imported(name)
    parameters = inspect.signature(function).parameters
    unknown = sorted(set(options or {}) - set(parameters))
    if unknown:
        raise InvalidConfig(
            f"Loss {name} has no option {', '.join(unknown)}.",
            reason="UNKNOWN_LOSS_OPTION",
            remedy=f"It takes {', '.join(list(parameters)[1:]) or 'none'}.",
        )
    return functools.partial(function, **options) if options else function


def _imported(name: str) -> Callable[..., losses.LossOutput]:
    module_name, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise _unknown(name, str(error)) from error
    if not callable(function):
        raise _unknown(name, "it is not a function")
    loaded: Callable[..., losses.LossOutput] = function
    return loaded


def _unknown(name: str, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"There is no loss {name!r}: {why}.",
        reason="UNKNOWN_LOSS",
        remedy=f"Use one of {', '.join(BUILT_IN)}, or 'package.module:function'.",
    )
