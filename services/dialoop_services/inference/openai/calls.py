"""Answers of OpenAI calls, whole or as a stream: sample, record, return.

A call ends with an answer, a refusal, a caller who leaves or an engine that dies. Its recording
notes which, and the engine's slot becomes free.
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
    TokenView,
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

    from dialoop_services.inference.engine import OnTokens, Sampled, StopTokens, TokenChunk
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
    stop_ids: tuple[int, ...] = ()
    ignores_end: bool = False

    def stop_tokens(self, stop: StopTokens) -> StopTokens:
        """Return what ends an answer: `stop`, or without the end of turn, and further tokens."""
        ends = {token: text for token, text in stop.by_id.items() if text or not self.ignores_end}
        return replace(stop, by_id={**dict.fromkeys(self.stop_ids, ""), **ends})


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerJob:
    """One request: its prompts, how to sample them, and what the answer shows."""

    head: Head
    parts: tuple[PromptJob, ...]
    sampling: SamplingParams
    num_choices: int
    view: TokenView
    adapter: str = ""
    with_prompt_ids: bool = False
    with_usage: bool = False
    scores_prompt: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of tokens of all prompts."""
        return sum(part.prompt.num_tokens for part in self.parts)

    def prompt_ids(self) -> dict[str, Any]:
        """Return the prompts' ids; empty where the client did not ask for them."""
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
        """Raise ContextTooLong when the prompt leaves no room; its recording notes that."""
        limit = self._replica.engine.max_model_len
        if part.prompt.num_tokens < limit:
            return
        if part.recording is not None and part.call is not None:
            part.recording.mark_unsampled(part.call, CallState.CONTEXT_FULL)
        raise ContextTooLong(
            f"The prompt has {part.prompt.num_tokens} tokens, which leaves no room in the context "
            f"of {limit}.",
            remedy="Send a shorter conversation, or start the service with a larger context.",
        )

    async def whole(self, job: AnswerJob, request: HttpRequest) -> dict[str, Any]:
        """Return the answer as one document."""
        started = time.perf_counter()
        choices: list[dict[str, Any]] = []
        num_sampled = 0
        with _noting_in_recordings(job, request):
            for part in job.parts:
                self.require_room(part)
            answers = await _all(
                [
                    self.sample(part, job.sampling, adapter=job.adapter, num=job.num_choices)
                    for part in job.parts
                ]
            )
            scores = await self._prompt_logprobs(job)
            for part, sampled, scored in zip(job.parts, answers, scores, strict=True):
                ids = [CallIds() for _ in sampled]
                self.record(part, sampled, ids, time.perf_counter() - started)
                num_sampled += sum(len(output.token_ids) for output in sampled)
                for output, call_ids in zip(sampled, ids, strict=True):
                    choice = _choice(job, part, output, call_ids, index=len(choices))
                    choices.append(choice | scored)
        numbers = usage(job.num_prompt_tokens, num_sampled)
        return {**job.head.document(choices), "usage": numbers, **job.prompt_ids()}

    async def stream(
        self, job: AnswerJob, request: HttpRequest
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer chunk by chunk."""
        with _noting_in_recordings(job, request):
            for part in job.parts:
                self.require_room(part)
            running = _Running(self, job)
            try:
                first = job.prompt_ids()
                async for choice in running.choices():
                    yield {**job.head.document([choice], is_chunk=True), **first}
                    first = {}
            finally:
                running.cancel()  # free the engine's slots when the caller leaves
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
        """Sample one prompt; `on_tokens` gets the tokens as they come (one sample only)."""
        sampled = await self._replica.sample(
            part.prompt.prompt.sequence.token_ids.tolist(),
            sampling,
            stop=part.stop_tokens(await self._renderer.find_stop_tokens(sampling.stop)),
            num_samples=num,
            on_tokens=on_tokens,
            adapter=adapter,
        )
        if any(output.stop_reason is StopReason.CANCELLED for output in sampled):
            raise Unavailable("The engine cancelled the sample.", reason=Reason.CANCELLED)
        return list(sampled)

    async def _prompt_logprobs(self, job: AnswerJob) -> list[dict[str, Any]]:
        """Return for each prompt the field of its log-probs; empty where nobody asked for it."""
        if not job.scores_prompt:
            return [{} for _ in job.parts]
        rows = [part.prompt.prompt.sequence.token_ids.tolist() for part in job.parts]
        scored = await self._replica.logprobs(rows, adapter=job.adapter)
        return [
            {
                "prompt_logprobs": [
                    None,
                    *(
                        {str(token): {"logprob": value}}
                        for token, value in zip(row[1:], scores.logprobs.tolist(), strict=True)
                    ),
                ]
            }
            for row, scores in zip(rows, scored, strict=True)
        ]

    def record(
        self, part: PromptJob, sampled: list[Sampled], ids: list[CallIds], generate_s: float
    ) -> None:
        """Record the finished answers of a prompt."""
        if part.recording is None or part.call is None:
            return
        choices = tuple(
            Choice(
                sample=replace(
                    self._renderer.sample(part.prompt.prompt, output),
                    sampling=part.call.sampling,
                    generate_s=generate_s,
                    update_mode=output.update_mode,
                ),
                message=message_of(
                    part.reader.syntax.read(part.reader.text_of(output)),
                    call_ids,
                    is_complete=is_complete(output),
                ),
            )
            for output, call_ids in zip(sampled, ids, strict=True)
        )
        part.recording.record_answer(part.call, choices, generate_s=generate_s)


class _Running:
    """The samples of a stream: one task each, and one queue of what they give.

    The engine's callbacks fill it, the answering task drains it. At most the tokens of the stream
    wait in it.
    """

    def __init__(self, answering: Answering, job: AnswerJob) -> None:
        self._answering = answering
        self._job = job
        self._started = time.perf_counter()
        self._events: asyncio.Queue[tuple[int, TokenChunk | None]] = asyncio.Queue()
        self._choices = [
            RunningChoice(
                index=index, reader=job.parts[index // job.num_choices].reader, view=job.view
            )
            for index in range(len(job.parts) * job.num_choices)
        ]
        self._tasks = [self._start(choice.index) for choice in self._choices]
        self.num_sampled = 0

    async def choices(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the choice of each event until all samples have ended."""
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
        """Record a prompt's answers once all of its samples have ended."""
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
    job: AnswerJob, part: PromptJob, sampled: Sampled, call_ids: CallIds, *, index: int
) -> dict[str, Any]:
    reading = part.reader.syntax.read(part.reader.text_of(sampled))
    fields = job.view.of(sampled.token_ids, sampled.logprobs, sampled.top_logprobs)
    reason = finish_reason(sampled.stop_reason, has_calls=bool(reading.calls))
    if not job.view.is_chat:
        return text_choice(index, reading.content, reason, fields)
    message = message_of(reading, call_ids, is_complete=is_complete(sampled))
    return chat_choice(index, message, reason, fields)


async def _all(samples: list[Any]) -> list[list[Sampled]]:
    """Return the results of all; at the first error stop the others and raise it."""
    tasks = [asyncio.ensure_future(sample) for sample in samples]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


@contextmanager
def _noting_in_recordings(job: AnswerJob, request: HttpRequest) -> Iterator[None]:
    """Note in the recordings of a job what cut it short."""
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        owner, message = _WHY[reason := request.why_cancelled()]
        _cut_short(job, Failure(owner=owner, reason=reason, message=message))
        raise
    except InvalidInput:
        for part in job.parts:
            if part.recording is not None and part.call is not None:
                part.recording.mark_unsampled(part.call, CallState.REFUSED)
        raise
    except Exception as error:
        why = error.reason if isinstance(error, DialoopError) else Reason.ENGINE_FAILED
        failure = Failure(owner=Owner.INFERENCE, reason=why, message="Sampling failed.")
        _cut_short(job, failure)
        raise


def _cut_short(job: AnswerJob, failure: Failure) -> None:
    for part in job.parts:
        if part.recording is not None and part.call is not None:
            part.recording.cut_short(part.call, failure)
