"""Conversations in OpenAI's form, one {"messages": [...]} a row, unchanged.

    [environment]
    use = "messages"
    options = {path = "chats.jsonl", reward_funcs = "my_rewards.py:close_to_reference"}

The policy answers in place of each conversation's last assistant message. Reward functions have
TRL's form; the message that was there is their column `reference`. A warm start imitates it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dialoop.environments.episode import TaskData
from dialoop.environments.tasks.files import wrong_value
from dialoop.errors import InvalidInput
from dialoop.messages import Message
from dialoop.reasons import Reason
from dialoop.tasks.stored_tasks import RowTask, read_taught, row_environment

from dialoop_extras.importers.trl import NO_COLUMNS, trl_rewards

_NO_COLUMNS = {
    **NO_COLUMNS,
    "prompt": "a reward function gets the messages before the last one under that name",
    "reference": "a reward function gets the last message under that name",
    "tools": "the policy would not see them; tools are those of an environment (docs/tools.md)",
}

if TYPE_CHECKING:
    from dialoop.environments.chat_env import ChatEnv
    from dialoop.environments.tasks.files import Row


def messages(  # noqa: PLR0913 - the options are the interface
    *,
    path: str | Sequence[str],
    reward_funcs: str | Sequence[str] = (),
    reward_weights: Sequence[float] | None = None,
    heldout_path: str | Sequence[str] | None = None,
    heldout_fraction: float = 0.0,
    reward_timeout_s: float = 30.0,
    ignore_columns: Sequence[str] = (),
    split: str = "train",
    heldout_split: str = "test",
    name: str = "messages",
) -> ChatEnv:
    """Return the environment of conversations: JSON lines or Parquet files, or saved data sets.

    Without reward_funcs, rewards are those of [[scorer.rewards]]. A column that no function takes
    is refused, unless it is one of ignore_columns.
    """
    return row_environment(
        name,
        read=_read,
        columns=("messages",),
        causes=_NO_COLUMNS,
        ignore_columns=ignore_columns,
        files=path,
        heldout_files=heldout_path,
        heldout_fraction=heldout_fraction,
        split=split,
        heldout_split=heldout_split,
        rewards=trl_rewards(reward_funcs, reward_weights),
        reward_timeout_s=reward_timeout_s,
        demonstrate=_reference_of,
    )


def _read(row: Row, key: str) -> RowTask:
    history, untaught = read_taught(row, "messages")
    reference = ""
    if len(history) - 1 in untaught:
        raise wrong_value("messages[-1].weight", 0, "the answer that is wanted, with weight 1")
    if history[-1].role == "assistant":
        reference, history = history[-1].text, history[:-1]
    if not history:
        raise InvalidInput(
            "column 'messages' has nothing before the assistant's message.",
            reason=Reason.BAD_ROW,
            remedy="Let a user's message come first.",
        )
    prompt = [message.to_chat() for message in history]
    columns = {**row, "prompt": prompt, "reference": reference}
    return RowTask(key=key, messages=history, answer=reference, row=columns)


def _reference_of(task: TaskData, rng: random.Random) -> tuple[Message, ...]:
    if not task.answer:
        raise InvalidInput(
            f"Row {task.key} ends without an assistant's message, so it shows no answer.",
            reason=Reason.NO_DEMONSTRATIONS,
            remedy="Leave such rows out, or set warm_start.num_steps to 0.",
        )
    return (Message(role="assistant", content=task.answer),)
