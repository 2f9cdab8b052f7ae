"""Rows and reward functions in TRL's form, unchanged.

    [environment]
    use = "trl"
    options = {dataset = "train.parquet", reward_funcs = ["my_rewards.py:is_right", "mine:short"]}

A row has `prompt`, a text or chat messages, and any other columns. A function is
`f(prompts, completions, **columns)`, sync or async, and returns a list of numbers. It is called for
one completion at a time, with the columns that it takes. None in the list says that it does not
apply to the row; NaN is a failure.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dialoop.environments.rewards.functions import RewardCallable
from dialoop.environments.tasks.files import wrong_value
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.tasks.stored_tasks import (
    RowTask,
    function_name,
    load_reward,
    number_of,
    read_prompt,
    require_arguments,
    row_environment,
    row_of,
    sampled_text,
)
from dialoop.trajectory import Reward
from dialoop.user_functions import call

if TYPE_CHECKING:
    from collections.abc import Callable

    from dialoop.environments.chat_env import ChatEnv
    from dialoop.environments.episode import Episode
    from dialoop.environments.tasks.files import Row

_FORM = "def reward(prompts, completions, **kwargs), and return a list of numbers"
_NOT_GIVEN = {
    "completion_ids": "an environment reads messages and no token ids; a function in "
    "[[scorer.rewards]] gets whole trajectories with theirs",
    "trainer_state": "rewards are computed apart from the trainer",
    "environments": "there are no environments of TRL here; write a ChatEnv",
    "log_extra": "there is no table of completions here; `log_metric` is given",
}
"""What TRL passes besides the columns and Dialoop cannot, with the reason."""

_GIVEN = "a reward function gets what the policy was asked and answered under that name"
NO_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "prompts": _GIVEN,
        "completions": _GIVEN,
        "log_metric": "a reward function gets a function under that name",
        "completion": "the policy writes the answers, and none of the data set is trained",
        **dict.fromkeys(("image", "images"), "a prompt is messages of text, and would lack it"),
        **dict.fromkeys(_NOT_GIVEN, "TRL gives something else under that name"),
    }
)
"""Columns that no row may have, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlReward:
    """One of TRL's reward functions. What it gives `log_metric` is recorded with weight 0."""

    function: Callable[..., Any]
    use: str
    weight: float = 1.0

    @property
    def name(self) -> str:
        """Return the function's name."""
        return function_name(self.function)

    async def __call__(self, episode: Episode) -> tuple[Reward, ...]:
        """Call the function with one prompt and its completion."""
        metrics: dict[str, float] = {}
        arguments = self._arguments(row_of(episode), sampled_text(episode.answer), metrics)
        values = await call(partial(self.function, **arguments))
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise TypeError(
                f"it returned {values!r:.60} (a {type(values).__name__}), not a list with a number "
                "for each completion"
            )
        values = list(values)
        if len(values) != 1:
            raise ValueError(f"it returned {len(values)} rewards for 1 completion")
        (value,) = values
        recorded = tuple(Reward(name=n, value=v, weight=0.0) for n, v in metrics.items())
        if value is None:
            none = Reward(name=self.name, value=0.0, weight=self.weight, absent=True)
            return (none, *recorded)
        return (Reward(name=self.name, value=number_of(value), weight=self.weight), *recorded)

    def takes(self, column: str) -> bool:
        """Return whether the function has a parameter for a column, or takes any."""
        parameters = _parameters(self.function)
        return column in parameters or any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )

    def require_form(self, task: RowTask) -> None:
        """Raise InvalidConfig for what the function needs and neither the row nor Dialoop has."""
        arguments = self._arguments(task, "", {})
        for name, parameter in _parameters(self.function).items():
            is_needed = parameter.default is parameter.empty and parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            )
            if is_needed and name in _NOT_GIVEN and name not in arguments:
                raise InvalidConfig(
                    f"The reward function '{self.use}' needs {name}, which Dialoop does not give: "
                    f"{_NOT_GIVEN[name]}.",
                    reason=Reason.REWARD_FORM,
                    remedy=f"Give {name} a default, or leave the function out.",
                )
        require_arguments(self.function, self.use, arguments, _FORM)

    def _arguments(self, task: RowTask, text: str, metrics: dict[str, float]) -> dict[str, Any]:
        prompt = deepcopy(task.row["prompt"])
        is_text = isinstance(prompt, str)
        completion: Any = text if is_text else [{"role": "assistant", "content": text}]
        # Copied, since functions may change what they get.
        row = deepcopy({k: v for k, v in task.row.items() if k != "prompt" and self.takes(k)})
        columns = {name: [value] for name, value in row.items()}
        arguments: dict[str, Any] = {"prompts": [prompt], "completions": [completion], **columns}
        if self.takes("log_metric"):

            def log_metric(name: str, value: float) -> None:
                metrics[str(name)] = float(value)

            arguments["log_metric"] = log_metric
        return arguments


def trl(  # noqa: PLR0913 - the options are the interface
    *,
    dataset: str | Sequence[str],
    reward_funcs: str | Sequence[str],
    reward_weights: Sequence[float] | None = None,
    eval_dataset: str | Sequence[str] | None = None,
    heldout_fraction: float = 0.0,
    reward_timeout_s: float = 30.0,
    ignore_columns: Sequence[str] = (),
    split: str = "train",
    heldout_split: str = "test",
    name: str = "trl",
) -> ChatEnv:
    """Return the environment of TRL's rows: Parquet or JSON lines files, or saved data sets.

    reward_funcs: each `module:function` or `file.py:function`; reward_weights: a factor for each.
    A prompt that is a text becomes the user's message, and the functions get it as a text. A column
    that no function takes is refused, unless it is one of ignore_columns.
    """

    def read(row: Row, key: str) -> RowTask:
        prompt = row.get("prompt")
        if isinstance(prompt, str) and prompt:
            return RowTask(key=key, question=prompt, row=row)
        if not isinstance(prompt, (list, tuple)):
            raise wrong_value("prompt", prompt, "a text or a list of messages")
        return RowTask(key=key, messages=read_prompt(row, "prompt"), row=row)

    return row_environment(
        name,
        read=read,
        columns=("prompt",),
        causes=NO_COLUMNS,
        ignore_columns=ignore_columns,
        files=dataset,
        heldout_files=eval_dataset,
        heldout_fraction=heldout_fraction,
        split=split,
        heldout_split=heldout_split,
        rewards=trl_rewards(reward_funcs, reward_weights),
        reward_timeout_s=reward_timeout_s,
    )


def trl_rewards(
    reward_funcs: str | Sequence[str], reward_weights: Sequence[float] | None = None
) -> list[RewardCallable]:
    """Return TRL's functions, named by their import paths, as rewards of a row."""
    uses = [reward_funcs] if isinstance(reward_funcs, str) else list(reward_funcs)
    weights = [1.0] * len(uses) if reward_weights is None else list(reward_weights)
    if len(weights) != len(uses):
        raise InvalidConfig(
            f"reward_weights has {len(weights)} numbers and reward_funcs {len(uses)} functions.",
            reason=Reason.BAD_OPTIONS,
            remedy="Give a weight for each function, or leave reward_weights out.",
        )
    model = next((use for use in uses if ":" not in use), None)
    if model is not None:
        raise InvalidConfig(
            f"reward_funcs names '{model}', which is no function; TRL loads a reward model of that "
            "name.",
            reason=Reason.REWARD_FORM,
            remedy="Name functions as module:function or file.py:function.",
        )
    return [
        TrlReward(function=load_reward(use), use=use, weight=float(weight))
        for use, weight in zip(uses, weights, strict=True)
    ]


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
