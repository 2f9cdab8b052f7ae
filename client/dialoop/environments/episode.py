"""The state of one running episode, and what a reset and a step return.

opening = environment.reset(TaskData(key="35+40", question="35+40", answer="75"), seed=1)
opening.history.prompt        # user: 35+40
outcome = await environment.step(opening.episode, opening.history.respond(answer))
outcome.episode.done          # what the transforms decided
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from dialoop.chat import ChatHistory, History, Message
from dialoop.environments.modes import Text, Tokens
from dialoop.errors import PreconditionFailed
from dialoop.reasons import Reason
from dialoop.trajectory import DoneReason, Failure, Owner, Reward

if TYPE_CHECKING:
    from dialoop.environments.views import TextView, TokensView

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """One task: `TaskData(key="35+40", question="35+40", answer="75")`.

    If `messages` is set, the conversation begins with it and not with the question. The caller gets
    `metadata` back with the opening; the policy never sees it.
    """

    key: str
    question: str = ""
    answer: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    messages: History | None = None

    def __post_init__(self) -> None:
        if self.messages is not None and not isinstance(self.messages, History):
            object.__setattr__(self, "messages", History(self.messages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One running episode: the conversation so far and whether it is over.

    `answer` is the last message that the policy sent, whatever role or text it has. `state` holds
    what the environment's transforms and tools remember; replace it, never change it in place.
    `view` is the running text in text mode and the running tokens in tokens mode.
    """

    task: TaskData
    seed: int
    history: History
    step_index: int = 0
    answer: Message | None = None
    terminated: bool = False
    truncated: bool = False
    done_reason: DoneReason = DoneReason.NOT_DONE
    state: Mapping[str, Any] = field(default_factory=dict)
    view: TextView | TokensView | None = None

    def remember(self, **state: Any) -> None:
        """Put more into the state, within a tool: the next call and step find it there.

        Raise PreconditionFailed: NO_EPISODE outside of a tool, NEEDS_SESSION where ToolUse or
        ToolCalls is not told that its tools remember.
        """
        call = _of_tool(_CURRENT)
        if not call.remembers:
            raise PreconditionFailed(
                "A tool remembers something, and its environment does not say so.",
                reason=Reason.NEEDS_SESSION,
                remedy="Write ToolUse([...], remembers=True), or so for ToolCalls and "
                "tool_environment: a step then needs its session.",
            )
        call.episode = replace(call.episode, state={**call.episode.state, **state})

    def rng(self, purpose: str) -> random.Random:
        """Return a generator seeded by the seed, the step and the purpose, as in every replay."""
        return random.Random(f"{self.seed}:{self.step_index}:{purpose}")

    @property
    def done(self) -> bool:
        """Return whether the episode was terminated or truncated."""
        return self.terminated or self.truncated

    @property
    def answer_text(self) -> str:
        """Return the text of the policy's last message; empty before the first."""
        return "" if self.answer is None else self.answer.text


@dataclass(slots=True)
class ToolRun:
    """The call of a tool under way, and the episode with what the tool has remembered in it."""

    episode: Episode
    remembers: bool


_CURRENT: ContextVar[ToolRun] = ContextVar("dialoop_episode")
_CALL_ID: ContextVar[str] = ContextVar("dialoop_call_id")
# Gives the ids of the calls in one step, which run one after the other.
_CALL_IDS: ContextVar[Iterator[str]] = ContextVar("dialoop_call_ids")


def current_episode() -> Episode:
    """Return the episode whose tool is running; PreconditionFailed outside of a tool.

    Its `state` holds what transforms and tools remember. A tool remembers more by
    `current_episode().remember(basket=(*basket, item))`.
    """
    return _of_tool(_CURRENT).episode


def current_call_id() -> str:
    """Return the id of the running call of a tool, or else of the step; PreconditionFailed.

    A step that is taken again, after a process died, gives its calls the ids of the first time: a
    tool that does nothing for an id it has seen does everything once. A step without a session is
    never taken again, and its calls have ids of their own.
    """
    return _of_tool(_CALL_ID)


def _of_tool(running: ContextVar[T]) -> T:
    try:
        return running.get()
    except LookupError:
        raise PreconditionFailed(
            "No tool of an episode is running here.",
            reason=Reason.NO_EPISODE,
            remedy="Ask within a tool that ToolUse or ToolCalls runs.",
        ) from None


