"""Environments of rows on disk, whose reward functions other libraries call with a row.

    tasks = StoredTasks(joined_rows(["train.parquet"]), read_verl_row, heldout_fraction=0.1)
    tasks.get("train", "7").row["data_source"]

A task carries its row as it was read. The policy and callers never see it; reward functions do.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from dialoop.chat import History, Message
from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import EndWhenIncomplete, OneTurn
from dialoop.environments.environment import Demonstrate
from dialoop.environments.episode import Episode, TaskData
from dialoop.environments.rewards.functions import RewardCallable, Rewards
from dialoop.environments.tasks.files import (
    Row,
    StoredRows,
    different_keys,
    half_in,
    joined_rows,
    require_columns,
    splits_of,
    wrong_value,
)
from dialoop.environments.tasks.source import TaskSource
from dialoop.environments.tasks.stored import ReadRow, StoredTasks
from dialoop.errors import DialoopError, InvalidConfig, InvalidInput
from dialoop.import_paths import load_attribute
from dialoop.messages import PLACEHOLDER_ROLE
from dialoop.reasons import Reason
from dialoop.user_functions import name_of

_ASK = ("system", "developer", "user")
_CALL_FIELDS = frozenset({"id", "type", "index", "function", "name", "arguments"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTask(TaskData):
    """A task with the row that it was read from, every column with its own type."""

    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowRewards(Rewards):
    """Rewards by functions of rows. Before a job starts, every row is read and each is tried.

    A function of another library may have `use`, what the config calls it, and `require_form`,
    which raises InvalidConfig (REWARD_FORM) where it does not take the call that a row makes.
    """

    def rehearse(self, tasks: TaskSource) -> None:
        """Raise InvalidConfig for a malformed row, or a function that fails on the first one."""
        if isinstance(tasks, StoredTasks):
            tasks.require_rows()
        task = tasks.get("train", tasks.keys("train")[0])
        if not isinstance(task, RowTask):
            return
        for function in self.functions:
            if hasattr(function, "require_form"):
                function.require_form(task)
            self.try_out(function, task, task.messages or History())


def row_environment(  # noqa: PLR0913 - the options of the environments made of it
    name: str,
    *,
    read: ReadRow,
    columns: Iterable[str],
    known: Collection[str] = (),
    causes: Mapping[str, str],
    ignore_columns: Iterable[str],
    files: str | Sequence[str],
    heldout_files: str | Sequence[str] | None,
    heldout_fraction: float,
    split: str,
    heldout_split: str,
    rewards: Sequence[RewardCallable],
    reward_timeout_s: float,
    demonstrate: Demonstrate | None = None,
) -> ChatEnv:
    """Return an environment of one turn: the row's prompt, the policy's answer, its rewards.

    columns: those that each row needs; known: those of the format beside them; causes: those that
    are refused, each with why. Others have to be taken by a reward (`takes`) or be ignored. Raise
    InvalidConfig (BAD_ROW, UNKNOWN_COLUMN) for others, or where one is missing.
    """

    def read_rows(files: Sequence[str | Path], split: str) -> StoredRows:
        rows = joined_rows(files, split=split, ignore_columns=ignore_columns)
        require_columns(
            rows,
            needed=columns,
            known=known,
            is_wanted=lambda column: any(takes(column) for takes in takers),
            causes=causes,
        )
        return rows

    takers = [reward.takes for reward in rewards if hasattr(reward, "takes")]
    paths = [files] if isinstance(files, (str, Path)) else list(files)
    train = read_rows(paths, split)
    heldout = None
    if heldout_files:
        others = [heldout_files] if isinstance(heldout_files, (str, Path)) else list(heldout_files)
        heldout = read_rows(others, heldout_split)
    elif not heldout_fraction and len(paths) == 1 and Path(paths[0]).is_dir():
        has_heldout = heldout_split in splits_of(Path(paths[0]))
        heldout = read_rows(paths, heldout_split) if has_heldout else None
    return ChatEnv(
        name=name,
        description="Rows of a data set, each answered in one turn.",
        tasks=StoredTasks(train, read, heldout=heldout, heldout_fraction=heldout_fraction),
        transforms=(
            EndWhenIncomplete(),
            OneTurn(),
            RowRewards(tuple(rewards), timeout_s=reward_timeout_s),
        ),
        demonstrate=demonstrate,
    )


def read_prompt(row: Row, column: str) -> History:
    """Return a column of chat messages that ask something; InvalidInput (BAD_ROW) otherwise."""
    history = read_messages(row, column)
    empty = next((i for i, m in enumerate(history) if m.role in _ASK and not m.content), None)
    if empty is not None:
        raise InvalidInput(
            f"column {column!r}: message {empty} of role {history[empty].role} has no content.",
            reason=Reason.BAD_ROW,
            remedy="Give it a text, or leave the row out.",
        )
    return history


def read_messages(row: Row, column: str) -> History:
    """Return a column of chat messages; InvalidInput (BAD_ROW) names it where it is none.

    A field that is not known is refused, and so are arguments of a call that are no JSON object.
    """
    value = row.get(column)
    if not isinstance(value, (list, tuple)) or not value:
        raise wrong_value(column, value, 'a list of messages, as [{"role": "user", ...}]')
    chats = [_without_empty(item) if isinstance(item, Mapping) else item for item in value]
    try:
        history: History = History.from_chats(chats)
        if len(history) != len(chats):
            raise ValueError(f"a message has the role {PLACEHOLDER_ROLE}, which pads batches")
        for index, chat in enumerate(chats):
            for number, call in enumerate(chat.get("tool_calls") or ()):
                _require_call(call, f"messages[{index}].tool_calls[{number}]")
    except (DialoopError, TypeError, ValueError) as error:
        text = error.message if isinstance(error, DialoopError) else f"{error}."
        raise InvalidInput(
            f"column {column!r}: {text}",
            reason=Reason.BAD_ROW,
            remedy='Write messages as {"role": "user", "content": "..."}.',
        ) from error
    return history


def read_taught(row: Row, column: str) -> tuple[History, frozenset[int]]:
    """Return a column of chat messages, and which of the assistant's have "weight": 0."""
    value, weights = row.get(column), {}
    if isinstance(value, (list, tuple)):
        fields = {i: dict(item) for i, item in enumerate(value) if isinstance(item, Mapping)}
        weights = {i: found.pop("weight") for i, found in fields.items() if "weight" in found}
        row = {column: [fields.get(i, item) for i, item in enumerate(value)]}
    history = read_messages(row, column)
    for index, weight in weights.items():
        is_weight = weight in (0, 1) and not isinstance(weight, (bool, str))
        if weight is not None and (history[index].role != "assistant" or not is_weight):
            raise InvalidInput(
                f"{column}[{index}].weight is {weight!r:.20}.",
                reason=Reason.BAD_ROW,
                remedy="Give assistant messages weight 0 or 1, and others none.",
            )
    return history, frozenset(index for index, weight in weights.items() if weight == 0)


