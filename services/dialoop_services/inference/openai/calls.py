"""Answering calls: sample, record, tell; whole or as a stream.

Whatever ends a call (an answer, a refusal, a caller who leaves, a dying engine) its recording is
told, and the engine's slot is free.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dialoop.errors import DialoopError, InvalidInput, Unavailable
from dialoop.reasons import Reason
from dialoop.trajectory import Failure, Owner, StopReason

from dialoop_services.inference.openai.answers import (
    Head,
    Told,
    chat_choice,
    finish_reason,
    text_choice,
    usage,
)
from dialoop_services.inference.openai.errors import ContextTooLong
from dialoop_services.inference.openai.streaming import (
    CallIds,
    Reader,
    RunningChoice,
    is_complete,
    message_of,
)
from dialoop_services.inference.recordings.store import CallState, Choice

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator

    from dialoop.trajectory import SamplingParams

    from dialoop_services.inference.engine import OnTokens, Sampled, TokenChunk
    from dialoop_services.inference.recordings.store import CallPrompt, CallRecord, Recording
    from dialoop_services.inference.rendering import Renderer
    from dialoop_services.inference.replica.replica import Replica
    from dialoop_services.rest.http_routes import HttpRequest

_WHY = {
    Reason.CALLER_LEFT: (Owner.COLLECTOR, "The caller left before the answer was whole."),
    Reason.DEADLINE_EXCEEDED: (Owner.INFERENCE, "The answer took longer than the caller waits."),
    Reason.STOPPING: (Owner.INFERENCE, "The service stopped before the answer was whole."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptJob:
    """One prompt to be answered `num_choices` times."""

    prompt: CallPrompt
    reader: Reader
    recording: Recording | None
    call: CallRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request: its prompts, how to sample, and how to tell."""

    head: Head
    parts: tuple[PromptJob, ...]
    sampling: SamplingParams
    num_choices: int
    told: Told
    adapter: str = ""
    with_prompt_ids: bool = False
    with_usage: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(part.prompt.num_tokens for part in self.parts)

    def prompt_ids(self) -> dict[str, Any]:
        """The prompts' ids, where they were asked for."""
        if not self.with_prompt_ids:
            return {}
        rows = [part.prompt.prompt.sequence.token_ids.tolist() for part in self.parts]
        return {"prompt_token_ids": rows[0] if len(rows) == 1 else rows}


class Answering:
    """Answers jobs with a replica."""

    def __init__(self, replica: Replica, renderer: Renderer) -> None:
        self._replica = replica
        self._renderer = renderer

    def require_room(self, part: PromptJob) -> None:
        """ContextTooLong when the prompt leaves no room, which its recording remembers."""
        limit = self._replica.engine.max_model_len
        if part.prompt.num_tokens < limit:
            return
        if part.recording is not None and part.call is not None:
            part.recording.not_sampled(part.call, CallState.CONTEXT_FULL)
        raise ContextTooLong(
            f"The prompt has {part.prompt.num_tokens} tokens, which leaves no room in the context "
            f"of {limit}.",
            remedy="Send a shorter conversation, or start the service with a larger context.",
        )

    async def whole(self, job: Job, request: HttpRequest) -> dict[str, Any]:
        """The answer as one document."""
        started = time.perf_counter()
        choices: list[dict[str, Any]] = []
        num_sampled = 0
        with _told_to_recordings(job, request):
            for part in job.parts:
                self.require_room(part)
            answers = await _all(
                [
                    self.sample(part, job.sampling, adapter=job.adapter, num=job.num_choices)
                    for part in job.parts
                ]
            )
            for part, sampled in zip(job.parts, answers, strict=True):
                ids = [CallIds() for _ in sampled]
                self.record(part, sampled, ids, time.perf_counter() - started)
                num_sampled += sum(len(one.token_ids) for one in sampled)
                for one, call_ids in zip(sampled, ids, strict=True):
                    choices.append(_choice(job, part, one, call_ids, index=len(choices)))
        numbers = usage(job.num_prompt_tokens, num_sampled)
        return {**job.head.document(choices), "usage": numbers, **job.prompt_ids()}

    async def stream(self, job: Job, request: HttpRequest) -> AsyncGenerator[dict[str, Any], None]:
        """The answer chunk by chunk."""
        with _told_to_recordings(job, request):
            for part in job.parts:
                self.require_room(part)
            running = _Running(self, job)
            try:
                first = job.prompt_ids()
                async for choice in running.choices():
                    yield {**job.head.document([choice], is_chunk=True), **first}
                    first = {}
            finally:
                running.cancel()  # a caller who leaves frees the engine's slots
        if job.with_usage:
            numbers = usage(job.num_prompt_tokens, running.num_sampled)
            yield {**job.head.document([], is_chunk=True), "usage": numbers}

    async def sample(
        self,
        part: PromptJob,
        sampling: SamplingParams,
        *,
        adapter: str,
        num: int = 1,
        on_tokens: OnTokens | None = None,
    ) -> list[Sampled]:
        """Samples of one prompt; `on_tokens` sees the tokens as they come (one sample only)."""
        sampled = await self._replica.sample(
            part.prompt.prompt.sequence.token_ids.tolist(),
            sampling,
            stop=self._renderer.stop_tokens(sampling.stop),
            num_samples=num,
            on_tokens=on_tokens,
            adapter=adapter,
        )
        if any(one.stop_reason is StopReason.CANCELLED for one in sampled):
            raise Unavailable("The engine gave the sample up.", reason=Reason.CANCELLED)
        return list(sampled)

    def record(
        self, part: PromptJob, sampled: list[Sampled], ids: list[CallIds], generate_s: float
    ) -> None:
        """Keep the finished answers of a prompt."""
        if part.recording is None or part.call is None:
            return
        choices = tuple(
            Choice(
                sample=replace(
                    self._renderer.sample(part.prompt.prompt, one),
                    sampling=part.call.sampling,
                    generate_s=generate_s,
                    update_mode=one.update_mode,
                ),
                given=message_of(
                    part.reader.syntax.read(part.reader.text_of(one)),
                    call_ids,
                    is_complete=is_complete(one),
                ),
            )
            for one, call_ids in zip(sampled, ids, strict=True)
        )
        part.recording.answered(part.call, choices, generate_s=generate_s)


