"""The chat environment: a blank canvas that transforms extend.

    environment = ChatEnv(name="echo", tasks=tasks, transforms=(MaxTurns(2), Rewards([brevity])))
    opening = environment.reset(environment.tasks.get("train", "1"), seed=0)
    outcome = await environment.step(opening.episode, opening.history.respond(message))

Alone it gives no reward and never ends an episode: the next prompt is the previous full.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from dialoop.chat import ChatHistory, History, Message
from dialoop.environments.episode import Episode, Opening, Outcome, Score, TaskData
from dialoop.environments.failures import failure_of
from dialoop.environments.tasks import TaskSource
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import (
    InvalidConfig,
    InvalidHistory,
    InvalidInput,
    PreconditionFailed,
    Unsupported,
)
from dialoop.trajectory import Failure, Owner, Trajectory, Turn

Demonstrate = Callable[[TaskData, random.Random], tuple[Message, ...]]


class Demonstrations(Protocol):
    """Whole conversations to learn from before any reward: what supervised training reads."""

    def demonstration(self, task: TaskData, rng: random.Random) -> History:
        """A conversation that solves the task, from the prompt to the last answer."""
        ...


class Environment(Protocol):
    """What the environment service serves; ChatEnv is the one to start from."""

    @property
    def name(self) -> str:
        """What tasks and sessions call it."""
        ...

    @property
    def version(self) -> str:
        """Recorded with every trajectory; change it when the same answer may get another reward."""
        ...

    @property
    def description(self) -> str:
        """One sentence for people."""
        ...

    @property
    def tasks(self) -> TaskSource:
        """Where its tasks come from."""
        ...

    @property
    def traits(self) -> Traits:
        """Limits, stop strings, tools and reward names."""
        ...

    def reset(self, task: TaskData, seed: int) -> Opening:
        """Start an episode; must be quick."""
        ...

    async def step(self, episode: Episode, answered: ChatHistory) -> Outcome:
        """Answer a policy; raises only for a bad `answered`, and then nothing has happened."""
        ...

    async def score(self, task: TaskData, trajectory: Trajectory) -> tuple[Score, ...]:
        """The rewards of a finished trajectory, one score per turn."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEnv:
    """Configuration of a chat environment; it holds no episode and can serve any number."""

    name: str
    tasks: TaskSource
    version: str = "1"
    description: str = ""
    transforms: tuple[Transform, ...] = ()
    system_prompt: str = ""
    system_role: str = "system"
    user_role: str = "user"
    policy_role: str = "assistant"
    # Further strings that end the policy's message, beside those of the transforms.
    stop: tuple[str, ...] = ()
    # Accept a `full` that does not begin with the prompt (the trajectory then forks).
    allow_rewrite: bool = False
    demonstrate: Demonstrate | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidConfig("An environment has no name.", remedy="Give it one.")
        others = (self.system_role, self.user_role, *self.traits.roles)
        if self.policy_role in others:
            raise InvalidConfig(
                f"Environment {self.name} uses role {self.policy_role} for the policy and others.",
                remedy="Who wrote a message must show in its role: choose another.",
            )

    @property
    def traits(self) -> Traits:
        """The traits of all transforms together."""
        traits = Traits(stop=self.stop)
        for transform in self.transforms:
            traits = traits.joined(transform.traits)
        return traits

    @property
    def max_turns(self) -> int:
        """After how many turns an episode is cut off; 0 is never."""
        return self.traits.max_turns

    def reset(self, task: TaskData, seed: int) -> Opening:
        """Start an episode: the system prompt if there is one, then the question."""
        if not task.question:
            raise InvalidInput(
                f"Task {task.key} of {self.name} has no question.",
                reason="TASK_EMPTY",
                remedy="Give the task a question.",
            )
        messages = [Message(role=self.user_role, content=task.question)]
        if self.system_prompt:
            messages.insert(0, Message(role=self.system_role, content=self.system_prompt))
        opening = Opening(episode=Episode(task=task, seed=seed, history=History(tuple(messages))))
        for transform in self.transforms:
            opening = transform.reset(opening)
        return opening

    async def step(self, episode: Episode, answered: ChatHistory) -> Outcome:
        """Take the policy's response in, let each transform answer it, then ask for rewards."""
        if episode.done:
            raise PreconditionFailed(
                "The episode is over.", reason="EPISODE_DONE", remedy="Reset to start another."
            )
        outcome = await self._transformed(self._taken_in(episode, answered))
        if not outcome.is_scorable:
            return outcome
        return outcome.with_score(await self._score(outcome.episode))

    async def score(self, task: TaskData, trajectory: Trajectory) -> tuple[Score, ...]:
        """The rewards of a finished trajectory; `Episode.state` is empty here."""
        if not (trajectory.terminated or trajectory.truncated):
            raise InvalidInput(
                f"Trajectory {trajectory.trajectory_id} is not finished.",
                reason="TRAJECTORY_NOT_DONE",
                remedy="Score a trajectory that was terminated or truncated.",
            )
        return tuple([await self._score(e) for e in self._episodes(task, trajectory)])

    def demonstration(self, task: TaskData, rng: random.Random) -> History:
        """A conversation that solves the task; Unsupported when the environment has none."""
        if self.demonstrate is None:
            raise Unsupported(
                f"Environment {self.name} has no demonstrations.",
                remedy="Give ChatEnv a `demonstrate` function, or start from a trained model.",
            )
        return self.reset(task, 0).episode.history.extend(self.demonstrate(task, rng))

    def _taken_in(self, episode: Episode, answered: ChatHistory) -> Outcome:
        completed = self._completed(episode.history, answered)
        response = completed.response or History()
        answers = [m for m in response if m.role == self.policy_role]
        if not answers:
            raise InvalidHistory(
                f"The response has no message of role {self.policy_role}.",
                reason="RESPONSE_MISSING",
                remedy="Append the policy's message to the prompt.",
            )
        after = replace(
            episode,
            history=completed.require_full(),
            step_index=episode.step_index + 1,
            answer=answers[-1],
        )
        return Outcome(episode=after, response=response)

    def _completed(self, prompt: History, answered: ChatHistory) -> ChatHistory:
        if self.allow_rewrite and answered.full and not answered.full.starts_with(prompt):
            response = answered.response or answered.full[-1:]
            before = answered.full[: len(answered.full) - len(response)]
            return ChatHistory(prompt=before, response=response, full=answered.full)
        if answered.full is None and answered.prompt not in (None, prompt):
            raise PreconditionFailed(
                "prompt is not the one this episode stands at.",
                reason="HISTORY_REWRITTEN",
                remedy="Send the prompt unchanged, or response alone.",
            )
        return answered.completed_from(prompt)

    async def _transformed(self, outcome: Outcome) -> Outcome:
        for transform in self.transforms:
            try:
                outcome = await transform.step(outcome)
            except Exception as error:
                return outcome.fail(_failure_of(error, transform))
        return outcome

    async def _score(self, episode: Episode) -> Score:
        score = Score()
        for transform in self.transforms:
            try:
                given = await transform.score(episode)
            except Exception as error:
                given = Score(failures=(_failure_of(error, transform, Owner.REWARD),))
            score = Score(
                rewards=score.rewards + given.rewards, failures=score.failures + given.failures
            )
        return score

    def _episodes(self, task: TaskData, trajectory: Trajectory) -> list[Episode]:
        episodes = [
            Episode(
                task=task,
                seed=trajectory.seed,
                history=trajectory.history[: turn.message_start + turn.num_messages],
                step_index=index + 1,
                answer=self._answer_of(trajectory, turn),
            )
            for index, turn in enumerate(trajectory.turns)
        ]
        if episodes:
            episodes[-1] = replace(
                episodes[-1],
                terminated=trajectory.terminated,
                truncated=trajectory.truncated,
                done_reason=trajectory.done_reason,
            )
        return episodes

    def _answer_of(self, trajectory: Trajectory, turn: Turn) -> Message:
        end = turn.message_start + turn.num_messages
        messages = trajectory.history[turn.message_start : end]
        answers = [m for m in messages if m.role == self.policy_role]
        if not answers or end > len(trajectory.history):
            raise InvalidInput(
                f"A turn of trajectory {trajectory.trajectory_id} spans messages "
                f"{turn.message_start} to {end}, with no answer of the policy in the history.",
                reason="INVALID_TURN",
                remedy="Each turn covers one response and the messages that follow it.",
            )
        return answers[-1]


def _failure_of(
    error: Exception, transform: Transform, owner: Owner = Owner.ENVIRONMENT
) -> Failure:
    what = f"Transform {type(transform).__name__}"
    return failure_of(error, owner=owner, reason="TRANSFORM_FAILED", what=what)
