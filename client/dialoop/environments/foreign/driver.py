"""Environments that somebody else's library runs, as environments of ours.

ForeignEnvironment(name="echo", tasks=NumberedTasks(100), driver=driver)

A driver begins an episode elsewhere, takes the policy's text there, and ends it. Whatever it
raises is a failure of the environment; after one the episode takes no more steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dialoop.chat import ChatHistory, History, Message
from dialoop.environments.environment import Given
from dialoop.environments.episode import Episode, Opening, Outcome, Score, TaskData
from dialoop.environments.failures import failure_of
from dialoop.environments.modes import Answered, RewardShape
from dialoop.environments.tasks.source import NoTasks, TaskSource, task_not_found
from dialoop.environments.transform import Traits
from dialoop.errors import (
    DialoopError,
    InvalidHistory,
    InvalidInput,
    PreconditionFailed,
    Unavailable,
    Unsupported,
)
from dialoop.reasons import Reason
from dialoop.trajectory import DoneReason, Failure, Owner, Reward, Trajectory

_PLACE = "foreign"
_POLICY = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignReset:
    """An episode that began elsewhere: `place` is what the driver knows it by."""

    place: Any
    messages: tuple[Message, ...]
    info: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignStep:
    """What became of a move; `reward` None is no reward."""

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, str] = field(default_factory=dict)


class Driver(Protocol):
    """How to play elsewhere. One step at a time in a place, many places at a time."""

    async def begin(self, task: TaskData, seed: int) -> ForeignReset:
        """Begin an episode."""
        ...

    async def move(self, place: Any, history: History) -> ForeignStep:
        """Take the policy's last message; cancelled or failed, the place is not used again."""
        ...

    async def end(self, place: Any) -> None:
        """Give the place back."""
        ...


