"""Measure both sides of the race of the real model alike: one clock, one reward, one sampler.

The reward is the environment's own, so TRL's side is rewarded by the code that rewards ours. TRL's
Python imports this module too; nothing here needs TRL.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from dialoop.chat import Message
from dialoop.environments.episode import TaskData
from dialoop.tasks.instructions import instructions
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


class TrainingClock:
    """Counts the seconds of training, and keeps them in a file, so that a stop does not end it.

    `reach` writes what a train step took until then. A clock that is made again at a checkpoint's
    step goes on with the seconds of that step: what was trained after it is trained once more.
    """

    def __init__(
        self, path: Path, *, train_step: int = 0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._now = path, now
        rows = json.loads(path.read_text("utf-8")) if path.is_file() and train_step else []
        self.seconds = {row["train_step"]: row["wall_s"] for row in rows}
        self.seconds = {step: s for step, s in self.seconds.items() if step <= train_step}
        self._before = self.seconds[train_step] if train_step else 0.0
        self._since: float | None = None

    def go_on(self) -> None:
        """Count from now on."""
        self._since = self._now()

    def reach(self, train_step: int) -> None:
        """Stop at the end of a train step, and write the seconds until then."""
        if self._since is None:
            raise RuntimeError(f"Train step {train_step} ended while the clock stood still.")
        self._before += self._now() - self._since
        self._since = None
        self.seconds[train_step] = self._before
        rows = [{"train_step": step, "wall_s": s} for step, s in self.seconds.items()]
        write_json(self._path, rows)


def write_json(path: Path, content: Any) -> None:
    """Write a file that is there whole or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)


def live_seconds(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return the seconds of training until the policy of each train step was live, of our metrics.

    The clock begins when a policy is live, for from then on episodes are played. After a restore
    it begins again with the checkpoint's policy, and with the seconds until that one. Where a stop
    came before that policy was live, its train steps count as long as the earlier ones.
    """
    seconds, since = {0: 0.0}, None
    for row in rows:
        if row["kind"] == "restore":
            at = row["train_step"]
            seconds = {step: s for step, s in seconds.items() if step <= at}
            newest = max(seconds)
            seconds.setdefault(at, seconds[newest] * at / max(1, newest))
            since = None
        elif row["kind"] == "publish":
            if since is None:
                since = row["time"] - seconds[row["train_step"]]
            seconds[row["train_step"]] = row["time"] - since
    return seconds


class InstructionReward:
    """The reward of the environment `instructions` for answers to its tasks, of any sampler."""

    def __init__(self) -> None:
        self._environment, self._runner = instructions(), asyncio.Runner()

    def tasks(self, split: str) -> list[TaskData]:
        """Return the tasks of a split, in their order."""
        source = self._environment.tasks
        return [source.get(split, key) for key in source.keys(split)]

    def __call__(self, tasks: Sequence[TaskData], answers: Sequence[str]) -> list[float]:
        """Return the reward of each answer; one that was cut off counts like any other."""
        return self._runner.run(self._rewards(tasks, answers))

    async def _rewards(self, tasks: Sequence[TaskData], answers: Sequence[str]) -> list[float]:
        pairs = zip(tasks, answers, strict=True)
        return list(await asyncio.gather(*(self._reward(*pair) for pair in pairs)))

    async def _reward(self, task: TaskData, answer: str) -> float:
        opening = self._environment.reset(task, seed=0)
        answered = opening.history.respond(Message(role="assistant", content=answer))
        outcome = await self._environment.step(opening.episode, answered)
        if outcome.failures:
            raise RuntimeError(f"An answer has no reward: {outcome.failures[0]}")
        return sum(reward.weight * reward.value for reward in outcome.rewards)

    def close(self) -> None:
        """End the processes that check answers."""
        self._runner.run(self._environment.release())
        self._runner.close()


def sampled_score(model: Path, weights: Path, *, max_new_tokens: int, num_tasks: int) -> float:
    """Return the mean reward of one answer to each held-out task, sampled at temperature 1.

    Both sides' weights are read into the same model in float32, and every policy is sampled with
    the same seed.
    """
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    policy.load_state_dict(load_file(weights), strict=False)
    policy.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    reward = InstructionReward()
    tasks = reward.tasks("heldout")[:num_tasks]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": task.question}], add_generation_prompt=True, tokenize=False
        )
        for task in tasks
    ]
    prompts = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    torch.manual_seed(0)
    with torch.inference_mode():
        rows = policy.generate(
            **prompts, max_new_tokens=max_new_tokens, do_sample=True, temperature=1.0, top_k=0
        )
    sampled = rows[:, prompts["input_ids"].shape[1] :]
    answers = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    rewards = reward(tasks, answers)
    reward.close()
    return sum(rewards) / len(rewards)