def _require_call(call: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a call of a row with a field that nothing reads, or other arguments."""
    function = call.get("function", call)
    for name, value in (*call.items(), *function.items()):
        if name not in _CALL_FIELDS and value is not None:
            raise ValueError(f"{where} has a field {name!r} that a call does not have")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return  # an object: none at all is no argument
    try:
        value = json.loads(arguments, object_pairs_hook=different_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}.function.arguments is {arguments!r:.60}: {error}") from error
    if not isinstance(value, dict) or half_in(value, ""):
        what = "half a character in it" if isinstance(value, dict) else "no JSON object"
        raise ValueError(f"{where}.function.arguments is {arguments!r:.60}, with {what}")


def row_of(episode: Episode) -> RowTask:
    """Return the episode's task with its row; InvalidInput where the caller brought a question."""
    if isinstance(episode.task, RowTask):
        return episode.task
    raise InvalidInput(
        "The question is the caller's own, so it has no row to reward it by.",
        reason=Reason.TASK_NOT_FOUND,
        remedy="Reset with the key of a task.",
    )


def sampled_text(message: Message | None) -> str:
    """Return the policy's answer with the reasoning that a parser cut off, as <think>."""
    if message is None:
        return ""
    if not message.reasoning:
        return message.text
    return f"<think>\n{message.reasoning}\n</think>\n\n{message.text}"


def load_reward(use: str) -> Callable[..., Any]:
    """Return the function at `module:function` or `file.py:function`; InvalidConfig otherwise."""
    function = load_attribute(use, what="reward function", reason=Reason.REWARD_NOT_FOUND)
    if not callable(function):
        raise InvalidConfig(
            f"The reward '{use}' is not a function.",
            reason=Reason.REWARD_FORM,
            remedy="Name a function, as rewards.py:compute_score.",
        )
    loaded: Callable[..., Any] = function
    return loaded


def require_arguments(
    function: Callable[..., Any], use: str, arguments: Mapping[str, Any], form: str
) -> None:
    """Raise InvalidConfig (REWARD_FORM) where the function does not take these arguments."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise InvalidConfig(
            f"The reward function '{use}' cannot be called with {', '.join(arguments)}: {error}.",
            reason=Reason.REWARD_FORM,
            remedy=f"Write it as {form}.",
        ) from error
    except ValueError:
        return  # a callable without a signature


def number_of(value: Any) -> float:
    """Return a number that a reward function returned; TypeError for anything that is none."""
    if isinstance(value, (str, bytes)) or not (
        isinstance(value, Real) or hasattr(value, "__float__")
    ):
        raise TypeError(f"it returned {value!r:.60} (a {type(value).__name__}), not a number")
    return float(value)


def function_name(function: Callable[..., Any]) -> str:
    """Return a function's name; of a partial, that of the function in it."""
    while isinstance(function, partial):
        function = function.func
    return name_of(function)


def _without_empty(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the fields that only other rows of the column have."""
    return {name: value for name, value in message.items() if value is not None}
