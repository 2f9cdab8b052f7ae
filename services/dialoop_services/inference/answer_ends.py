"""Where an answer ends by what it says: at a stop string outside of its thoughts, after a call.

The tokens are read as those who show the answer read them, so that what is sampled ends where it is
shown to end. An engine gets this as `StopTokens.watch`; what it samples without it is ended here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from dialoop.answers import AnswerForm, AnswerReader
from dialoop.trajectory import SamplingParams, StopReason

from dialoop_services.inference.engine import (
    Engine,
    OnTokens,
    Sampled,
    StopTokens,
    SupportsStreaming,
    SupportsWatch,
    TokenChunk,
    VersionSpan,
    Watch,
)

if TYPE_CHECKING:
    from dialoop.chat import ToolDefinition
    from dialoop.tokens.tokenizer import Tokenizer

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """Where an answer ends: after so many tokens, at this stop string."""

    num_tokens: int
    stop_string: str


def watch_for(
    strings: tuple[str, ...],
    form: AnswerForm,
    tokenizer: Tokenizer,
    tools: Sequence[ToolDefinition] = (),
    *,
    in_reasoning: bool = False,
    ends_with_call: bool = False,
) -> Watch:
    """Return what finds the first of these strings, or the end of the first call.

    in_reasoning: strings are looked for in thoughts too.
    """
    form = form if ends_with_call else replace(form, reads_calls=False)
    reader = AnswerReader(form, tokenizer, tools, cut=strings, cuts_thoughts=in_reasoning)

    def watch(token_id: int) -> str | None:
        reader.add((token_id,))
        has_called = ends_with_call and reader.take().calls
        return "" if has_called else reader.stop_string

    return watch


def first_end(watch: Watch, token_ids: Iterable[int]) -> AnswerEnd | None:
    """Return where `watch` ends these tokens; None where it does not."""
    for count, token in enumerate(token_ids, 1):
        stop_string = watch(token)
        if stop_string is not None:
            return AnswerEnd(count, stop_string)
    return None


def cut_at(sampled: Sampled, end: AnswerEnd | None) -> Sampled:
    """Return the answer up to its end."""
    if end is None:
        return sampled
    return replace(
        sampled,
        token_ids=sampled.token_ids[: end.num_tokens],
        logprobs=sampled.logprobs[: end.num_tokens],
        top_logprobs=sampled.top_logprobs[: end.num_tokens],
        versions=first_spans(sampled.versions, end.num_tokens),
        stop_reason=StopReason.STOP,
        stop_string=end.stop_string,
    )


def first_spans(spans: Iterable[VersionSpan], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Return the spans of the first tokens."""
    return tuple(
        replace(span, length=min(span.length, num_tokens - span.start))
        for span in spans
        if span.start < num_tokens
    )


def merged_spans(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Return the spans with neighbours of one version as one."""
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].policy_version == span.policy_version:
            merged[-1] = replace(merged[-1], length=merged[-1].length + span.length)
        else:
            merged.append(span)
    return tuple(merged)


async def sample_with(
    engine: Engine,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    stop: StopTokens,
    num_samples: int = 1,
    on_tokens: OnTokens | None = None,
    **extra: Any,
) -> tuple[Sampled, ...]:
    """Sample with an engine; `extra` are arguments that it takes.

    Where it does not watch its answers, they are broken off as they stream, or cut when whole.
    """
    if stop.watch is not None and not isinstance(engine, SupportsWatch):
        if isinstance(engine, SupportsStreaming):

            def one(own: SamplingParams) -> Awaitable[Sampled]:
                return _break_off(engine, prompt_ids, own, stop, on_tokens, extra)

            return await sample_each(one, sampling, num_samples)
        begin = stop.watch
        whole = await engine.sample(
            prompt_ids, sampling, stop=stop, num_samples=num_samples, **extra
        )
        return tuple(cut_at(each, first_end(begin(), each.token_ids)) for each in whole)
    if on_tokens is not None and isinstance(engine, SupportsStreaming):
        return (await engine.stream(prompt_ids, sampling, stop=stop, on_tokens=on_tokens, **extra),)
    return await engine.sample(prompt_ids, sampling, stop=stop, num_samples=num_samples, **extra)


async def sample_each(
    one: Callable[[SamplingParams], Awaitable[Sampled]], sampling: SamplingParams, num_samples: int
) -> tuple[Sampled, ...]:
    """Sample by a call each, seeded as an engine seeds the samples of one prompt."""
    seed = sampling.seed
    return tuple(
        await all_of(
            one(sampling if seed is None else replace(sampling, seed=seed + index))
            for index in range(num_samples)
        )
    )


async def all_of(calls: Iterable[Awaitable[_T]]) -> list[_T]:
    """Return the results of all; at the first error stop the others and raise it."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _break_off(
    engine: SupportsStreaming,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    stop: StopTokens,
    on_tokens: OnTokens | None,
    extra: dict[str, Any],
) -> Sampled:
    """Stream one sample, and cancel it at the token with which it ends."""
    assert stop.watch is not None
    watch, chunks, end = stop.watch(), list[TokenChunk](), None

    def take(chunk: TokenChunk) -> None:
        nonlocal end
        if end is not None:
            return
        end = first_end(watch, chunk.token_ids)
        if end is not None:
            streaming.cancel()
            count = end.num_tokens
            chunk = replace(
                chunk,
                token_ids=chunk.token_ids[:count],
                logprobs=chunk.logprobs[:count],
                top_logprobs=chunk.top_logprobs[:count],
            )
        chunks.append(chunk)
        if on_tokens is not None:
            on_tokens(chunk)

    streaming = asyncio.ensure_future(
        engine.stream(prompt_ids, sampling, stop=stop, on_tokens=take, **extra)
    )
    try:
        await asyncio.wait({streaming})
    finally:
        streaming.cancel()
    if end is None:
        return streaming.result()
    spans, start = list[VersionSpan](), 0
    for chunk in chunks:
        length = len(chunk.token_ids)
        spans.append(VersionSpan(start=start, length=length, policy_version=chunk.policy_version))
        start += length
    return Sampled(
        token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        top_logprobs=tuple(chain.from_iterable(chunk.top_logprobs for chunk in chunks)),
        versions=merged_spans(spans),
        stop_reason=StopReason.STOP,
        stop_string=end.stop_string,
    )