@contextmanager
def stepping(step_id: str) -> Iterator[None]:
    """Number the calls of the step's tools, under its id."""
    ids = (f"{step_id}/{number}" for number in itertools.count())
    tokens = _CALL_ID.set(step_id), _CALL_IDS.set(ids)
    try:
        yield
    finally:
        _CALL_ID.reset(tokens[0])
        _CALL_IDS.reset(tokens[1])


@contextmanager
def playing(episode: Episode, *, remembers: bool = False) -> Iterator[ToolRun]:
    """Make it the current episode, for the one call of a tool that runs inside."""
    call_id = next(_CALL_IDS.get(iter(())), "") or uuid.uuid4().hex
    run = ToolRun(episode, remembers)
    tokens = _CURRENT.set(run), _CALL_ID.set(call_id)
    try:
        yield run
    finally:
        _CURRENT.reset(tokens[0])
        _CALL_ID.reset(tokens[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """An episode as its caller sees it: the next prompt, and facts beside it."""

    episode: Episode
    info: Mapping[str, str] = field(default_factory=dict)

    @property
    def history(self) -> ChatHistory:
        """Return the next prompt: all messages so far."""
        return ChatHistory(prompt=self.episode.history)

    @property
    def text(self) -> Text | None:
        """Return the next prompt as text in text mode, else None."""
        episode = self.episode
        if episode.view is not None:
            return episode.view.prompt if isinstance(episode.view.prompt, Text) else None
        shown = episode.state.get("shown_text")
        return None if shown is None else Text(prompt=shown)

    @property
    def tokens(self) -> Tokens | None:
        """Return the next prompt as token ids in tokens mode, else None."""
        episode = self.episode
        if episode.view is not None:
            return episode.view.prompt if isinstance(episode.view.prompt, Tokens) else None
        shown = episode.state.get("shown_tokens")
        return None if shown is None else Tokens(prompt=shown)

    def append(self, *messages: Message) -> Self:
        """Return it with messages of the environment added."""
        episode = replace(self.episode, history=self.episode.history.extend(messages))
        return replace(self, episode=episode)

    def remember(self, **state: Any) -> Self:
        """Return it with more in the episode's state."""
        return replace(self, episode=replace(self.episode, state={**self.episode.state, **state}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening(_Shown):
    """The first state of an episode, and facts for the caller. A reset returns it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Rewards, and the failures of reward functions."""

    rewards: tuple[Reward, ...] = ()
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(_Shown):
    """The result of a step: the episode after it, rewards and failures. Transforms change it."""

    response: History
    rewards: tuple[Reward, ...] = ()
    failures: tuple[Failure, ...] = ()
    num_tool_calls: int = 0
    # False: no reward function is called at this step.
    is_rewarded: bool = True
    # What `restore` needs to go on after this step elsewhere, with a digest; see `seal`.
    snapshot: bytes = b""

    def tell(self, **info: str) -> Outcome:
        """Return the outcome with more facts for the caller; the policy never sees them."""
        return replace(self, info={**self.info, **info})

    @property
    def is_scorable(self) -> bool:
        """Return whether no failure belongs to anyone but the policy."""
        return all(failure.owner is Owner.POLICY for failure in self.failures)

    def terminate(self, reason: DoneReason) -> Outcome:
        """End the episode because the task ended; one that is over stays as it is."""
        return self._end(reason, terminated=True)

    def truncate(self, reason: DoneReason) -> Outcome:
        """End the episode because a limit cut it off; one that is over stays as it is."""
        return self._end(reason, terminated=False)

    def _end(self, reason: DoneReason, *, terminated: bool) -> Outcome:
        if self.episode.done:
            return self
        ended = replace(
            self.episode, terminated=terminated, truncated=not terminated, done_reason=reason
        )
        return replace(self, episode=ended)

    def reopen(self) -> Outcome:
        """Return the outcome with the episode running again."""
        again = replace(
            self.episode, terminated=False, truncated=False, done_reason=DoneReason.NOT_DONE
        )
        return replace(self, episode=again)

    def fail(self, failure: Failure) -> Outcome:
        """End the episode as an error with this failure; it is never scored as a 0."""
        ended = replace(
            self.episode, terminated=False, truncated=True, done_reason=DoneReason.ERROR
        )
        return replace(self, episode=ended, failures=(*self.failures, failure))

    def with_score(self, score: Score) -> Outcome:
        """Return the outcome with the score's rewards and failures added."""
        if not (score.rewards or score.failures):
            return self
        return replace(
            self,
            rewards=self.rewards + score.rewards,
            failures=self.failures + score.failures,
        )
