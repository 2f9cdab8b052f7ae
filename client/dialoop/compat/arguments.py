"""What the adapters share: arguments that mean nothing here, and packages that may be missing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "actor_network": ((), "Give its log-probs in LossInputs; the trainer computes them."),
    "async_envs": ((False,), "Collect in the collector service, which plays many at once."),
    "batch_size": ((1, (1,), [1]), "A session holds one conversation; open several sessions."),
    "batch_size_dl": ((1,), "A reset loads one task; the collector asks for as many as it plays."),
    "call_before_env_reset": ((False,), "Leave it out."),
    "device": (("cpu",), "Environments hold messages and no tensors; leave it out."),
    "generate": ((True,), "Leave it out."),
    "headless": ((True,), "The browser has no window here."),
    "num_envs": ((1,), "Open as many sessions of one environment as you like."),
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


def load_home(name: str, home: str) -> Any:
    """Return what stands for a source's name; InvalidConfig (PACKAGE_MISSING) without its package.

    home: `module:attribute`.
    """
    module, _, attribute = home.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("dialoop_services", "torch"):
            raise
        raise InvalidConfig(
            f"{name} needs the package {package}, which is not installed.",
            reason=Reason.PACKAGE_MISSING,
            remedy='Install the services: pip install "dialoop-services".',
        ) from error
