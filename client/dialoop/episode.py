"""The two sides of an episode: what a policy answers and what an environment answers."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.trajectory import DoneReason, Failure, Reward, SamplingParams, StopReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dialoop.chat import ChatHistory, History, ToolDefinition
    from dialoop.environments.modes import Text, Tokens
    from dialoop.sequences import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetResult:
    """The answer to a reset; `history` has `prompt` alone.

    In text and tokens mode the prompt is that of `text` or `tokens`, and `history` is empty.
    `tools` are those that the chat template shows the policy in each turn.
    """

    history: ChatHistory
    info: dict[str, str] = field(default_factory=dict)
    environment_version: str = ""
    text: Text | None = None
    tokens: Tokens | None = None
    tools: tuple[ToolDefinition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The answer to a step; `history.prompt` is the policy's full and what was added to it."""

    history: ChatHistory
    rewards: tuple[Reward, ...] = ()
    terminated: bool = False
    truncated: bool = False
    done_reason: DoneReason = DoneReason.NOT_DONE
    failures: tuple[Failure, ...] = ()
    num_tool_calls: int = 0
    replayed: bool = False
    info: dict[str, str] = field(default_factory=dict)
    text: Text | None = None
    tokens: Tokens | None = None
    snapshot: bytes = b""

    @property
    def done(self) -> bool:
        """Return whether the episode ended."""
        return self.terminated or self.truncated

    def agrees_with(self, other: StepResult | None) -> bool:
        """Return whether the other answer is the same, but for facts for people and snapshots."""
        beside: dict[str, Any] = {"info": {}, "replayed": False, "snapshot": b""}
        return other is not None and replace(self, **beside) == replace(other, **beside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """An episode before a step, as its lost session left it: the messages so far and the rest."""

    snapshot: bytes
    messages: History
    step_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """The state of a session; `history` is what the next step continues."""

    session_id: str
    environment: str
    episode: int
    next_step_index: int
    done: bool
    history: ChatHistory
    expires_in_s: float
    text: Text | None = None
    tokens: Tokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOpening:
    """Sessions at the start of one task: `session_ids[i]` was opened with `openings[i]`."""

    session_ids: tuple[str, ...]
    openings: tuple[ResetResult, ...]
    ttl_s: float


class UpdateMode(IntEnum):
    """What a load of new weights did to answers that were under way."""

    RECOMPUTE = 1
    """They went on under the new version with recomputed keys: exact."""
    KEEP_KV = 2
    """They went on with the old version's keys: no single version explains the later tokens."""
    WAIT = 3
    """They ended under the old version first: exact."""


def update_mode_label(modes: Iterable[UpdateMode]) -> dict[str, str]:
    """Return a trajectory's label of how weight loads treated its answers; empty if exactly."""
    used = set(modes)
    worst = next((mode for mode in (UpdateMode.KEEP_KV, UpdateMode.WAIT) if mode in used), None)
    return {} if worst is None else {"update_mode": worst.name}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedText:
    """A text prompt and what the policy wrote after it, special tokens included."""

    prompt: str
    response: str

    @property
    def full(self) -> str:
        """Return prompt and response together."""
        return self.prompt + self.response


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer of a policy.

    `sequence` continues the context that was sent (its segments count from 0 of the new tokens)
    when its fork_cause is NONE and a context was sent; else it is a whole new sequence.
    For a prompt of text or token ids, `history` is empty and `text` holds both texts.
    Samples of the same prompt tokens have the same `prompt_id`; a policy may leave it empty.
    `top_logprobs` has the likeliest tokens of each sampled position with their log-probs, the
    likeliest first, where the sampling asks for them. `model_digest` names config and weights of
    the model that sampled the last token.
    """

    history: ChatHistory
    sequence: Sequence
    stop_reason: StopReason
    stop_string: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tokenizer_digest: str = ""
    template_digest: str = ""
    model_digest: str = ""
    generate_s: float = 0.0
    queue_s: float = 0.0
    text: ContinuedText | None = None
    update_mode: UpdateMode = UpdateMode.RECOMPUTE
    num_truncated_tokens: int = 0
    prompt_id: str = ""
    sample_index: int = 0
    warnings: tuple[str, ...] = ()
    top_logprobs: tuple[Mapping[int, float], ...] = ()


class Redo(IntEnum):
    """What becomes of an episode whose session was lost, with the process that had it.

    A session that lives on gives the answers that it gave before, whatever its environment says.
    """

    NEVER = 1
    """It is played again from the start: a step taken again might do again what a tool did."""
    SAFE = 2
    """Its steps are taken again: they do no harm twice, and give the same answers."""
    SNAPSHOT = 3
    """It goes on from the snapshot of its last answer; the step after that is taken again."""

    @classmethod
    def parse(cls, redo: Redo | str) -> Redo:
        """Return the one with this name; InvalidConfig (UNKNOWN_REDO) lists the names."""
        names = {member.name.lower(): member for member in cls}
        if isinstance(redo, cls):
            return redo
        if str(redo) not in names:
            raise InvalidConfig(
                f"There is no redo '{str(redo)[:40]}'.",
                reason=Reason.UNKNOWN_REDO,
                remedy=f"Choose one of: {', '.join(names)}.",
            )
        return names[str(redo)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """A turn of an episode in play: `sample` is what the policy sampled.

    `answer` is what the environment answered to the turn before; None at the first, number 0.
    """

    trajectory_id: str
    session_id: str
    turn: int
    sample: Sample
    answer: StepResult | None = None


class TurnLog:
    """The turns of one episode in play; this one keeps them in memory alone.

    Each is appended before the environment sees it. An episode that has some begins with them: they
    are not sampled again.
    """

    is_durable = False

    def __init__(self, turns: Iterable[RecordedTurn] = (), *, redo: Redo = Redo.NEVER) -> None:
        self.turns = list(turns)
        self.redo = redo
        first = self.turns[0] if self.turns else None
        self.trajectory_id = first.trajectory_id if first else uuid.uuid4().hex
        self.session_id = first.session_id if first else uuid.uuid4().hex

    async def append(self, sample: Sample, answer: StepResult | None) -> None:
        """Keep a turn; return once it is as durable as this log makes it."""
        before = self.turns[-1] if self.turns else None
        if before is not None and before.answer is not None:  # the last snapshot alone is of use
            self.turns[-1] = replace(before, answer=replace(before.answer, snapshot=b""))
        self.turns.append(
            RecordedTurn(
                trajectory_id=self.trajectory_id,
                session_id=self.session_id,
                turn=len(self.turns),
                sample=sample,
                answer=answer,
            )
        )


class Policy(Protocol):
    """What answers a prompt: an InferenceClient, or a twin from `dialoop.testing`."""

    async def generate(  # noqa: PLR0913 - a policy's question
        self,
        history: History,
        *,
        context: Sequence | None = None,
        num_context_messages: int = 0,
        sampling: SamplingParams | None = None,
        turn: int = 0,
        num_samples: int = 1,
        tools: Iterable[ToolDefinition] = (),
    ) -> tuple[Sample, ...]:
        """Answer the prompt `num_samples` times; `tools` are given only where there are any."""
        ...


class Sessions(Protocol):
    """Where episodes are played: an EnvironmentClient, or a twin from `dialoop.testing`."""

    async def create_session(self, session_id: str, environment: str) -> float:
        """Open a session under the caller's id; return its time to live in seconds."""
        ...

    async def reset(
        self, session_id: str, *, episode: int, split: str, task_key: str, seed: int = 0
    ) -> ResetResult:
        """Start an episode of the session."""
        ...

    async def step(
        self, session_id: str, *, episode: int, step_index: int, history: ChatHistory
    ) -> StepResult:
        """Step with the policy's answer; a retry gets the first result."""
        ...

    async def close_session(self, session_id: str) -> bool:
        """Forget the session; return whether there was one."""
        ...
