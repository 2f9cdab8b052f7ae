"""The running text of one episode in which tools answer inline, and who wrote what.

    history = TextHistory().append_segment("What is 3+4? ", [5, 6], source=Source.PROMPT)
    history = history.append_segment("Result=7<submit>", [9, 2], source=Source.MODEL)
    history.token_masks      # [0, 0, 1, 1]

All values are immutable; a method returns a new history.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidSequence
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion, Sequence, Source, sequence_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dialoop.tokens.tokenizer import Tokenizer
    from dialoop.trajectory import Failure


# Two shades for each author, which alternate from token to token.
_COLOURS = {
    Source.PROMPT: ("grey50", "grey70"),
    Source.MODEL: ("bright_blue", "deep_sky_blue1"),
}
_TOOL_COLOURS = ("green", "cyan3")
_REWARD_COLOUR = "plum1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSegment:
    """A part of the text that has one author.

    logprobs and versions (runs of length and policy version) describe the policy's sampled tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    source: Source
    turn: int = 0
    logprobs: tuple[float, ...] = ()
    versions: tuple[tuple[int, PolicyVersion], ...] = ()

    def __post_init__(self) -> None:
        if not self.text or not self.token_ids:
            raise InvalidSequence(
                f"A segment has {len(self.text)} characters and {len(self.token_ids)} tokens.",
                reason=Reason.EMPTY_SEGMENT,
                remedy="Append no segment when there is no text.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextHistory:
    """The segments of one episode, and how it ended."""

    segments: tuple[TextSegment, ...] = ()
    completed: bool = False
    truncated: bool = False
    reward: float | None = None
    failures: tuple[Failure, ...] = ()

    def append_segment(  # noqa: PLR0913 - columns of the segment
        self,
        text: str,
        token_ids: Iterable[int],
        *,
        source: Source | None = None,
        system: bool = True,
        turn: int = 0,
        logprobs: Iterable[float] = (),
        versions: Iterable[tuple[int, PolicyVersion]] = (),
    ) -> TextHistory:
        """Return the history with one more segment; InvalidSequence (a ValueError) if empty.

        system: without a source, that the model did not write it: the first segment is then the
        prompt, and any other a tool's.
        """
        if source is None:
            others = Source.TOOL if self.segments else Source.PROMPT
            source = others if system else Source.MODEL
        segment = TextSegment(
            text=text,
            token_ids=tuple(token_ids),
            source=source,
            turn=turn,
            logprobs=tuple(logprobs),
            versions=tuple(versions),
        )
        return replace(self, segments=(*self.segments, segment))

    def complete(self, *, truncated: bool = False) -> TextHistory:
        """Return the history as ended; `truncated` if a limit ended it."""
        return replace(self, completed=True, truncated=truncated)

    def with_reward(self, reward: float | None) -> TextHistory:
        """Return the history with its reward, or None if there is none."""
        return replace(self, reward=reward)

    @property
    def text(self) -> str:
        """Return the whole text."""
        return "".join(segment.text for segment in self.segments)

    @property
    def text_spans(self) -> list[tuple[int, int]]:
        """Return start and end of each segment's characters."""
        return _spans(len(segment.text) for segment in self.segments)

    @property
    def system_spans(self) -> list[bool]:
        """Return for each segment whether someone other than the model wrote it."""
        return [segment.source is not Source.MODEL for segment in self.segments]

    @property
    def tokens(self) -> list[int]:
        """Return all token ids."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def token_spans(self) -> list[tuple[int, int]]:
        """Return start and end of each segment's tokens."""
        return _spans(len(segment.token_ids) for segment in self.segments)

    @property
    def token_masks(self) -> list[int]:
        """Return a 1 for each token that the model wrote, else 0."""
        return [
            int(segment.source is Source.MODEL)
            for segment in self.segments
            for _ in segment.token_ids
        ]

    @property
    def last_text_segment(self) -> str:
        """Return the text of the last segment, whoever wrote it; empty without one."""
        return self.segments[-1].text if self.segments else ""

    @property
    def last_model_text(self) -> str:
        """Return the model's last text; empty if it wrote none."""
        written = [s.text for s in self.segments if s.source is Source.MODEL]
        return written[-1] if written else ""

    def split_query_response_tokens(self) -> tuple[list[int], list[int], list[int]]:
        """Return the query's tokens, the tokens after them, and the mask of those."""
        count = len(self.segments[0].token_ids) if self.segments else 0
        return self.tokens[:count], self.tokens[count:], self.token_masks[count:]

    def sequence(self) -> Sequence:
        """Return the token row with its segment table, to train on.

        Tool text is inline, without template tokens. Sampled tokens keep versions and log-probs.
        """
        parts: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        for segment in self.segments:
            if segment.source is not Source.MODEL:
                parts.append((segment.token_ids, {"source": segment.source, "turn": segment.turn}))
                continue
            position = 0
            for length, version in segment.versions:
                run = segment.token_ids[position : position + length]
                fields = {
                    "source": Source.MODEL,
                    "turn": segment.turn,
                    "policy_version": version,
                }
                parts.append((run, fields))
                position += length
            if position != len(segment.token_ids):
                raise InvalidSequence(
                    f"Policy versions cover {position} of {len(segment.token_ids)} sampled tokens.",
                    reason=Reason.RAGGED,
                    remedy="Give (length, version) runs that add up to the segment.",
                )
        logprobs = [value for segment in self.segments for value in segment.logprobs]
        return sequence_of(parts, logprobs=logprobs)

    def show_text(self, *, show_legend: bool = False) -> None:
        """Print the text, coloured by author, and the reward."""
        segments = ((segment.source, [segment.text]) for segment in self.segments)
        _print_segments(segments, self.reward, show_legend=show_legend)

    def show_tokens(self, tokenizer: Tokenizer, *, show_legend: bool = False) -> None:
        """Print the tokens one by one, coloured by author."""
        segments = (
            (segment.source, [tokenizer.decode([token]) for token in segment.token_ids])
            for segment in self.segments
        )
        _print_segments(segments, show_legend=show_legend)

    def show_colour_legend(self) -> None:
        """Print the colour of each author."""
        _print_legend()


def _spans(lengths: Iterable[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(lengths, initial=0)))


def _print_segments(
    segments: Iterable[tuple[Source, Iterable[str]]],
    reward: float | None = None,
    *,
    show_legend: bool,
) -> None:
    """Print segments coloured by author, then the reward; shades alternate within a segment."""
    from rich.console import Console
    from rich.text import Text

    text = Text()
    for source, parts in segments:
        for index, part in enumerate(parts):
            text.append(part, style=_COLOURS.get(source, _TOOL_COLOURS)[index % 2])
    if reward is not None:
        text.append(f"\n\nReward: {reward}", style=_REWARD_COLOUR)
    Console().print(text)
    if show_legend:
        _print_legend()


def _print_legend() -> None:
    from rich.console import Console
    from rich.text import Text

    prompt, model = _COLOURS[Source.PROMPT][0], _COLOURS[Source.MODEL][0]
    names = ("Prompt", prompt), ("System", _TOOL_COLOURS[0]), ("Model", model)
    parts = [part for name in names for part in (name, " ")]
    Console().print(Text.assemble(*parts, ("Reward", _REWARD_COLOUR)))
