"""Multistep trials: several episodes of one hidden task, played by an agent with a memory.

    result = await run_trial(TwentyQuestions(), [{"solution": "apple"}], agent, tokenizer=tokenizer)
    result.full_token_ids[0], result.completion_only_mask[0], result.session_ids[0]

A trial returns its last episode and keeps all. Prompts and actions are joined token by token, with
no template and no separators between them, so an agent that gives the ids it sampled loses none.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.chat import History, Message
from dialoop.environments.failures import failure_of
from dialoop.errors import DialoopError, InvalidInput
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.sequences import Sequence as TokenSequence
from dialoop.trajectory import Owner

if TYPE_CHECKING:
    from dialoop.tokens.tokenizer import Tokenizer
    from dialoop.trajectory import Failure
    from dialoop.trials.game import Game


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What an agent does, and what it remembers.

    token_ids, logprobs and versions (runs of length and policy version) are what it sampled;
    without them the text is tokenised, which may give other ids than were sampled.
    """

    text: str
    state: Any = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[tuple[int, PolicyVersion], ...] = ()


class Agent(Protocol):
    """Whoever plays. Its state lasts through the episodes of a trial and begins as None."""

    async def get_action(self, messages: History, state: Any) -> Action | tuple[str, Any]:
        """The next action: an Action, or (text, state)."""
        ...


