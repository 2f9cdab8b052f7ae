"""Multistep trials: several episodes of one hidden task, played by an agent with a memory.

    result = await run_trial(TwentyQuestions(), [{"solution": "apple"}], agent, tokenizer=tokenizer)
    result.full_token_ids[0], result.completion_only_mask[0], result.session_ids[0]

A trial keeps all its episodes, and the last one counts. Its tokens are those of prompts and
actions without a template or separators, so an agent that returns the ids it sampled loses none.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.chat import History, Message
from dialoop.errors import DialoopError, InvalidInput
from dialoop.failures import error_of, failure_of
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.sequences import Sequence as TokenSequence
from dialoop.trajectory import Owner
from dialoop.user_functions import call

from dialoop_extras.trials.game import Move

if TYPE_CHECKING:
    from dialoop.tokens.tokenizer import Tokenizer
    from dialoop.trajectory import Failure

    from dialoop_extras.trials.game import Game


_SPLITS = ("even", "last", "terminal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What an agent does, and what it remembers.

    token_ids, logprobs and versions (runs of length and policy version) describe what it sampled.
    Without them the trial tokenises the text, and the ids may differ from the sampled ones.
    With `is_context_full` the policy had no room to act: the episode ends without this action.
    """

    text: str
    state: Any = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[tuple[int, PolicyVersion], ...] = ()
    is_context_full: bool = False


class Agent(Protocol):
    """A player, sync or async. Its state begins as None and lasts through a trial's episodes.

    A sync `get_action` runs in a thread of its own, so trials do not wait for each other.
    """

    def get_action(
        self, messages: History, state: Any
    ) -> Action | tuple[str, Any] | Awaitable[Action | tuple[str, Any]]:
        """Return the next action: an Action, or (text, state)."""
        ...


