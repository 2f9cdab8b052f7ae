"""An advantage estimator of the user's own, named in [scorer] as `module:function`.

def centred(rewards: list[float]) -> list[float]:      # advantage_estimator = "mine:centred"
    return [reward - statistics.median(rewards) for reward in rewards]
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dialoop.errors import PreconditionFailed
from dialoop.reasons import Reason
from dialoop.user_functions import raised_at

from dialoop_services.scorer.rewards import call_apart, load_function

log = logging.getLogger(__name__)

_TIMEOUT_S = 60.0

EstimatorFunction = Callable[[list[float]], Any]
"""Returns n finite advantages for the n rewards of one whole group, in their order; may be async.

A reward is one number of each trajectory, as `advantage_aggregate` makes it of the turns' rewards.
A dense reward, with one number for each token, counts with its sum.
The same rewards must always give the same advantages, because a group may be scored twice.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """An estimator and the path that named it, which its errors quote."""

    path: str
    function: EstimatorFunction

    async def estimate(self, rewards: Sequence[float]) -> tuple[float, ...]:
        """Return one advantage for each reward.

        Raise PreconditionFailed (ESTIMATOR_FAILED) when the function raises, takes too long, or
        returns anything but that many finite numbers.
        """
        try:
            values = await call_apart(self.function, list(rewards), timeout_s=_TIMEOUT_S)
            advantages = tuple(float(value) for value in values)
        except TimeoutError as error:
            raise self._error(f"took more than {_TIMEOUT_S:g} s") from error
        except Exception as error:
            log.exception("The advantage estimator %s failed.", self.path)
            raise self._error(f"raised {raised_at(error)}") from error
        if len(advantages) != len(rewards):
            raise self._error(f"gave {len(advantages)} advantages for {len(rewards)} rewards")
        if not all(map(math.isfinite, advantages)):
            raise self._error("gave an advantage that is not finite")
        return advantages

    def _error(self, how: str) -> PreconditionFailed:
        return PreconditionFailed(
            f"The advantage estimator {self.path} {how}.",
            reason=Reason.ESTIMATOR_FAILED,
            remedy="Correct that function: it returns one finite number for each reward. The "
            "group is dropped.",
        )


def load_estimator(path: str) -> Estimator | None:
    """Import the estimator at `path`; None for an empty path.

    Raise InvalidConfig (ESTIMATOR_NOT_FOUND) where there is no such function.
    """
    if not path:
        return None
    function = load_function(path, what="advantage estimator", reason=Reason.ESTIMATOR_NOT_FOUND)
    return Estimator(path=path, function=function)