class NumberedTasks(TaskSource):
    """Tasks that are nothing but seeds: "train" 0, 1, ..., and "heldout" after them."""

    def __init__(self, num_tasks: int, num_heldout: int = 0) -> None:
        self._first = {"train": 0} | ({"heldout": num_tasks} if num_heldout else {})
        self._sizes = {"train": num_tasks, "heldout": num_heldout}

    @property
    def splits(self) -> tuple[str, ...]:
        """Train, and heldout if there are any."""
        return tuple(self._first)

    def keys(self, split: str) -> Sequence[str]:
        """Numbers from 0."""
        return [str(number) for number in range(self._sizes[self.require_split(split)])]

    def get(self, split: str, key: str) -> TaskData:
        """The task; its number is the seed."""
        split = self.require_split(split)
        if not key.isdecimal() or int(key) >= self._sizes[split]:
            raise task_not_found(split, key)
        return TaskData(key=key, metadata={"seed": str(self._first[split] + int(key))})


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignEnvironment:
    """An environment whose episodes a driver plays elsewhere; its steps need their session."""

    name: str
    driver: Driver
    tasks: TaskSource = field(default_factory=NoTasks)
    version: str = "1"
    description: str = ""
    system_prompt: str = ""
    # What the reward is called in trajectories.
    reward_name: str = "reward"
    # Cut episodes after so many turns; 0: whenever the other side ends them.
    max_turns: int = 0

    @property
    def traits(self) -> Traits:
        """Rewards of each turn; the rest only the other side knows."""
        return Traits(
            max_turns=self.max_turns,
            reward_names=(self.reward_name,),
            roles=("user", "system", "tool"),
            reward_shape=RewardShape.TURN,
            needs_messages=True,
            needs_session=True,
        )

    def reset(self, task: TaskData, seed: int) -> Opening:
        """Unsupported (OPENS_SLOWLY): an episode begins elsewhere, by `open`."""
        raise Unsupported(
            f"Episodes of environment {self.name} begin elsewhere.",
            reason=Reason.OPENS_SLOWLY,
            remedy="Play it through an environment service, or await `open`.",
        )

    async def open(self, task: TaskData, seed: int) -> Opening:
        """Begin an episode; Unavailable (ENVIRONMENT_UNAVAILABLE) where that fails."""
        try:
            begun = await self.driver.begin(task, int(task.metadata.get("seed", seed)))
        except DialoopError:
            raise
        except Exception as error:
            failure = self._failure(error, Reason.ENVIRONMENT_UNAVAILABLE)
            raise Unavailable(
                failure.message,
                reason=Reason.ENVIRONMENT_UNAVAILABLE,
                remedy="Try again; the service's log has the error_id.",
            ) from error
        messages = begun.messages
        if self.system_prompt and (not messages or messages[0].role != "system"):
            messages = (Message(role="system", content=self.system_prompt), *messages)
        episode = Episode(
            task=task, seed=seed, history=History(messages), state={_PLACE: begun.place}
        )
        return Opening(episode=episode, info=dict(begun.info))

    async def step(self, episode: Episode, answered: Answered) -> Outcome:
        """Let the driver move; raises for a bad `answered` only."""
        outcome = _taken_in(episode, answered, self.name)
        try:
            moved = await self.driver.move(episode.state[_PLACE], outcome.episode.history)
        except Exception as error:
            return outcome.fail(self._failure(error, Reason.ENVIRONMENT_FAILED))
        outcome = outcome.append(*moved.messages).tell(**moved.info)
        if moved.terminated:
            outcome = outcome.terminate(DoneReason.CONTENT)
        elif moved.truncated or outcome.episode.step_index == self.max_turns:
            outcome = outcome.truncate(DoneReason.MAX_TURNS)
        return outcome.with_score(self._score(moved.reward))

    async def score(self, task: TaskData, trajectory: Trajectory) -> tuple[Score, ...]:
        """Unsupported (NEEDS_SESSION): only who played the episode knows its rewards."""
        raise Unsupported(
            f"Environment {self.name} gives rewards while it is played, and not again.",
            reason=Reason.NEEDS_SESSION,
            remedy="Keep the rewards that the trajectory has.",
        )

    def task_from(self, given: Given) -> TaskData:
        """The caller's question as a task; what it brings besides goes along."""
        if given.messages is not None or not given.query:
            raise InvalidInput(
                f"Environment {self.name} takes a query.",
                reason=Reason.DATA_KEY_MISSING,
                remedy="Send query, or a task_key.",
            )
        return TaskData(key="query", question=given.query, metadata=dict(given.data))

    async def acquire(self) -> None:
        """Nothing is held for all episodes together."""

    async def release(self) -> None:
        """Nothing is held for all episodes together."""

    async def close(self, episode: Episode) -> None:
        """End the episode elsewhere."""
        await self.driver.end(episode.state[_PLACE])

    def problem(self) -> str:
        """Why episodes cannot begin at the moment, as far as the driver knows."""
        return str(getattr(self.driver, "problem", ""))

    def _failure(self, error: Exception, reason: Reason) -> Failure:
        what = f"Environment {self.name}"
        return failure_of(error, owner=Owner.ENVIRONMENT, reason=reason, what=what)

    def _score(self, value: float | None) -> Score:
        if value is None:
            return Score()
        if not math.isfinite(value):
            text = f"Environment {self.name} gave a reward that is not finite."
            failure = Failure(owner=Owner.REWARD, reason=Reason.VALUE_NOT_FINITE, message=text)
            return Score(failures=(failure,))
        return Score(rewards=(Reward(name=self.reward_name, value=value),))


def _taken_in(episode: Episode, answered: Answered, name: str) -> Outcome:
    """The policy's message added to the conversation; nothing has been asked elsewhere."""
    if episode.done:
        raise PreconditionFailed(
            "The episode is over.", reason=Reason.EPISODE_DONE, remedy="Reset to start another."
        )
    if not isinstance(answered, ChatHistory):
        raise InvalidHistory(
            f"Environment {name} reads messages.",
            reason=Reason.WRONG_MODE,
            remedy="Send the field `history`.",
        )
    completed = answered.completed_from(episode.history)
    response = completed.response or History()
    if [message.role for message in response] != [_POLICY]:
        raise InvalidHistory(
            f"The response is not one message of role {_POLICY}.",
            reason=Reason.RESPONSE_MISSING,
            remedy="Append the policy's message to the prompt.",
        )
    after = replace(
        episode,
        history=completed.require_full(),
        step_index=episode.step_index + 1,
        answer=response[0],
    )
    return Outcome(episode=after, response=response)
