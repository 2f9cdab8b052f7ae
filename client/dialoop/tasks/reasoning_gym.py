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

_MOST_ROUNDS = 100


class GymTasks(ListedTasks):
    """A procedural data set, of which "train" has no question that "heldout" has.

    The package makes item i of the seed s from the number s + i, so the splits have numbers of
    their own. A question of "train" that came up in "heldout" by chance is replaced by that of the
    same key in another round, whose numbers come after.
    """

    def __init__(
        self, task: str, *, num_tasks: int, num_heldout: int, seed: int, options: Mapping[str, Any]
    ) -> None:
        self._sizes = {"train": num_tasks, "heldout": num_heldout}
        super().__init__({split: [str(i) for i in range(n)] for split, n in self._sizes.items()})
        self._task, self._seed, self._options = task, seed, options
        self._datasets: dict[tuple[str, int], Any] = {}
        for split in self._sizes:
            self.dataset(split)

    def dataset(self, split: str, round_number: int = 0) -> Any:
        """Return the package's data set of a split in a round; InvalidConfig where it has none."""
        if (split, round_number) not in self._datasets:
            first, size = self._seed, self._sizes[split]
            if split == "train":
                first += self._sizes["heldout"] + round_number * size
            try:
                self._datasets[split, round_number] = _package().create_dataset(
                    self._task, size=size, seed=first, **dict(self._options)
                )
            except (ValueError, TypeError, AssertionError, KeyError) as error:
                raise InvalidConfig(
                    f"reasoning-gym cannot make the task {self._task!r} from these options "
                    f"({type(error).__name__}).",
                    reason=Reason.TASK_NOT_FOUND,
                    remedy="See reasoning_gym.factory.DATASETS for names and their options.",
                ) from error
        return self._datasets[split, round_number]

    def task(self, split: str, key: str) -> TaskData:
        """Return the item as a task, with the scorer's data as metadata."""
        round_number, item = self._item(split, int(key))
        metadata = {
            "split": split,
            "round": str(round_number),
            "item": json.dumps(item.get("metadata", {}), default=str),
        }
        answer = "" if item["answer"] is None else str(item["answer"])
        return TaskData(key=key, question=item["question"], answer=answer, metadata=metadata)

    @cached_property
    def _heldout_questions(self) -> frozenset[str]:
        dataset = self.dataset("heldout")
        return frozenset(dataset[index]["question"] for index in range(self._sizes["heldout"]))

    def _item(self, split: str, index: int) -> tuple[int, Any]:
        if split == "heldout":
            return 0, self.dataset(split)[index]
        for round_number in range(_MOST_ROUNDS):
            item = self.dataset(split, round_number)[index]
            if item["question"] not in self._heldout_questions:
                return round_number, item
        raise InvalidConfig(
            f"The task {self._task!r} has hardly a question that its held-out tasks do not have.",
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
        dataset = self.tasks.dataset(task.metadata["split"], int(task.metadata["round"]))
        text = episode.answer_text
        answer = tag_text(text, "answer") if self.in_blocks else text.strip()
        value = float(dataset.score_answer(answer=answer, entry=dataset[int(task.key)]))
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
        redo="safe",
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
