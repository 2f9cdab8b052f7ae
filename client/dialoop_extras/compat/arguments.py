"""What the adapters share: arguments that mean nothing here, and packages that may be missing."""

from __future__ import annotations

import inspect
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")

_KEYS = "Records have fields and no keys; leave it out."
_TEMPLATE = (
    "The inference service renders with the chat template of the model's tokenizer: set it there."
)

NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "actor_name": ((), "Nothing runs in Ray here; leave it out."),
    "actor_network": ((), "Give its log-probs in LossInputs; the trainer computes them."),
    "add_to_reward": ((False,), "Use KLComputation for a reward."),
    "advantage_key": ((), "Advantages are those of the sequences; leave it out."),
    "async_envs": ((False,), "Collect in the collector service, which plays many at once."),
    "attention_key": ((), _KEYS),
    "batch_size": ((1, (1,), [1]), "A session holds one conversation; open several sessions."),
    "batch_size_dl": ((1,), "A reset loads one task; the collector asks for as many as it plays."),
    "call_before_env_reset": ((False,), "Leave it out."),
    "chat_template": ((), _TEMPLATE),
    "chat_template_name": ((), _TEMPLATE),
    "clip_value": ((), "Leave it out."),
    "coeff": ((1.0,), "Use KLComputation for a reward."),
    "detach": ((True,), "Log-probs have no gradient here; leave it out."),
    "device": (("cpu",), "Environments hold messages and no tensors; leave it out."),
    "gamma": ((), "Leave it out."),
    "gen_log_probs_full_key": ((), _KEYS),
    "generate": ((True,), "Leave it out."),
    "headless": ((True,), "The browser has no window here."),
    "history_key": ((), _KEYS),
    "in_keys": ((), _KEYS),
    "inplace": ((), "Answers are new values; leave it out."),
    "kl_key": ((), _KEYS),
    "layout": ((), "Nothing is padded here; leave it out."),
    "log_prob_key": ((), _KEYS),
    "log_probs_full_key": ((), _KEYS),
    "masking_strategy": (("sft", "rlhf"), "Set loss_mask of LossInputs to the tokens to train."),
    "num_envs": ((1,), "Open as many sessions of one environment as you like."),
    "out_keys": ((), _KEYS),
    "padding_side": (("left",), "Nothing is padded here; leave it out."),
    "primers": ((), "Rows need no specification; leave it out."),
    "prompt_key": (("query",), "A group has one prompt; leave it out."),
    "reduction": (("mean",), "Choose an aggregation."),
    "ref_log_probs_full_key": ((), _KEYS),
    "rewards_key": ((), "Rewards are those of the turns; leave it out."),
    "samples_mc_entropy": ((1,), "The entropy is exact here; leave it out."),
    "stack_method": ((), "Rows stay as they are; make columns of them with as_padded_tensor."),
    "tokenizer": ((), "Nothing is tokenised here; leave it out."),
    "tokenizer_kwargs": ((), "Nothing is tokenised here; leave it out."),
    "use_ray_service": ((False,), "Nothing runs in Ray here; leave it out."),
    "verbose": ((False, True), "Leave it out."),
    "weight_updater": ((), "Call `update_policy_weights_(manifest, chunks)`."),
}
"""Arguments of the sources without a meaning here: values that do nothing, and what to do else."""


def require_neutral(where: str, others: Mapping[str, Any]) -> None:
    """Raise InvalidConfig (BAD_OPTIONS) for an argument that has no meaning here.

    One that is None, or has the value that does nothing, is taken.
    """
    for name, value in others.items():
        allowed, remedy = NEUTRAL.get(name, (None, "Leave it out; docs/compat.md lists the rest."))
        if allowed is None:
            raise InvalidConfig(
                f"{where} has no argument '{name}'.", reason=Reason.BAD_OPTIONS, remedy=remedy
            )
        if value is not None and not any(value == neutral for neutral in allowed):
            raise InvalidConfig(
                f"{where}: {name}={value!r:.40} is not supported.",
                reason=Reason.BAD_OPTIONS,
                remedy=remedy,
            )


def take_neutral(name: str, value: Any) -> Any:
    """Return the function so that it also takes what has no meaning here, as `require_neutral`.

    A class, or a function that takes any argument, stays as it is.
    """
    if not inspect.isfunction(value):
        return value
    parameters = inspect.signature(value).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return value

    @wraps(value)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        require_neutral(name, {k: v for k, v in options.items() if k not in parameters})
        return value(*arguments, **{k: v for k, v in options.items() if k in parameters})

    return wrapper


def with_neutral(cls: type[T]) -> type[T]:
    """Let a class of this room take them, too: a decorator."""
    cls.__init__ = take_neutral(cls.__name__, cls.__init__)  # type: ignore[method-assign]
    return cls


def load_home(name: str, home: str) -> Any:
    """Return what stands for a source's name; InvalidConfig (PACKAGE_MISSING) without its package.

    home: `module:attribute`.
    """
    module, _, attribute = home.partition(":")
    try:
        return take_neutral(name, getattr(import_module(module), attribute))
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("dialoop_learning", "torch"):
            raise
        raise InvalidConfig(
            f"{name} needs the package {package}, which is not installed.",
            reason=Reason.PACKAGE_MISSING,
            remedy='Install the services: pip install "dialoop-services".',
        ) from error
