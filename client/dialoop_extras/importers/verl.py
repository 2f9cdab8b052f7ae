"""Rows and reward functions in verl's form, unchanged.

    [environment]
    use = "verl"
    options = {train_files = "train.parquet", compute_score = "my_rewards.py:compute_score"}

A row has `data_source`, `prompt` (chat messages), `reward_model` with its `ground_truth`, and
perhaps `ability` and `extra_info`. The function is `compute_score(data_source, solution_str,
ground_truth, extra_info)`, sync or async, and returns a number or a dict with it as "score".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from dialoop.environments.tasks.files import wrong_value
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

_NO_COLUMNS = {
    **dict.fromkeys(("images", "videos"), "a prompt is messages of text, and would lack them"),
    "agent_name": "a row is answered in one turn, by the policy itself",
    "tools_kwargs": "a row is answered in one turn, without tools",
    "raw_prompt_ids": "the policy reads the messages of the prompt",
}
"""Columns of verl's that no row may have, with the reason."""

_FORM = "def compute_score(data_source, solution_str, ground_truth, extra_info=None)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeScore:
    """A `compute_score` as a reward. Numbers beside a dict's "score" are recorded with weight 0."""

    function: Callable[..., Any]
    use: str
    reward_fn_key: str = "data_source"
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the function's name."""
        return function_name(self.function)

    async def __call__(self, episode: Episode) -> tuple[Reward, ...]:
        """Call the function, and return its score first."""
        arguments = self._arguments(row_of(episode), sampled_text(episode.answer))
        return self._rewards(await call(partial(self.function, **arguments)))

    def require_form(self, task: RowTask) -> None:
        """Raise InvalidConfig where the function does not take verl's four arguments."""
        require_arguments(self.function, self.use, self._arguments(task, ""), _FORM)

    def _arguments(self, task: RowTask, text: str) -> dict[str, Any]:
        row = task.row
        # Copied, since functions may change what they get. verl adds the same two entries: a turn
        # of the user and one of the policy, and the rewards that tools gave meanwhile.
        extra_info = {**deepcopy(dict(row.get("extra_info") or {}))}
        extra_info |= {"num_turns": 2, "rollout_reward_scores": {}}
        return {
            "data_source": row[self.reward_fn_key],
            "solution_str": text,
            "ground_truth": deepcopy(row["reward_model"]["ground_truth"]),
            "extra_info": extra_info,
            **self.reward_kwargs,
        }

    def _rewards(self, result: Any) -> tuple[Reward, ...]:
        if not isinstance(result, Mapping):
            success = result if isinstance(result, bool) else None
            return (Reward(name=self.name, value=number_of(result), success=success),)
        if "score" not in result:
            names = ", ".join(map(str, result))
            raise TypeError(f"it returned a dict without 'score', with {names or 'nothing'}")
        accuracy = result.get("acc")
        success = bool(accuracy) if isinstance(accuracy, (bool, int)) else None
        score = Reward(name=self.name, value=number_of(result["score"]), success=success)
        others = (
            Reward(name=str(name), value=float(value), weight=0.0)
            for name, value in result.items()
            if name != "score" and isinstance(value, (bool, int, float))
        )
        return (score, *others)


def verl(  # noqa: PLR0913 - the options are the interface
    *,
    train_files: str | Sequence[str],
    compute_score: str,
    val_files: str | Sequence[str] | None = None,
    heldout_fraction: float = 0.0,
    prompt_key: str = "prompt",
    reward_fn_key: str = "data_source",
    reward_kwargs: Mapping[str, Any] | None = None,
    reward_timeout_s: float = 30.0,
    ignore_columns: Sequence[str] = (),
    split: str = "train",
    heldout_split: str = "test",
    name: str = "verl",
) -> ChatEnv:
    """Return the environment of verl's rows: Parquet or JSON lines files, or saved data sets.

    compute_score: `module:function` or `file.py:function`. reward_kwargs: further arguments of it.
    A column that verl's rows do not have is refused, unless it is one of ignore_columns.
    """

    def read(row: Row, key: str) -> RowTask:
        prompt = read_prompt(row, prompt_key)
        if not isinstance(row.get(reward_fn_key), str):
            raise wrong_value(reward_fn_key, row.get(reward_fn_key), "a text")
        reward_model = row.get("reward_model")
        if not isinstance(reward_model, Mapping):
            raise wrong_value("reward_model", reward_model, 'a struct, as {"ground_truth": "72"}')
        if reward_model.get("style") == "model":
            raise wrong_value("reward_model.style", "model", "rows that compute_score rewards")
        if reward_model.get("ground_truth") is None:
            raise wrong_value("reward_model.ground_truth", None, "what the answer is compared with")
        _require_extra_info(row.get("extra_info"), ignore_columns)
        return RowTask(key=key, messages=prompt, row=row)

    score = ComputeScore(
        function=load_reward(compute_score),
        use=compute_score,
        reward_fn_key=reward_fn_key,
        reward_kwargs=dict(reward_kwargs or {}),
    )
    return row_environment(
        name,
        read=read,
        columns=(prompt_key, reward_fn_key, "reward_model"),
        known=("ability", "extra_info"),
        causes=_NO_COLUMNS,
        ignore_columns=ignore_columns,
        files=train_files,
        heldout_files=val_files,
        heldout_fraction=heldout_fraction,
        split=split,
        heldout_split=heldout_split,
        rewards=[score],
        reward_timeout_s=reward_timeout_s,
    )


def _require_extra_info(value: Any, ignore_columns: Sequence[str]) -> None:
    """Raise InvalidInput for what is no struct, or wants tools or a user beside the policy."""
    if not isinstance(value, (Mapping, type(None))):
        raise wrong_value("extra_info", value, "a struct, or leave the column out")
    for name in ("tools_kwargs", "interaction_kwargs"):
        given, column = (value or {}).get(name), f"extra_info.{name}"
        if given and column not in ignore_columns:
            wanted = "rows that are answered in one turn, without tools and without a user"
            raise wrong_value(column, given, wanted)
