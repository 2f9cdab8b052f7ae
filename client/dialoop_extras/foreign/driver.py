"""Environments that another library runs, as Dialoop environments.

ForeignEnvironment(name="echo", tasks=NumberedTasks(100), driver=driver)

A driver begins an episode elsewhere, passes the policy's text on, and ends it. An exception that it
raises is a failure of the environment and ends the episode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dialoop.chat import ChatHistory, History, Message
from dialoop.environments.environment import Given
from dialoop.environments.episode import Episode, Opening, Outcome, Score, TaskData
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
from dialoop.failures import failure_of
from dialoop.reasons import Reason
from dialoop.trajectory import DoneReason, Failure, Owner, Reward, Trajectory
from dialoop.user_functions import call

_PLACE = "foreign"
_POLICY = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignReset:
    """An episode that began elsewhere; `place` identifies it for the driver."""

    place: Any
    messages: tuple[Message, ...]
    info: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignStep:
    """The result of a move; `reward` is None for no reward."""

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, str] = field(default_factory=dict)


class Driver(Protocol):
    """Plays episodes elsewhere: one step at a time in a place, many places at a time."""

    async def begin(self, task: TaskData, seed: int) -> ForeignReset:
        """Begin an episode."""
        ...

    async def move(self, place: Any, history: History) -> ForeignStep:
        """Pass on the policy's last message; after an error or cancellation the place is unused."""
        ...

    async def end(self, place: Any) -> None:
        """End the episode and free the place."""
        ...


class NumberedTasks(TaskSource):
    """Tasks that are only seeds: "train" has 0, 1, ..., and "heldout" the numbers after them."""

    def __init__(self, num_tasks: int, num_heldout: int = 0) -> None:
        self._first = {"train": 0} | ({"heldout": num_tasks} if num_heldout else {})
        self._sizes = {"train": num_tasks, "heldout": num_heldout}

    @property
    def splits(self) -> tuple[str, ...]:
        """Return "train", and "heldout" if it has tasks."""
        return tuple(self._first)

    def keys(self, split: str) -> Sequence[str]:
        """Return numbers from 0."""
        return [str(number) for number in range(self._sizes[self.require_split(split)])]

    def get(self, split: str, key: str) -> TaskData:
        """Return the task of a number, which is its seed."""
        split = self.require_split(split)
        if not key.isdecimal() or int(key) >= self._sizes[split]:
            raise task_not_found(split, key)
        return TaskData(key=key, metadata={"seed": str(self._first[split] + int(key))})


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignEnvironment:
    """An environment whose episodes a driver plays elsewhere. Its steps need a session."""

    name: str
    driver: Driver
    tasks: TaskSource = field(default_factory=NoTasks)
    version: str = "1"
    description: str = ""
    system_prompt: str = ""
    # Name of the reward in trajectories.
    reward_name: str = "reward"
    # Number of turns after which episodes are truncated; 0 means no limit.
    max_turns: int = 0

    @property
    def traits(self) -> Traits:
        """Return that each turn has a reward and that steps need a session."""
        return Traits(
            max_turns=self.max_turns,
            reward_names=(self.reward_name,),
            roles=("user", "system", "tool"),
            reward_shape=RewardShape.TURN,
            needs_messages=True,
            needs_session=True,
        )

    def reset(self, task: TaskData, seed: int) -> Opening:
        """Raise Unsupported (OPENS_SLOWLY), since an episode begins with `open`."""
        raise Unsupported(
            f"Episodes of environment {self.name} begin elsewhere, which takes time.",
            reason=Reason.OPENS_SLOWLY,
            remedy="Play it through an environment service, or await `open`.",
        )

    async def open(self, task: TaskData, seed: int) -> Opening:
        """Begin an episode; raise Unavailable (ENVIRONMENT_UNAVAILABLE) when that fails."""
        try:
            seed_there = int(task.metadata.get("seed", seed))
            reset = await call(self.driver.begin, task, seed_there)
        except DialoopError:
            raise
        except Exception as error:
            failure = self._failure(error, Reason.ENVIRONMENT_UNAVAILABLE)
            raise Unavailable(
                failure.message,
                reason=Reason.ENVIRONMENT_UNAVAILABLE,
                remedy="Try again; the service's log has the error_id.",
            ) from error
        messages = reset.messages
        if self.system_prompt and (not messages or messages[0].role != "system"):
            messages = (Message(role="system", content=self.system_prompt), *messages)
        episode = Episode(
            task=task, seed=seed, history=History(messages), state={_PLACE: reset.place}
        )
        return Opening(episode=episode, info=dict(reset.info))

    async def step(self, episode: Episode, answered: Answered) -> Outcome:
        """Let the driver move; raise only for a bad `answered`."""
        outcome = _add_response(episode, answered, self.name)
        try:
            place, history = episode.state[_PLACE], outcome.episode.history
            move = await call(self.driver.move, place, history)
        except Exception as error:
            return outcome.fail(self._failure(error, Reason.ENVIRONMENT_FAILED))
        outcome = outcome.append(*move.messages).tell(**move.info)
        if move.terminated:
            outcome = outcome.terminate(DoneReason.CONTENT)
        elif move.truncated or outcome.episode.step_index == self.max_turns:
            outcome = outcome.truncate(DoneReason.MAX_TURNS)
        return outcome.with_score(self._score(move.reward))

    async def score(self, task: TaskData, trajectory: Trajectory) -> tuple[Score, ...]:
        """Raise Unsupported (NEEDS_SESSION), since only a running episode has rewards."""
        raise Unsupported(
            f"Environment {self.name} gives rewards only while an episode runs.",
            reason=Reason.NEEDS_SESSION,
            remedy="Keep the rewards that the trajectory has.",
        )

    def task_from(self, question: Given) -> TaskData:
        """Return the caller's query as a task, with its data as metadata."""
        if question.messages is not None or not question.query:
            raise InvalidInput(
                f"Environment {self.name} takes a query and no messages.",
                reason=Reason.DATA_KEY_MISSING,
                remedy="Send query, or a task_key.",
            )
        return TaskData(key="query", question=question.query, metadata=dict(question.data))

    async def acquire(self) -> None:
        """Do nothing: the episodes share no resource."""

    async def release(self) -> None:
        """Do nothing: the episodes share no resource."""

    async def close(self, episode: Episode) -> None:
        """End the episode elsewhere."""
        await call(self.driver.end, episode.state[_PLACE])

    def problem(self) -> str:
        """Return why episodes cannot begin at the moment, if the driver knows a reason."""
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


def _add_response(episode: Episode, answered: Answered, name: str) -> Outcome:
    """Add the policy's message to the conversation, without calling the driver."""
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