class MaskScope(Enum):
    """The agent's tokens that `completion_only_mask` marks: all, or those of the last action."""

    ALL = "all"
    FINAL = "final"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedStep:
    """One prompt and the agent's action; ids are empty without a tokenizer."""

    prompt: str
    prompt_ids: tuple[int, ...]
    action: Action
    reward: float
    info: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """One episode. In a free shot `reward` is 0, whatever the rewards of its steps are."""

    steps: tuple[PlayedStep, ...] = ()
    messages: History = field(default_factory=History)
    reward: float = 0.0
    terminated: bool = False
    is_free_shot: bool = False
    failures: tuple[Failure, ...] = ()

    @property
    def earned(self) -> float:
        """Return the sum of its steps' rewards, also in a free shot."""
        return sum(step.reward for step in self.steps)

    @property
    def token_ids(self) -> list[int]:
        """Return the ids of prompts and actions, one after the other."""
        return [i for step in self.steps for i in (*step.prompt_ids, *step.action.token_ids)]

    def mask(self, scope: MaskScope = MaskScope.ALL) -> list[int]:
        """Return a 1 for each token that the agent wrote (FINAL: in its last action), else 0."""
        mask: list[int] = []
        for index, step in enumerate(self.steps):
            counts = scope is MaskScope.ALL or index == len(self.steps) - 1
            mask += [0] * len(step.prompt_ids) + [int(counts)] * len(step.action.token_ids)
        return mask

    def sequence(self) -> TokenSequence:
        """Return the token row with its segment table; actions without versions are context."""
        segments: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        for turn, step in enumerate(self.steps):
            source = Source.PROMPT if turn == 0 else Source.ENVIRONMENT
            segments.append((step.prompt_ids, {"source": source, "turn": turn}))
            ids, position = step.action.token_ids, 0
            for length, version in step.action.versions:
                fields = {"source": Source.MODEL, "turn": turn, "policy_version": version}
                segments.append((ids[position : position + length], fields))
                position += length
            segments.append((ids[position:], {"source": Source.PROMPT, "turn": turn}))
        return sequence_of(segments, logprobs=[v for s in self.steps for v in s.action.logprobs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All episodes of one task. The last one counts."""

    session_id: str
    episodes: tuple[PlayedEpisode, ...]

    @property
    def final(self) -> PlayedEpisode:
        """Return the last episode, which is trained."""
        return self.episodes[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """One trial per input, in order. Every list below has the same length."""

    trials: tuple[Trial, ...]
    mask_scope: MaskScope = MaskScope.ALL

    @property
    def full_token_ids(self) -> list[list[int]]:
        """Return the token ids of each final episode."""
        return [trial.final.token_ids for trial in self.trials]

    @property
    def full_attention_mask(self) -> list[list[int]]:
        """Return only ones, since nothing is padded."""
        return [[1] * len(ids) for ids in self.full_token_ids]

    @property
    def completion_only_mask(self) -> list[list[int]]:
        """Return a 1 for each token to train, else 0."""
        return [trial.final.mask(self.mask_scope) for trial in self.trials]

    @property
    def final_completion_messages(self) -> list[list[dict[str, Any]]]:
        """Return the last message of each agent with its session_id, for rewards to read."""
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
        """Return the session id of each trial."""
        return [trial.session_id for trial in self.trials]

    @property
    def rewards(self) -> list[float | None]:
        """Return the reward of each final episode; None if the game or the agent failed."""
        return [None if t.final.failures else t.final.reward for t in self.trials]

    def get_rubric(self) -> list[Callable[..., list[float | None]]]:
        """Return the trials' reward functions: one, which looks the sessions' rewards up.

        (reward,) = result.get_rubric()
        reward(completions=result.final_completion_messages, session_ids=result.session_ids)
        """
        by_session = dict(zip(self.session_ids, self.rewards, strict=True))

        def trial_reward(
            completions: Sequence[Any], session_ids: Sequence[str], **_: Any
        ) -> list[float | None]:
            unknown = [session_id for session_id in session_ids if session_id not in by_session]
            if unknown or len(completions) != len(session_ids):
                raise InvalidInput(
                    f"{len(completions)} completions came with {len(session_ids)} session ids, "
                    f"{len(unknown)} of them unknown.",
                    remedy="Give one session id of this result for each completion.",
                )
            return [by_session[session_id] for session_id in session_ids]

        return [trial_reward]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """How often to play a task. The first `free_shots` of its episodes earn nothing.

    reward_split: what a trajectory's turns get: "turn", the step's reward as one number; "even",
    "last" or "terminal", one number for each sampled token, as `spread_rewards` says.
    """

    episodes_per_trial: int = 1
    free_shots: int = 0
    mask_scope: MaskScope = MaskScope.ALL
    seed: int = 0
    reward_split: str = "turn"

    def __post_init__(self) -> None:
        if self.episodes_per_trial < 1 or self.free_shots < 0:
            raise InvalidInput(
                f"episodes_per_trial is {self.episodes_per_trial}, free_shots {self.free_shots}.",
                remedy="Use 1 or more episodes, and 0 or more free shots.",
            )
        if self.free_shots >= self.episodes_per_trial:
            raise InvalidInput(
                f"free_shots is {self.free_shots} of {self.episodes_per_trial} episodes.",
                remedy="Leave at least one episode that counts.",
            )
        if self.reward_split not in ("turn", *_SPLITS):
            raise InvalidInput(
                f"reward_split is {self.reward_split!r}.",
                remedy="Choose turn, even, last or terminal.",
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

    If a game or an agent fails, its episode ends with a failure, and the others go on. If the game
    rejects a task (a DialoopError of `begin`), the error is raised.
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
            state = await call(game.begin, task, seed=options.seed + index)
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
        owner = Owner.ENVIRONMENT
        try:
            prompt = await call(game.prompt, state, step)
            messages = episode.messages.append(Message(role="user", content=prompt))
            owner = Owner.AGENT
            action = _as_action(await call(agent.get_action, messages, memory), tokenizer)
            if action.is_context_full:
                return episode, action.state
            owner = Owner.ENVIRONMENT
            move = _as_move(await call(game.play, state, action.text))
            owner = Owner.REWARD
            reward = _reward_of(move)
        except Exception as error:
            return replace(episode, failures=(_failure_of(error, owner),)), memory
        memory, state = action.state, move.state
        played = PlayedStep(
            prompt=prompt,
            prompt_ids=() if tokenizer is None else tokenizer.encode(prompt).ids,
            action=action,
            reward=reward,
            info=move.info,
        )
        episode = replace(
            episode,
            steps=(*episode.steps, played),
            messages=messages.append(Message(role="assistant", content=action.text)),
            reward=episode.reward + reward,
            terminated=move.done,
        )
        if move.done:
            break
    return episode, memory


def _as_move(answer: object) -> Move[Any]:
    if not isinstance(answer, Move):
        raise InvalidInput(f"`play` returned {answer!r:.40}.", remedy="Return a Move.")
    return answer


def _reward_of(move: Move[Any]) -> float:
    """Return the reward of a move; InvalidInput (REWARD_NOT_FINITE) for what is no number."""
    try:
        reward = float(move.reward)
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        raise InvalidInput(
            f"The reward of a move is {move.reward!r:.40}.",
            reason=Reason.REWARD_NOT_FINITE,
            remedy="Give a finite number.",
        )
    return reward


def _failure_of(error: Exception, owner: Owner) -> Failure:
    """Return the failure of the agent or the game; a DialoopError in the agent is its policy's."""
    if owner is Owner.REWARD:
        return error_of(error, owner)
    what = "The agent" if owner is Owner.AGENT else "The game"
    is_policys = isinstance(error, DialoopError) and not isinstance(error, InvalidInput)
    if owner is Owner.AGENT and is_policys:
        return error_of(error, Owner.INFERENCE)  # with its reason: an outage must stay one
    return failure_of(error, owner=owner, reason=Reason.TRIAL_FAILED, what=what)


def _as_action(answer: Action | tuple[str, Any], tokenizer: Tokenizer | None) -> Action:
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], str):
        answer = Action(text=answer[0], state=answer[1])
    if not isinstance(answer, Action):
        raise InvalidInput(
            f"The agent returned {answer!r:.40}.",
            remedy="Return an Action, or a tuple (text, state), from get_action.",
        )
    action = answer
    if tokenizer is None:
        return replace(action, token_ids=(), logprobs=(), versions=())
    if action.token_ids:
        return action
    return replace(action, token_ids=tokenizer.encode(action.text).ids)


