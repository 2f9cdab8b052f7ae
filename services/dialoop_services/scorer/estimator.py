"""An advantage estimator of the user's own, named in [scorer] as `module:function`.

def centred(rewards: list[float]) -> list[float]:      # advantage_estimator = "mine:centred"
    return [reward - statistics.median(rewards) for reward in rewards]

def brief(rewards: list[float], group: Group) -> list[float]:
    return centred([r / t.num_model_tokens for r, t in zip(rewards, group.trajectories)])
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidConfig, PreconditionFailed
from dialoop.failures import log_failure
from dialoop.reasons import Reason
from dialoop.user_functions import TimeIsUp, call_now, raised_at

from dialoop_services.scorer.rewards import ONCE_S, call_apart, group_of_four, load_function

if TYPE_CHECKING:
    from dialoop.trajectory import Group

_TIMEOUT_S = 60.0

EstimatorFunction = Callable[..., Any]
"""Returns n finite advantages for one whole group of n trajectories, in their order; may be async.

A parameter named `group` gets the Group, whose trajectories have turns, lengths, rewards by name
and failures; the other one gets n rewards. A function has one of the two or both.
A reward is one number of each trajectory, as `advantage_aggregate` makes it of the turns' rewards.
A dense reward, with one number for each token, counts with its sum.
The same group must always give the same advantages, because it may be scored twice.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """An estimator and the path that named it, which its errors quote."""

    path: str
    function: EstimatorFunction

    async def estimate(self, group: Group, rewards: Sequence[float]) -> tuple[float, ...]:
        """Return one advantage for each trajectory of the group, whose rewards these are.

        Raise PreconditionFailed (ESTIMATOR_FAILED) when the function raises, takes too long, or
        returns anything but that many finite numbers.
        """
        arguments = _arguments_of(self.function, list(rewards), group)
        try:
            values = await call_apart(self.function, *arguments, timeout_s=_TIMEOUT_S)
            values = list(values) if isinstance(values, Iterable) else values
        except TimeIsUp as error:
            raise self._error(str(error).removeprefix("it ")) from error
        except Exception as error:
            error_id = log_failure(error, f"The advantage estimator {self.path}")
            raise self._error(f"raised {raised_at(error)} (error_id {error_id})") from error
        return self._advantages(values, len(rewards))

    def rehearse(self) -> None:
        """Raise InvalidConfig (ESTIMATOR_FAILED) unless a group of four gets four advantages.

        What raises for want of something in a made-up group is left to the real ones.
        """
        group = group_of_four()
        rewards = [trajectory.reward for trajectory in group.trajectories]
        arguments = _arguments_of(self.function, rewards, group)
        try:
            self._advantages(call_now(self.function, *arguments, timeout_s=ONCE_S), len(rewards))
        except PreconditionFailed as error:
            raise InvalidConfig(
                error.message, reason=error.reason, remedy="Correct that function."
            ) from error
        except Exception as error:
            if any(argument is group for argument in arguments):
                return
            raise InvalidConfig(
                f"The advantage estimator {self.path} raised {raised_at(error)} with the rewards "
                f"{rewards}.",
                reason=Reason.ESTIMATOR_FAILED,
                remedy="Correct that line.",
            ) from error

    def _advantages(self, values: Any, count: int) -> tuple[float, ...]:
        try:
            advantages = tuple(float(value) for value in values)
        except Exception as error:
            what = f"returned a {type(values).__name__}, which is no list of numbers"
            raise self._error(what) from error
        if len(advantages) != count:
            raise self._error(f"gave {len(advantages)} advantages for {count} rewards")
        if not all(map(math.isfinite, advantages)):
            raise self._error("gave an advantage that is not finite")
        return advantages

    def _error(self, how: str) -> PreconditionFailed:
        return PreconditionFailed(
            f"The advantage estimator {self.path} {how}.",
            reason=Reason.ESTIMATOR_FAILED,
            remedy="Correct that function: it returns one finite number for each trajectory. The "
            "group is dropped.",
        )


def load_estimator(path: str) -> Estimator | None:
    """Import the estimator at `path`; None for an empty path.

    Raise InvalidConfig (ESTIMATOR_NOT_FOUND) where there is no such function, or it has other
    parameters.
    """
    if not path:
        return None
    function = load_function(path, what="advantage estimator", reason=Reason.ESTIMATOR_NOT_FOUND)
    try:
        inspect.signature(function).bind(*_arguments_of(function, None, None))
    except (TypeError, ValueError) as error:  # ValueError: a function of C that does not tell
        raise InvalidConfig(
            f"The advantage estimator '{path}' has other parameters: {error}.",
            reason=Reason.ESTIMATOR_NOT_FOUND,
            remedy="Let it take `rewards`, `group` or both.",
        ) from error
    return Estimator(path=path, function=function)


def _arguments_of(function: EstimatorFunction, rewards: Any, group: Any) -> list[Any]:
    """Return what the function is called with, by the names of its first two parameters."""
    names = list(inspect.signature(function).parameters)[:2]
    if "group" not in names:
        return [rewards]
    return [group if name == "group" else rewards for name in names]
