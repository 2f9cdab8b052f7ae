"""Transforms that end an episode. They read only the policy's own message or the length."""

from __future__ import annotations

from dataclasses import dataclass, field

from dialoop.environments.episode import Outcome
from dialoop.environments.tools.answer_tags import tag_text
from dialoop.environments.tools.text_tools import CallSyntax
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.trajectory import DoneReason


@dataclass(frozen=True, slots=True)
class EndWhenIncomplete(Transform):
    """Truncate the episode (INCOMPLETE) after a message that was cut off: `is_complete` false."""

    async def step(self, outcome: Outcome) -> Outcome:
        """Look at the last message of the policy."""
        answer = outcome.episode.answer
        if answer is None or answer.is_complete:
            return outcome
        return outcome.truncate(DoneReason.INCOMPLETE)


@dataclass(frozen=True, slots=True)
class EndOnText(Transform):
    """Terminate the episode when the policy's message holds a text: `EndOnText("<submit>")`."""

    text: str = "<submit>"
    reason: DoneReason = DoneReason.SUBMITTED

    @property
    def traits(self) -> Traits:
        """Return the text as a stop string."""
        return Traits(stop=(self.text,))

    async def step(self, outcome: Outcome) -> Outcome:
        """Look for the text."""
        is_there = self.text in outcome.episode.answer_text
        return outcome.terminate(self.reason) if is_there else outcome


@dataclass(frozen=True, slots=True)
class EndWithoutCall(Transform):
    """Terminate the episode (NO_CALL) at a message without a call; place it after EndOnText."""

    syntax: CallSyntax = field(default_factory=CallSyntax)

    async def step(self, outcome: Outcome) -> Outcome:
        """Look for a call."""
        spans = self.syntax.spans(outcome.episode.answer_text)
        return outcome if spans else outcome.terminate(DoneReason.NO_CALL)


@dataclass(frozen=True, slots=True)
class EndOnTag(Transform):
    """Terminate the episode (CONTENT) at a whole `<answer>...</answer>` that is not empty."""

    tag: str = "answer"

    async def step(self, outcome: Outcome) -> Outcome:
        """Look for a block that is closed."""
        content = tag_text(outcome.episode.answer_text, self.tag)
        return outcome if content is None else outcome.terminate(DoneReason.CONTENT)


@dataclass(frozen=True, slots=True)
class OneTurn(Transform):
    """Terminate the episode (CONTENT) after the policy's message: the task is to answer once.

    Place it after EndWhenIncomplete: an answer that was cut off is truncated.
    """

    @property
    def traits(self) -> Traits:
        """Return that there is one turn."""
        return Traits(max_turns=1)

    async def step(self, outcome: Outcome) -> Outcome:
        """End the episode."""
        return outcome.terminate(DoneReason.CONTENT)


@dataclass(frozen=True, slots=True)
class MaxLength(Transform):
    """Truncate (MAX_LENGTH) after more than `limit` characters, or tokens in tokens mode."""

    limit: int

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise InvalidConfig(f"max_length is {self.limit}.", remedy="Use 1 or more.")

    async def step(self, outcome: Outcome) -> Outcome:
        """Measure the next prompt."""
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
    """Truncate (MAX_TURNS) after turn `limit`; place it after ToolCalls, to keep its answer.

    A task that is to be answered once ends by OneTurn: it is over then, and not cut off.
    """

    limit: int

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise InvalidConfig(f"max_turns is {self.limit}.", remedy="Use 1 or more.")

    @property
    def traits(self) -> Traits:
        """Return the turn limit."""
        return Traits(max_turns=self.limit)

    async def step(self, outcome: Outcome) -> Outcome:
        """Compare the number of steps with the limit."""
        if outcome.episode.step_index < self.limit:
            return outcome
        return outcome.truncate(DoneReason.MAX_TURNS)
