"""Facts for the caller beside the messages: policy version, step count, rendered prompt.

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
    """A version, and when it began to hold, in seconds since 1970."""

    version: str
    at_s: float


class PolicyVersions:
    """The current version of the policy and the earlier ones; only the trainer's side writes it.

    With kind "int" the version starts at 0 and `advance` adds 1; with "uuid" it is a random name.
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
        """Return the current version."""
        return self._history[-1].version

    @property
    def history(self) -> tuple[VersionChange, ...]:
        """Return all versions, oldest first."""
        return tuple(self._history)

    def advance(self) -> str:
        """Move to the next version after a complete weight update, and return it."""
        is_int = self._kind == "int"
        return self.set(str(int(self.current) + 1) if is_int else uuid.uuid4().hex)

    def set(self, version: str) -> str:
        """Set the version that the trainer published, such as "main/7", and return it."""
        if version != self.current:
            self._history.append(VersionChange(version=version, at_s=self._clock()))
        return version


class PolicyVersionStamp(Transform):
    """Report the policy version at reset and at every step."""

    def __init__(self, versions: PolicyVersions) -> None:
        self._versions = versions

    def reset(self, opening: Opening) -> Opening:
        """Add the version at the episode's start."""
        return replace(opening, info={**opening.info, "policy_version": self._versions.current})

    async def step(self, outcome: Outcome) -> Outcome:
        """Add the version at this step."""
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
        """Return the turn limit."""
        return Traits(max_turns=self.max_steps or 0)

    def reset(self, opening: Opening) -> Opening:
        """Start the count at 0."""
        return replace(opening, info={**opening.info, "step_count": "0"})

    async def step(self, outcome: Outcome) -> Outcome:
        """Add the number of steps, and truncate at the limit."""
        count = outcome.episode.step_index
        outcome = outcome.tell(step_count=str(count))
        if self.max_steps is None or count < self.max_steps:
            return outcome
        return outcome.truncate(DoneReason.MAX_TURNS)


class TemplateTransform(Transform):
    """Add the prompt as text, rendered by a chat template, beside the messages."""

    def __init__(self, template: ChatTemplate, *, add_generation_prompt: bool = True) -> None:
        self._template = template
        self._opens_turn = add_generation_prompt

    def reset(self, opening: Opening) -> Opening:
        """Add the text of the opening."""
        return opening.remember(shown_text=self._text(opening))

    async def step(self, outcome: Outcome) -> Outcome:
        """Add the text of the next prompt."""
        return outcome.remember(shown_text=self._text(outcome))

    def _text(self, shown: Opening | Outcome) -> str:
        history = shown.episode.history
        return self._template.render(history, add_generation_prompt=self._opens_turn)


class TokenizeTransform(Transform):
    """Add the prompt as the token ids of its rendered text; place it after TemplateTransform.

    The ids are for reading. A policy that samples from exact ids needs tokens mode, or
    `dialoop.tokens.builder`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def reset(self, opening: Opening) -> Opening:
        """Add the ids of the opening, if there is a rendered text."""
        return opening.remember(shown_tokens=self._ids(opening))

    async def step(self, outcome: Outcome) -> Outcome:
        """Add the ids of the next prompt."""
        return outcome.remember(shown_tokens=self._ids(outcome))

    def _ids(self, shown: Opening | Outcome) -> tuple[int, ...] | None:
        text = shown.episode.state.get("shown_text")
        return None if text is None else self._tokenizer.encode(text, trusted=True).ids
