"""One turn of a conversation as text, tokens, log-probs and masks; nothing is padded.

    view = TurnView.of_turn(trajectory, 0, tokenizer)
    view.tokens.response          # (11, 12): what was sampled
    view.log_probs.response       # LogProbRow with values [-0.5, -1.25], start 0
    view.masks.all_assistant_mask # True on what the policy sampled, aligned with tokens.full

See `dialoop_extras.padding` for padded rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dialoop.chat import ChatHistory, History
from dialoop.environments.modes import Text as Text
from dialoop.environments.modes import Tokens as Tokens
from dialoop.errors import InvalidInput, NotFound
from dialoop.reasons import Reason
from dialoop.sequences import Floats, ForkCause, Mask, Sequence, Source
from dialoop.templates.parts import not_prefix

if TYPE_CHECKING:
    from dialoop.episode import Sample
    from dialoop.tokens.tokenizer import Tokenizer
    from dialoop.trajectory import Distribution, SamplingParams, Trajectory


_LOOK_BACK = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogProbRow:
    """Log-probs in nats, float32 [N], of the tokens from position `start` of their row on.

    The token at position 0 of a conversation has none; what is not here is unknown, never 0.
    """

    values: Floats
    start: int = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LogProbRow):
            return NotImplemented
        return self.start == other.start and np.array_equal(self.values, other.values)

    __hash__ = None  # type: ignore[assignment]  # holds an array

    def align(self, length: int) -> Floats:
        """Return a value for each of `length` tokens, float32 [length]; NaN where unknown."""
        if self.start < 0 or self.start + len(self.values) > length:
            raise InvalidInput(
                f"{len(self.values)} log-probs from position {self.start} on do not fit "
                f"{length} tokens.",
                reason=Reason.RAGGED,
                remedy="Give the number of tokens of the same row.",
            )
        row = np.full(length, np.nan, dtype=np.float32)
        row[self.start : self.start + len(self.values)] = self.values
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbs:
    """Log-probs of prompt, response and full; `None` is unknown.

    temperature_scaled: the sampling temperature was applied before the values were taken, so that
    they are the policy's own only at temperature 1.
    distribution: RAW is the policy's own, PROCESSED what was sampled from; `None` is unknown.
    """

    prompt: LogProbRow | None = None
    response: LogProbRow | None = None
    full: LogProbRow | None = None
    temperature_scaled: bool = False
    distribution: Distribution | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "full"):
            row: LogProbRow | None = getattr(self, name)
            if row is not None and row.start == 0 and len(row.values):
                raise InvalidInput(
                    f"The first token of {name} has a log-prob: nothing stands before it.",
                    reason=Reason.FIRST_TOKEN_HAS_LOGPROB,
                    remedy="Let the values start at position 1.",
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Masks:
    """Bool [L] each, aligned with the full tokens: what is a token, and what the policy sampled."""

    all_attention_mask: Mask | None = None
    all_assistant_mask: Mask | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Masks):
            return NotImplemented
        return _same(self.all_attention_mask, other.all_attention_mask) and _same(
            self.all_assistant_mask, other.all_assistant_mask
        )

    __hash__ = None  # type: ignore[assignment]  # holds arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One turn in every form; text is absent without a tokenizer.

    history is absent where the recorded history no longer shows the turn as it was.
    """

    tokens: Tokens
    log_probs: LogProbs
    masks: Masks
    history: ChatHistory | None = None
    text: Text | None = None

    @classmethod
    def of_sample(
        cls,
        sample: Sample,
        *,
        context: Sequence | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> TurnView:
        """Make the view of a policy's answer; `context` is what was sent with the prompt."""
        whole = sample.sequence
        if context is not None and whole.fork_cause is ForkCause.NONE:
            whole = context.extended_by(whole)
        start = len(whole) - sum(
            s.length for s in sample.sequence.segments if s.source is Source.MODEL
        )
        return _view(whole, start, len(whole), sample.history, sample.sampling, tokenizer)

    @classmethod
    def of_turn(
        cls, trajectory: Trajectory, turn: int, tokenizer: Tokenizer | None = None
    ) -> TurnView:
        """Make the view of a turn from the sequence that owns its tokens; NotFound without one."""
        for sequence in trajectory.sequences:
            sampled = [s for s in sequence.segments if s.source is Source.MODEL and s.turn == turn]
            if sampled:
                history = _turn_history(trajectory.history, sampled[0].message_index)
                start, end = sampled[0].start, sampled[-1].end
                return _view(sequence, start, end, history, trajectory.sampling, tokenizer)
        raise NotFound(
            f"Nothing was sampled in turn {turn} of trajectory {trajectory.trajectory_id}.",
            reason=Reason.TURN_NOT_FOUND,
            remedy="Ask for a turn below the number of turns that have sampled tokens.",
        )


def text_of_tokens(tokens: Tokens, tokenizer: Tokenizer) -> Text:
    """Decode unpadded ids; PROMPT_NOT_PREFIX where a character is split between the parts."""
    prompt = None if tokens.prompt is None else tokenizer.decode(tokens.prompt)
    full = None if tokens.full is None else tokenizer.decode(tokens.full)
    if tokens.response is None:
        return Text(prompt=prompt, full=full)
    response = tokenizer.decode_after((tokens.prompt or ())[-_LOOK_BACK:], tokens.response)
    if prompt is not None and full is not None and full != prompt + response:
        raise not_prefix("text")
    return Text(prompt=prompt, response=response, full=full)


def _view(
    sequence: Sequence,
    start: int,
    end: int,
    history: ChatHistory | None,
    sampling: SamplingParams,
    tokenizer: Tokenizer | None,
) -> TurnView:
    ids = tuple(sequence.token_ids[:end].tolist())
    tokens = Tokens(prompt=ids[:start], response=ids[start:], full=ids)
    mask = sequence.response_mask()
    return TurnView(
        history=history,
        tokens=tokens,
        text=None if tokenizer is None else text_of_tokens(tokens, tokenizer),
        log_probs=_logprobs(sequence, mask, start, end, sampling),
        masks=Masks(all_attention_mask=np.ones(end, dtype=np.bool_), all_assistant_mask=mask[:end]),
    )


def _logprobs(
    sequence: Sequence, mask: Mask, start: int, end: int, sampling: SamplingParams
) -> LogProbs:
    scaled = sampling.temperature != 0  # greedy answers report log-probs at temperature 1
    if not len(sequence.inference_logprobs):
        return LogProbs(temperature_scaled=scaled, distribution=sampling.distribution)
    first = int(mask[:start].sum())
    values = sequence.inference_logprobs[first : first + int(mask[start:end].sum())]
    return LogProbs(
        response=LogProbRow(values=values, start=0),
        full=LogProbRow(values=values, start=start) if start else None,
        temperature_scaled=scaled,
        distribution=sampling.distribution,
    )


def _turn_history(history: History, index: int | None) -> ChatHistory | None:
    if index is None or index >= len(history) or history[index].role != "assistant":
        return None
    return ChatHistory(prompt=history[:index]).respond(history[index])


def _same(left: Mask | None, right: Mask | None) -> bool:
    if left is None or right is None:
        return left is right
    return np.array_equal(left, right)
