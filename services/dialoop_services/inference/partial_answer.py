"""Go on with an answer that another replica began, as if one replica had sampled all of it.

Each token keeps the log-prob and the version of the replica that sampled it. The new tokens are
drawn from the policy's distribution after all that came before, so the answer is distributed as one
that nobody broke off. An engine does not look for stop strings in its prompt: a stop string that
begins in the old tokens and ends in the new ones is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.sequences import Sequence as TokenRow
from dialoop.sequences import Source
from dialoop.trajectory import SamplingParams, StopReason

from dialoop_services.inference.answer_ends import AnswerEnd, cut_at, first_end, merged_spans
from dialoop_services.inference.engine import Sampled, StopTokens, VersionSpan, Watch

Decode = Callable[[Sequence[int]], str]


class Sampler(Protocol):
    """Continue token ids: an engine's `sample`, or a replica's."""

    async def __call__(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stop: StopTokens,
        num_samples: int = 1,
    ) -> tuple[Sampled, ...]:
        """Sample `num_samples` continuations."""


def require_continuable(part: TokenRow, sampling: SamplingParams, *, num_samples: int) -> None:
    """Raise InvalidInput (BAD_PARTIAL_ANSWER) for what cannot be the beginning of one answer."""
    problem = ""
    if any(segment.source is not Source.MODEL for segment in part.segments):
        problem = "`partial_answer` has tokens that no policy sampled"
    elif len(part.inference_logprobs) != len(part.token_ids):
        problem = (
            f"`partial_answer` has {len(part)} tokens and {len(part.inference_logprobs)} log-probs"
        )
    elif num_samples != 1:
        problem = f"`partial_answer` stands beside num_samples = {num_samples}"
    elif sampling.constraint or sampling.top_logprobs:
        field = "constraint" if sampling.constraint else "top_logprobs"
        problem = f"`partial_answer` stands beside {field}"
    elif sampling.seed is not None:
        # The seed would draw the new tokens with the random numbers of the first ones.
        problem = "`partial_answer` stands beside seed"
    if problem:
        raise InvalidInput(
            f"{problem}.",
            reason=Reason.BAD_PARTIAL_ANSWER,
            remedy="Send the sampled tokens with their log-probs, or sample the answer anew.",
        )


async def go_on(
    part: TokenRow,
    sample: Sampler,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    stop: StopTokens,
    decode: Decode,
) -> Sampled:
    """Return the answer that `part` and what is sampled after it are together.

    Nothing is sampled where the answer had ended already, and only its last message was lost.
    """
    before = _sampled_of(part)
    end = _first_end(before.token_ids, stop, decode)
    if end is not None:
        return cut_at(before, end)
    room = sampling.max_new_tokens
    if room is not None and len(before.token_ids) >= room:
        return before
    left = None if room is None else room - len(before.token_ids)
    begin = stop.watch

    def go_on_watching() -> Watch:
        assert begin is not None
        watch = begin()
        first_end(watch, before.token_ids)
        return watch

    (after,) = await sample(
        [*prompt_ids, *before.token_ids],
        replace(sampling, max_new_tokens=left),
        stop=replace(stop, watch=begin and go_on_watching),
    )
    whole = _join(before, after)
    return cut_at(whole, _first_end(whole.token_ids, stop, decode, first=len(before.token_ids)))


def _sampled_of(part: TokenRow) -> Sampled:
    versions = []
    for segment in part.segments:
        assert segment.policy_version is not None  # a sequence has one on every MODEL segment
        versions.append(
            VersionSpan(
                start=segment.start, length=segment.length, policy_version=segment.policy_version
            )
        )
    return Sampled(
        token_ids=tuple(part.token_ids.tolist()),
        logprobs=tuple(part.inference_logprobs.tolist()),
        versions=merged_spans(versions),
        stop_reason=StopReason.LENGTH,
    )


def _join(before: Sampled, after: Sampled) -> Sampled:
    offset = len(before.token_ids)
    spans = [*before.versions, *(replace(s, start=s.start + offset) for s in after.versions)]
    is_full = after.stop_reason is StopReason.CONTEXT_FULL
    return replace(
        after,
        token_ids=before.token_ids + after.token_ids,
        logprobs=before.logprobs + after.logprobs,
        versions=merged_spans(spans),
        # The context was full after the old tokens: that ends an answer as its limit does.
        stop_reason=StopReason.LENGTH if is_full else after.stop_reason,
    )


def _first_end(
    token_ids: Sequence[int], stop: StopTokens, decode: Decode, *, first: int = 0
) -> AnswerEnd | None:
    """Return where an answer stops, looking at the tokens from `first` on; None where it does not.

    It ends at the first stop token, or at the token that completes a stop string.
    """
    longest = max((len(string.encode()) for string in stop.strings), default=0)
    watch = stop.watch and stop.watch()
    for index, token in enumerate(token_ids):
        found = watch and watch(token)
        if index < first:
            continue
        if token in stop.by_id:
            return AnswerEnd(index + 1, stop.by_id[token])
        if found is not None:
            return AnswerEnd(index + 1, found)
        if longest:  # a token is at least a byte
            text = decode(token_ids[max(0, index - longest) : index + 1])
            for string in stop.strings:
                if string in text:
                    return AnswerEnd(index + 1, string)
    return None
