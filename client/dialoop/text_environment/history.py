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


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSegment:
    """A stretch of text with one author.

    logprobs and versions (runs of length and policy version) belong to what the policy sampled.
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
                remedy="Append nothing where there is nothing to append.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextHistory:
    """The segments of one episode, and how it ended."""

    segments: tuple[TextSegment, ...] = ()
    completed: bool = False
    truncated: bool = False
    reward: float | None = None
    failures: tuple[Failure, ...] = ()

    def append_segment(
        self,
        text: str,
        token_ids: Iterable[int],
        *,
        source: Source,
        turn: int = 0,
        logprobs: Iterable[float] = (),
        versions: Iterable[tuple[int, PolicyVersion]] = (),
    ) -> TextHistory:
        """This history and one more segment; InvalidSequence (a ValueError) for an empty one."""
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
        """This history, ended; `truncated` when a limit ended it."""
        return replace(self, completed=True, truncated=truncated)

    def rewarded(self, reward: float | None) -> TextHistory:
        """This history with its reward; None where none could be given."""
        return replace(self, reward=reward)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(segment.text for segment in self.segments)

    @property
    def text_spans(self) -> list[tuple[int, int]]:
        """Start and end of each segment's characters."""
        return _spans(len(segment.text) for segment in self.segments)

    @property
    def system_spans(self) -> list[bool]:
        """Per segment: whether somebody other than the model wrote it."""
        return [segment.source is not Source.MODEL for segment in self.segments]

    @property
    def tokens(self) -> list[int]:
        """All token ids."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def token_spans(self) -> list[tuple[int, int]]:
        """Start and end of each segment's tokens."""
        return _spans(len(segment.token_ids) for segment in self.segments)

    @property
    def token_masks(self) -> list[int]:
        """Per token: 1 where the model wrote it."""
        return [
            int(segment.source is Source.MODEL)
            for segment in self.segments
            for _ in segment.token_ids
        ]

    @property
    def last_text_segment(self) -> str:
        """The text of the last segment, whoever wrote it; empty without one."""
        return self.segments[-1].text if self.segments else ""

    @property
    def last_model_text(self) -> str:
        """The text the model wrote last; empty when it wrote none."""
        written = [s.text for s in self.segments if s.source is Source.MODEL]
        return written[-1] if written else ""

    def split_query_response_tokens(self) -> tuple[list[int], list[int], list[int]]:
        """The query's tokens, all that followed, and the mask of what followed."""
        count = len(self.segments[0].token_ids) if self.segments else 0
        return self.tokens[:count], self.tokens[count:], self.token_masks[count:]

    def sequence(self) -> Sequence:
        """The token row with its segment table: what is trained.

        Tool text stands inline, without glue. Sampled tokens keep their versions and log-probs.
        """
        pieces: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        for segment in self.segments:
            if segment.source is not Source.MODEL:
                pieces.append((segment.token_ids, {"source": segment.source, "turn": segment.turn}))
                continue
            position = 0
            for length, version in segment.versions:
                run = segment.token_ids[position : position + length]
                fields = {
                    "source": Source.MODEL,
                    "turn": segment.turn,
                    "policy_version": version,
                }
                pieces.append((run, fields))
                position += length
            if position != len(segment.token_ids):
                raise InvalidSequence(
                    f"Policy versions cover {position} of {len(segment.token_ids)} sampled tokens.",
                    reason=Reason.RAGGED,
                    remedy="Give (length, version) runs that add up to the segment.",
                )
        logprobs = [value for segment in self.segments for value in segment.logprobs]
        return sequence_of(pieces, logprobs=logprobs)

    def show_text(self, *, show_legend: bool = False) -> None:
        """Print the text, coloured by author, and the reward."""
        from dialoop.text_environment.display import print_text

        segments = ((segment.source, [segment.text]) for segment in self.segments)
        print_text(segments, self.reward, show_legend=show_legend)

    def show_tokens(self, tokenizer: Tokenizer, *, show_legend: bool = False) -> None:
        """Print the tokens one by one, coloured by author."""
        from dialoop.text_environment.display import print_text

        segments = (
            (segment.source, [tokenizer.decode([token]) for token in segment.token_ids])
            for segment in self.segments
        )
        print_text(segments, show_legend=show_legend)

    def show_colour_legend(self) -> None:
        """Print which colour is whose."""
        from dialoop.text_environment.display import print_legend

        print_legend()


def _spans(lengths: Iterable[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(lengths, initial=0)))
