"""Any `Game` as an environment, and the built-in twenty questions.

environment = game_environment(game, name="guess", tasks=tasks)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dialoop.chat import History, Message
from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import EndWhenIncomplete
from dialoop.environments.episode import Episode, Opening, Outcome, Score, TaskData
from dialoop.environments.modes import RewardShape
from dialoop.environments.tasks.source import TaskSource, task_not_found
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import Unsupported
from dialoop.reasons import Reason
from dialoop.trajectory import DoneReason, Reward
from dialoop.user_functions import call, call_now

from dialoop_extras.trials.twenty_questions import TwentyQuestions

if TYPE_CHECKING:
    from dialoop_extras.trials.game import Game

_STATE = "game"
_EARNED = "game_rewards"


@dataclass(frozen=True, slots=True)
class Play(Transform):
    """Open with the game's prompt, play each message of the policy, and give the game's rewards.

    The game begins with the task's metadata, its question and `solution` (the task's answer). The
    state of a game lies in its episode, so games share nothing.
    """

    game: Game[Any]

    @property
    def traits(self) -> Traits:
        """Return the game's length, and that a step needs its session."""
        return Traits(
            max_turns=self.game.max_steps,
            reward_names=(_STATE,),
            reward_shape=RewardShape.TURN,
            roles=("user",),
            needs_messages=True,
            needs_session=True,
        )

    def reset(self, opening: Opening) -> Opening:
        """Begin the game, and replace the question by its first prompt."""
        episode = opening.episode
        state = call_now(self.game.begin, inputs_of(episode.task), seed=episode.seed)
        kept = tuple(message for message in episode.history if message.role == "system")
        shown = Message(role="user", content=call_now(self.game.prompt, state, 0))
        episode = replace(episode, history=History((*kept, shown)))
        return replace(opening, episode=episode).remember(**{_STATE: state})

    async def step(self, outcome: Outcome) -> Outcome:
        """Play the policy's message, and add the game's next prompt."""
        episode = outcome.episode
        if episode.done:
            return outcome
        move = await call(self.game.play, episode.state[_STATE], episode.answer_text)
        earned = {**episode.state.get(_EARNED, {}), episode.step_index: float(move.reward)}
        outcome = outcome.remember(**{_STATE: move.state, _EARNED: earned}).tell(**move.info)
        if move.done:
            has_earned = sum(earned.values()) != 0
            return outcome.terminate(DoneReason.SUBMITTED if has_earned else DoneReason.CONTENT)
        if episode.step_index >= self.game.max_steps:
            return outcome.truncate(DoneReason.MAX_TURNS)
        prompt = await call(self.game.prompt, move.state, episode.step_index)
        return outcome.append(Message(role="user", content=prompt))

    async def score(self, episode: Episode) -> Score:
        """Return the reward of the last move; a message that was not played has 0."""
        if _STATE not in episode.state:
            raise Unsupported(
                "The messages of a game do not hold its rewards.",
                reason=Reason.NEEDS_SESSION,
                remedy="Play it again in a session.",
            )
        value = episode.state.get(_EARNED, {}).get(episode.step_index, 0.0)
        return Score(rewards=(Reward(name=_STATE, value=value),))


def game_environment(
    game: Game[Any],
    *,
    name: str,
    tasks: TaskSource,
    description: str = "",
    version: str = "1",
    system_prompt: str = "",
) -> ChatEnv:
    """Return a game as an environment: it plays its tasks as chats, or as trials."""
    return ChatEnv(
        name=name,
        version=version,
        description=description,
        tasks=tasks,
        transforms=(EndWhenIncomplete(), Play(game)),
        system_prompt=system_prompt,
    )


def inputs_of(task: TaskData) -> Mapping[str, Any]:
    """Return what a game begins with: the task's metadata, `question` and `solution`."""
    solution = {"solution": task.answer} if task.answer else {}
    return {**task.metadata, **({"question": task.question} if task.question else {}), **solution}


def game_of(environment: object) -> Game[Any]:
    """Return the game that an environment plays; Unsupported (NOT_A_GAME) when it plays none."""
    for transform in getattr(environment, "transforms", ()):
        if isinstance(transform, Play):
            return transform.game
    raise Unsupported(
        f"Environment {getattr(environment, 'name', '')} is not a game.",
        reason=Reason.NOT_A_GAME,
        remedy="Run trials in an environment with a Play transform, such as twenty_questions.",
    )


class WordTasks(TaskSource):
    """One task per hidden word. A key does not show the word."""

    def __init__(self, game: TwentyQuestions) -> None:
        self._words = {split: tuple(game.words(split)) for split in self.splits}

    @property
    def splits(self) -> tuple[str, ...]:
        """Return "train" and "heldout", which share no word."""
        return ("train", "heldout")

    def keys(self, split: str) -> Sequence[str]:
        """Return word-0, word-1, ..."""
        return [f"word-{index}" for index in range(len(self._words[self.require_split(split)]))]

    def get(self, split: str, key: str) -> TaskData:
        """Return the task of a key."""
        split = self.require_split(split)
        number = key.removeprefix("word-")
        words = self._words[split]
        if not number.isdecimal() or int(number) >= len(words):
            raise task_not_found(split, key)
        return TaskData(key=key, question="Find the hidden word.", answer=words[int(number)])


def twenty_questions(
    *,
    hardcore: bool = False,
    max_turns: int = 21,
    error_allowance: int = 1,
    system_prompt: str = "",
) -> ChatEnv:
    """Return the built-in `twenty_questions` environment: find the hidden word."""
    game = TwentyQuestions(hardcore=hardcore, max_turns=max_turns, error_allowance=error_allowance)
    return game_environment(
        game,
        name="twenty_questions",
        description="Find a hidden word by yes-or-no questions, then guess it in brackets.",
        tasks=WordTasks(game),
        system_prompt=system_prompt,
    )
