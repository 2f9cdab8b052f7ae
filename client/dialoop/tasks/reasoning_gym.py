"""Any task of the reasoning-gym package as an environment: extra `dialoop[reasoning-gym]`.

use = "dialoop.tasks.reasoning_gym:reasoning_gym"
options = { task = "leg_counting", num_tasks = 1000 }
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import EndOnTag, EndWhenIncomplete, OneTurn
from dialoop.environments.episode import Episode, Score, TaskData
from dialoop.environments.tasks.source import ListedTasks
from dialoop.environments.tools.answer_tags import tag_text
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.trajectory import Reward

SYSTEM_PROMPT = "Solve the task. Give the answer alone between <answer> and </answer>."
PLAIN_PROMPT = "Solve the task. Give the answer alone, in as few words as possible."


_TRIES = 100


class GymTasks(ListedTasks):
    """A procedural data set, of which "train" has no question that "heldout" has.

    The package makes item i of the seed s from the number s + i, so the splits have numbers of
    their own. A question of "train" that came up in "heldout" by chance is replaced by a later one.
    """

    def __init__(
        self, task: str, *, num_tasks: int, num_heldout: int, seed: int, options: Mapping[str, Any]
    ) -> None:
        package = _package()
        datasets = {}
        sizes = {"heldout": num_heldout, "train": num_tasks}
        for split, first in (("heldout", seed), ("train", seed + num_heldout)):
            try:
                datasets[split] = package.create_dataset(
                    task, size=_TRIES * sizes[split], seed=first, **dict(options)
                )
            except (ValueError, TypeError, AssertionError, KeyError) as error:
                raise InvalidConfig(
                    f"reasoning-gym cannot make the task {task!r} from these options "
                    f"({type(error).__name__}).",
                    reason=Reason.TASK_NOT_FOUND,
                    remedy="See reasoning_gym.factory.DATASETS for names and their options.",
                ) from error
        super().__init__({split: [str(i) for i in range(size)] for split, size in sizes.items()})
        self.datasets = datasets
        self._sizes = sizes

    def task(self, split: str, key: str) -> TaskData:
        """Return the item as a task, with the scorer's data as metadata."""
        index, item = self._item(split, int(key))
        metadata = {"split": split, "item": json.dumps(item.get("metadata", {}), default=str)}
        metadata["index"] = str(index)
        answer = "" if item["answer"] is None else str(item["answer"])
        return TaskData(key=key, question=item["question"], answer=answer, metadata=metadata)

    @cached_property
    def _heldout(self) -> frozenset[str]:
        dataset = self.datasets["heldout"]
        return frozenset(dataset[index]["question"] for index in range(self._sizes["heldout"]))

    def _item(self, split: str, number: int) -> tuple[int, Any]:
        if split == "heldout":
            return number, self.datasets[split][number]
        for index in range(number, _TRIES * self._sizes[split], self._sizes[split]):
            item = self.datasets[split][index]
            if item["question"] not in self._heldout:
                return index, item
        raise InvalidConfig(
            "This task has hardly a question that its held-out tasks do not have.",
            reason=Reason.TASK_NOT_FOUND,
            remedy="Lower num_heldout, or choose options that make more questions.",
        )


@dataclass(frozen=True, slots=True)
class GymReward(Transform):
    """The package's own score of the answer block, from 0 to 1; else of the whole message."""

    tasks: GymTasks
    in_blocks: bool = True

    @property
    def traits(self) -> Traits:
        """Return the reward's name."""
        return Traits(reward_names=("reasoning_gym",))

    async def score(self, episode: Episode) -> Score:
        """Reward an episode that is over."""
        if not episode.done:
            return Score()
        task = episode.task
        dataset = self.tasks.datasets[task.metadata["split"]]
        text = episode.answer_text
        answer = tag_text(text, "answer") if self.in_blocks else text.strip()
        entry = dataset[int(task.metadata["index"])]
        value = float(dataset.score_answer(answer=answer, entry=entry))
        reward = Reward(name="reasoning_gym", value=value, success=value >= 1.0)
        return Score(rewards=(reward,))


def reasoning_gym(
    *,
    task: str,
    num_tasks: int = 1000,
    num_heldout: int = 100,
    seed: int = 0,
    system_prompt: str | None = None,
    in_blocks: bool = True,
    **options: Any,
) -> ChatEnv:
    """Return the environment of one reasoning-gym task; `options` are the task's own.

    in_blocks: the answer stands between <answer> and </answer>; else it is the whole message, which
    a small model can learn that never writes such a block.
    """
    if system_prompt is None:
        system_prompt = SYSTEM_PROMPT if in_blocks else PLAIN_PROMPT
    tasks = GymTasks(task, num_tasks=num_tasks, num_heldout=num_heldout, seed=seed, options=options)
    return ChatEnv(
        name=f"reasoning_gym_{task}",
        description=f"reasoning-gym's {task}.",
        tasks=tasks,
        transforms=(
            *((EndOnTag(),) if in_blocks else ()),
            EndWhenIncomplete(),
            OneTurn(),
            GymReward(tasks, in_blocks=in_blocks),
        ),
        system_prompt=system_prompt,
    )


def _package() -> Any:
    try:
        import reasoning_gym as package
    except ImportError as error:
        raise InvalidConfig(
            "The reasoning-gym package is not installed.",
            reason=Reason.PACKAGE_MISSING,
            remedy='Run: pip install "dialoop[reasoning-gym]"',
        ) from error
    return package
