"""Transforms that end an episode. Each looks at the policy's own message, never at other text."""

from __future__ import annotations

from dataclasses import dataclass, field

from dialoop.environments.episode import Outcome
from dialoop.environments.tools.answer_tags import tag_text
from dialoop.environments.tools.call_syntax import CallSyntax
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.trajectory import DoneReason


@dataclass(frozen=True, slots=True)
class EndWhenIncomplete(Transform):
    """A message that was cut off (`is_complete` false) truncates the episode: INCOMPLETE."""

    async def step(self, outcome: Outcome) -> Outcome:
        """Look at the last message of the policy."""
        answer = outcome.episode.answer
        if answer is None or answer.is_complete:
            return outcome
        return outcome.truncate(DoneReason.INCOMPLETE)


@dataclass(frozen=True, slots=True)
class EndOnText(Transform):
    """A text in the policy's message terminates the episode: `EndOnText("<submit>")`."""

    text: str = "<submit>"
    reason: DoneReason = DoneReason.SUBMITTED

    @property
    def traits(self) -> Traits:
        """The message stops there."""
        return Traits(stop=(self.text,))

    async def step(self, outcome: Outcome) -> Outcome:
        """Look for the text."""
        found = self.text in outcome.episode.answer_text
        return outcome.terminate(self.reason) if found else outcome


@dataclass(frozen=True, slots=True)
class EndWithoutCall(Transform):
    """A message without a tool call terminates the episode: NO_CALL. Goes after EndOnText."""

    syntax: CallSyntax = field(default_factory=CallSyntax)

    async def step(self, outcome: Outcome) -> Outcome:
        """Look for a call."""
        called = self.syntax.spans(outcome.episode.answer_text)
        return outcome if called else outcome.terminate(DoneReason.NO_CALL)


@dataclass(frozen=True, slots=True)
class EndOnTag(Transform):
    """A whole `<answer>...</answer>` in the policy's message terminates the episode: CONTENT."""

    tag: str = "answer"

    async def step(self, outcome: Outcome) -> Outcome:
        """Look for the block; one that is not closed is none."""
        found = tag_text(outcome.episode.answer_text, self.tag)
        return outcome if found is None else outcome.terminate(DoneReason.CONTENT)


@dataclass(frozen=True, slots=True)
class MaxLength(Transform):
    """A conversation of more than so many characters, or tokens in tokens mode: MAX_LENGTH."""

    limit: int

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise InvalidConfig(f"max_length is {self.limit}.", remedy="Give at least 1.")

    async def step(self, outcome: Outcome) -> Outcome:
        """Measure what the next prompt would be."""
        tokens, text = outcome.tokens, outcome.text
        if tokens is not None and tokens.prompt is not None:
            length = len(tokens.prompt)
        elif text is not None and text.prompt is not None:
            length = len(text.prompt)
        else:
            length = sum(len(message.text) for message in outcome.episode.history)
        return outcome if length <= self.limit else outcome.truncate(DoneReason.MAX_LENGTH)


@dataclass(frozen=True, slots=True)
class MaxTurns(Transform):
    """Turn number `limit` is the last: MAX_TURNS. Goes after ToolCalls, so its answer is kept."""

    limit: int

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise InvalidConfig(f"max_turns is {self.limit}.", remedy="Give at least 1.")

    @property
    def traits(self) -> Traits:
        """The limit."""
        return Traits(max_turns=self.limit)

    async def step(self, outcome: Outcome) -> Outcome:
        """Count the steps taken."""
        if outcome.episode.step_index < self.limit:
            return outcome
        return outcome.truncate(DoneReason.MAX_TURNS)