class _Running:
    """The samples of a stream: one task each, and one queue of what they give.

    Filled by the engine's callbacks, drained by the answering task; at most the tokens of the
    stream wait in it.
    """

    def __init__(self, answering: Answering, job: Job) -> None:
        self._answering = answering
        self._job = job
        self._started = time.perf_counter()
        self._events: asyncio.Queue[tuple[int, TokenChunk | None]] = asyncio.Queue()
        self._choices = [
            RunningChoice(
                index=index, reader=job.parts[index // job.num_choices].reader, told=job.told
            )
            for index in range(len(job.parts) * job.num_choices)
        ]
        self._tasks = [self._start(choice.index) for choice in self._choices]
        self.num_sampled = 0

    async def choices(self) -> AsyncIterator[dict[str, Any]]:
        """What each event makes, until all samples have ended."""
        num_left = len(self._tasks)
        while num_left:
            index, tokens = await self._events.get()
            if tokens is not None:
                chunk = self._choices[index].add(tokens)
                if chunk is not None:
                    yield chunk
                continue
            num_left -= 1
            (sampled,) = self._tasks[index].result()
            self.num_sampled += len(sampled.token_ids)
            last = self._choices[index].finish(sampled)
            self._record(index // self._job.num_choices)
            yield last

    def cancel(self) -> None:
        """Stop what still runs."""
        for task in self._tasks:
            task.cancel()

    def _start(self, index: int) -> asyncio.Task[list[Sampled]]:
        part = self._job.parts[index // self._job.num_choices]
        seed = self._job.sampling.seed
        sampling = self._job.sampling
        if seed is not None:  # as the engine seeds the samples of one prompt
            sampling = replace(sampling, seed=seed + index % self._job.num_choices)

        def on_tokens(tokens: TokenChunk) -> None:
            self._events.put_nowait((index, tokens))

        task = asyncio.ensure_future(
            self._answering.sample(part, sampling, adapter=self._job.adapter, on_tokens=on_tokens)
        )
        task.add_done_callback(lambda _: self._events.put_nowait((index, None)))
        return task

    def _record(self, number: int) -> None:
        """Keep a prompt's answers once all of its samples have ended."""
        first = number * self._job.num_choices
        indices = range(first, first + self._job.num_choices)
        if not all(self._tasks[i].done() for i in indices):
            return
        if any(self._tasks[i].cancelled() or self._tasks[i].exception() for i in indices):
            return
        seconds = time.perf_counter() - self._started
        sampled = [self._tasks[i].result()[0] for i in indices]
        ids = [self._choices[i].call_ids for i in indices]
        self._answering.record(self._job.parts[number], sampled, ids, seconds)


def _choice(
    job: Job, part: PromptJob, sampled: Sampled, call_ids: CallIds, *, index: int
) -> dict[str, Any]:
    reading = part.reader.syntax.read(part.reader.text_of(sampled))
    told = job.told.of(sampled.token_ids, sampled.logprobs)
    reason = finish_reason(sampled.stop_reason, has_calls=bool(reading.calls))
    if not job.told.is_chat:
        return text_choice(index, reading.content, reason, told)
    message = message_of(reading, call_ids, is_complete=is_complete(sampled))
    return chat_choice(index, message, reason, told)


async def _all(samples: list[Any]) -> list[list[Sampled]]:
    """All of them, or the first error with the others stopped."""
    tasks = [asyncio.ensure_future(sample) for sample in samples]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


@contextmanager
def _told_to_recordings(job: Job, request: HttpRequest) -> Iterator[None]:
    """Tell the recordings of a job what cut it short."""
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        owner, message = _WHY[reason := request.why_cancelled()]
        _cut_short(job, Failure(owner=owner, reason=reason, message=message))
        raise
    except InvalidInput:
        for part in job.parts:
            if part.recording is not None and part.call is not None:
                part.recording.not_sampled(part.call, CallState.REFUSED)
        raise
    except Exception as error:
        why = error.reason if isinstance(error, DialoopError) else Reason.ENGINE_FAILED
        failure = Failure(owner=Owner.INFERENCE, reason=why, message="Sampling failed.")
        _cut_short(job, failure)
        raise


def _cut_short(job: Job, failure: Failure) -> None:
    for part in job.parts:
        if part.recording is not None and part.call is not None:
            part.recording.cut_short(part.call, failure)