class MaskScope(Enum):
    """Which of the agent's tokens `completion_only_mask` counts."""

    ALL = "all"
    FINAL = "final"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedStep:
    """One prompt and the action it got; ids are empty without a tokenizer."""

    prompt: str
    prompt_ids: tuple[int, ...]
    action: Action
    reward: float
    info: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """One episode; `reward` is 0 in a free shot, whatever its steps earned."""

    steps: tuple[PlayedStep, ...] = ()
    messages: History = field(default_factory=History)
    reward: float = 0.0
    terminated: bool = False
    is_free_shot: bool = False
    failures: tuple[Failure, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """Prompts and actions, one after the other."""
        return [i for step in self.steps for i in (*step.prompt_ids, *step.action.token_ids)]

    def mask(self, scope: MaskScope = MaskScope.ALL) -> list[int]:
        """Per token: 1 where the agent wrote it (or its last action alone)."""
        found: list[int] = []
        for index, step in enumerate(self.steps):
            counts = scope is MaskScope.ALL or index == len(self.steps) - 1
            found += [0] * len(step.prompt_ids) + [int(counts)] * len(step.action.token_ids)
        return found

    def sequence(self) -> TokenSequence:
        """The token row with its segment table; actions without versions are context."""
        pieces: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        for turn, step in enumerate(self.steps):
            opening = Source.PROMPT if turn == 0 else Source.ENVIRONMENT
            pieces.append((step.prompt_ids, {"source": opening, "turn": turn}))
            ids, position = step.action.token_ids, 0
            for length, version in step.action.versions:
                fields = {"source": Source.MODEL, "turn": turn, "policy_version": version}
                pieces.append((ids[position : position + length], fields))
                position += length
            pieces.append((ids[position:], {"source": Source.PROMPT, "turn": turn}))
        return sequence_of(pieces, logprobs=[v for s in self.steps for v in s.action.logprobs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All episodes of one task; the last one counts."""

    session_id: str
    episodes: tuple[PlayedEpisode, ...]

    @property
    def final(self) -> PlayedEpisode:
        """The episode that is trained."""
        return self.episodes[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """One trial per input, in order; every list below has that length."""

    trials: tuple[Trial, ...]
    mask_scope: MaskScope = MaskScope.ALL

    @property
    def full_token_ids(self) -> list[list[int]]:
        """Token ids of each final episode."""
        return [trial.final.token_ids for trial in self.trials]

    @property
    def full_attention_mask(self) -> list[list[int]]:
        """Ones: nothing is padded."""
        return [[1] * len(ids) for ids in self.full_token_ids]

    @property
    def completion_only_mask(self) -> list[list[int]]:
        """1 on the tokens to train."""
        return [trial.final.mask(self.mask_scope) for trial in self.trials]

    @property
    def final_completion_messages(self) -> list[list[dict[str, Any]]]:
        """The last message of each agent, with its session_id; what a reward reads."""
        return [
            [
                {**message.to_chat(), "session_id": trial.session_id}
                for message in trial.final.messages
                if message.role == "assistant"
            ][-1:]
            for trial in self.trials
        ]

    @property
    def session_ids(self) -> list[str]:
        """Which session each trial was."""
        return [trial.session_id for trial in self.trials]

    @property
    def rewards(self) -> list[float | None]:
        """Of each final episode; None where the game or the agent failed."""
        return [None if t.final.failures else t.final.reward for t in self.trials]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """How often a task is played: the first `free_shots` of its episodes earn nothing."""

    episodes_per_trial: int = 1
    free_shots: int = 0
    mask_scope: MaskScope = MaskScope.ALL
    seed: int = 0

    def __post_init__(self) -> None:
        if self.episodes_per_trial < 1 or self.free_shots < 0:
            raise InvalidInput(
                f"episodes_per_trial is {self.episodes_per_trial}, free_shots {self.free_shots}.",
                remedy="Play at least one episode, with 0 or more free shots.",
            )
        if self.free_shots >= self.episodes_per_trial:
            raise InvalidInput(
                f"free_shots is {self.free_shots} of {self.episodes_per_trial} episodes.",
                remedy="Leave at least one episode that counts.",
            )


async def run_trial(
    game: Game[Any],
    inputs: Sequence[Mapping[str, Any]],
    agent: Agent,
    *,
    tokenizer: Tokenizer | None = None,
    options: TrialOptions | None = None,
) -> TrialResult:
    """Play one trial per input, all at the same time.

    A game or agent that fails ends its episode with a failure; nothing else is touched. A task that
    the game refuses (a DialoopError of `begin`) is raised.
    """
    options = options or TrialOptions()
    try:
        async with asyncio.TaskGroup() as playing:
            tasks = [
                playing.create_task(_trial(game, task, agent, tokenizer, options, index))
                for index, task in enumerate(inputs)
            ]
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    return TrialResult(trials=tuple(task.result() for task in tasks), mask_scope=options.mask_scope)


async def _trial(
    game: Game[Any],
    task: Mapping[str, Any],
    agent: Agent,
    tokenizer: Tokenizer | None,
    options: TrialOptions,
    index: int,
) -> Trial:
    episodes: list[PlayedEpisode] = []
    memory: Any = None
    for number in range(options.episodes_per_trial):
        try:
            state = game.begin(task, seed=options.seed + index)
        except DialoopError:
            raise
        except Exception as error:
            failure = failure_of(
                error, owner=Owner.ENVIRONMENT, reason=Reason.TRIAL_FAILED, what="The game"
            )
            episode = PlayedEpisode(failures=(failure,))
        else:
            episode, memory = await _episode(game, state, agent, memory, tokenizer)
        free = number < options.free_shots
        reward = 0.0 if free else episode.reward
        episodes.append(replace(episode, is_free_shot=free, reward=reward))
    return Trial(session_id=uuid.uuid4().hex, episodes=tuple(episodes))


async def _episode(
    game: Game[Any], state: Any, agent: Agent, memory: Any, tokenizer: Tokenizer | None
) -> tuple[PlayedEpisode, Any]:
    episode = PlayedEpisode()
    for step in range(game.max_steps):
        prompt = game.prompt(state, step)
        messages = episode.messages.append(Message(role="user", content=prompt))
        owner = Owner.POLICY
        try:
            action = _as_action(await agent.get_action(messages, memory), tokenizer)
            owner = Owner.ENVIRONMENT
            move = await game.play(state, action.text)
        except Exception as error:
            who = "The agent" if owner is Owner.POLICY else "The game"
            owner = Owner.INFERENCE if owner is Owner.POLICY else owner
            failure = failure_of(error, owner=owner, reason=Reason.TRIAL_FAILED, what=who)
            return replace(episode, failures=(failure,)), memory
        memory, state = action.state, move.state
        played = PlayedStep(
            prompt=prompt,
            prompt_ids=() if tokenizer is None else tokenizer.encode(prompt).ids,
            action=action,
            reward=move.reward,
            info=move.info,
        )
        episode = replace(
            episode,
            steps=(*episode.steps, played),
            messages=messages.append(Message(role="assistant", content=action.text)),
            reward=episode.reward + move.reward,
            terminated=move.done,
        )
        if move.done:
            break
    return episode, memory


def _as_action(given: Action | tuple[str, Any], tokenizer: Tokenizer | None) -> Action:
    action = given if isinstance(given, Action) else Action(text=given[0], state=given[1])
    if tokenizer is None:
        return replace(action, token_ids=(), logprobs=(), versions=())
    if action.token_ids:
        return action
    return replace(action, token_ids=tokenizer.encode(action.text).ids)


def split_reward(episode: PlayedEpisode, *, how: str = "even") -> list[list[float]]:
    """Each step's reward over its action's tokens, for losses that read tokens.

    even: in equal parts. last: all on the last token. terminal: the episode's reward in equal parts
    over all of the agent's tokens. Sums equal the rewards.
    """
    if how not in ("even", "last", "terminal"):
        raise InvalidInput(f"how is {how!r}.", remedy="Choose even, last or terminal.")
    total = sum(len(step.action.token_ids) for step in episode.steps)
    rows = []
    for step in episode.steps:
        count = len(step.action.token_ids)
        if how == "terminal":
            rows.append([episode.reward / total] * count)
        elif how == "last":
            rows.append([0.0] * (count - 1) + [step.reward] if count else [])
        else:
            rows.append([step.reward / count] * count if count else [])
    return rows
