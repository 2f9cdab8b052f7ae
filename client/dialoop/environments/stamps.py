"""What the caller is told beside the messages: policy version, step count, the rendered prompt.

PolicyVersionStamp(versions)       info["policy_version"], at reset and at every step
StepCounter(max_steps=8)           info["step_count"]; the eighth step truncates
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dialoop.environments.episode import Opening, Outcome
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.trajectory import DoneReason

if TYPE_CHECKING:
    from dialoop.templates.chat_template import ChatTemplate
    from dialoop.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChange:
    """One change, and when it was known: seconds since 1970."""

    version: str
    at_s: float


class PolicyVersions:
    """The version of the policy that is playing, and its past; only the trainer's side writes it.

    kind "int" starts at 0 and grows by one per `advance`; "uuid" takes a new random name.
    """

    def __init__(self, kind: str = "int", *, clock: Callable[[], float] = time.time) -> None:
        if kind not in ("int", "uuid"):
            raise InvalidConfig(f"kind is '{kind}'.", remedy="Choose 'int' or 'uuid'.")
        self._kind = kind
        self._clock = clock
        first = "0" if kind == "int" else uuid.uuid4().hex
        self._history = [VersionChange(version=first, at_s=clock())]

    @property
    def current(self) -> str:
        """The version that holds now."""
        return self._history[-1].version

    @property
    def history(self) -> tuple[VersionChange, ...]:
        """All of them, oldest first."""
        return tuple(self._history)

    def advance(self) -> str:
        """One complete weight update has happened."""
        is_int = self._kind == "int"
        return self.set(str(int(self.current) + 1) if is_int else uuid.uuid4().hex)

    def set(self, version: str) -> str:
        """Take a version that the trainer published, as "main/7"."""
        if version != self.current:
            self._history.append(VersionChange(version=version, at_s=self._clock()))
        return version


class PolicyVersionStamp(Transform):
    """Tell the policy version at reset and at every step."""

    def __init__(self, versions: PolicyVersions) -> None:
        self._versions = versions

    def reset(self, opening: Opening) -> Opening:
        """The version the episode starts under."""
        return replace(opening, info={**opening.info, "policy_version": self._versions.current})

    async def step(self, outcome: Outcome) -> Outcome:
        """The version this step was taken under."""
        return outcome.tell(policy_version=self._versions.current)


@dataclass(frozen=True, slots=True)
class StepCounter(Transform):
    """Count the steps of the episode; step number `max_steps` truncates it: MAX_TURNS."""

    max_steps: int | None = None

    def __post_init__(self) -> None:
        if self.max_steps is not None and self.max_steps < 1:
            raise InvalidConfig(f"max_steps is {self.max_steps}.", remedy="Give at least 1.")

    @property
    def traits(self) -> Traits:
        """The limit."""
        return Traits(max_turns=self.max_steps or 0)

    def reset(self, opening: Opening) -> Opening:
        """None yet."""
        return replace(opening, info={**opening.info, "step_count": "0"})

    async def step(self, outcome: Outcome) -> Outcome:
        """One more."""
        count = outcome.episode.step_index
        outcome = outcome.tell(step_count=str(count))
        if self.max_steps is None or count < self.max_steps:
            return outcome
        return outcome.truncate(DoneReason.MAX_TURNS)


class TemplateTransform(Transform):
    """Show the prompt as text too, rendered by a chat template, beside the messages."""

    def __init__(self, template: ChatTemplate, *, add_generation_prompt: bool = True) -> None:
        self._template = template
        self._opens_turn = add_generation_prompt

    def reset(self, opening: Opening) -> Opening:
        """Text of the opening."""
        return opening.remember(shown_text=self._text(opening))

    async def step(self, outcome: Outcome) -> Outcome:
        """Text of the next prompt."""
        return outcome.remember(shown_text=self._text(outcome))

    def _text(self, shown: Opening | Outcome) -> str:
        history = shown.episode.history
        return self._template.render(history, add_generation_prompt=self._opens_turn)


class TokenizeTransform(Transform):
    """Show the prompt as token ids too: the ids of the rendered text. Goes after TemplateTransform.

    For callers that want ids to look at. What a policy samples is never tokenised again: that is
    tokens mode, or `dialoop.tokens.builder`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def reset(self, opening: Opening) -> Opening:
        """Ids of the opening; none where no text is shown."""
        return opening.remember(shown_tokens=self._ids(opening))

    async def step(self, outcome: Outcome) -> Outcome:
        """Ids of the next prompt."""
        return outcome.remember(shown_tokens=self._ids(outcome))

    def _ids(self, shown: Opening | Outcome) -> tuple[int, ...] | None:
        text = shown.episode.state.get("shown_text")
        return None if text is None else self._tokenizer.encode(text, trusted=True).ids
