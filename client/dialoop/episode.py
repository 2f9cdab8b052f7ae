"""The two sides of an episode: what a policy answers and what an environment answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

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

    @property
    def done(self) -> bool:
        """Return whether the episode ended."""
        return self.terminated or self.truncated


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