def split_reward(episode: PlayedEpisode, *, how: str = "even") -> list[list[float]]:
    """Return each step's reward spread over its action's tokens, as `spread_rewards` does.

    The numbers sum to the episode's reward, which is 0 for a free shot. Without a tokenizer no
    action has tokens, and all rows are empty.
    """
    if how not in _SPLITS:
        raise InvalidInput(f"how is {how!r}.", remedy="Choose even, last or terminal.")
    counts = [len(step.action.token_ids) for step in episode.steps]
    rewards = [0.0 if episode.is_free_shot else step.reward for step in episode.steps]
    return spread_rewards(rewards, counts, how=how)


def spread_rewards(
    rewards: Sequence[float], counts: Sequence[int], *, how: str
) -> list[list[float]]:
    """Return for each of n steps one number per token, from n rewards and n numbers of tokens.

    even: in equal parts. last: all on the last token. terminal: the sum of all rewards in equal
    parts over all tokens.

        spread_rewards([1.0, 2.0, 0.0], [2, 0, 1], how="last")    # [[0.0, 3.0], [], [0.0]]

    The reward of a step without tokens goes to the step before it that has some, or to the first
    one that has, so no reward is lost while there is a token.
    """
    if how == "terminal":
        each = sum(rewards) / max(1, sum(counts))
        return [[each] * count for count in counts]
    owner = next((index for index, count in enumerate(counts) if count), 0)
    owned = [0.0] * len(counts)
    for index, count in enumerate(counts):
        owner = index if count else owner
        owned[owner] += rewards[index]
    if how == "last":
        return [
            [0.0] * (n - 1) + [reward] * min(n, 1) for reward, n in zip(owned, counts, strict=True)
        ]
    return [[reward / max(1, n)] * n for reward, n in zip(owned, counts, strict=True)]
