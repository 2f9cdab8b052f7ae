"""What every wire is made of: a wire is a dialect that agents speak to the policy over HTTP.

A wire is one file or folder. It reads a body, makes a job with `WireHost`, and writes in its own
shapes what `Answering` gives:

    job = AnswerJob(parts=(host.part(call_id, prompt, sampling, recording),), sampling=sampling)
    whole = await host.answering.whole(job, request)    # AnswerParts and their Usage
    events = host.answering.stream(job, request)        # AnswerPart, AnswerPart, ..., Usage

A call ends with an answer, a refusal, a caller who leaves or an engine that dies. Its recording
notes which, and the engine's slot becomes free.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dialoop.answers import AnswerForm, AnswerReader
from dialoop.chat import Message, ToolCall, ToolDefinition
from dialoop.errors import DialoopError, InvalidInput, Unavailable
from dialoop.reasons import Reason
from dialoop.rollout import sampling_of_turn
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.trajectory import Failure, Owner, SamplingParams, StopReason

from dialoop_services.inference.answer_ends import all_of
from dialoop_services.inference.generate import with_defaults
from dialoop_services.inference.recordings.store import CallState, Choice
from dialoop_services.inference.wires.bodies import ContextTooLong, UnknownModel
from dialoop_services.inference.wires.prompts import Prompts
from dialoop_services.runtime.logs import add_log_fields

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

    from dialoop_services.inference.engine import (
        OnTokens,
        Sampled,
        StopTokens,
        TokenChunk,
        TopLogprobs,
    )
    from dialoop_services.inference.recordings.store import (
        CallPrompt,
        CallRecord,
        Recording,
        RecordingStore,
    )
    from dialoop_services.inference.rendering import Renderer
    from dialoop_services.inference.replica.replica import Replica
    from dialoop_services.rest.http_routes import HttpRequest, HttpRoute

_RECORDED = "/recordings/{recording_id}"
_WHY = {
    Reason.CALLER_LEFT: (Owner.COLLECTOR, "The caller left before the answer was whole."),
    Reason.DEADLINE_EXCEEDED: (Owner.INFERENCE, "The answer took longer than the caller waits."),
    Reason.STOPPING: (Owner.INFERENCE, "The service stopped before the answer was whole."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPart:
    """What an answer has gained: all of a whole answer, or what a stream has more.

    index: of the answer among those of its job. The text that the part's tokens make may come with
    a later part. calls: each whole. num_calls_before: in the parts before. stop_reason: why the
    answer ended, in its last part.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[TopLogprobs] = ()
    is_first: bool = True
    num_calls_before: int = 0
    stop_reason: StopReason | None = None

    @property
    def has_calls(self) -> bool:
        """Return whether the answer has called tools so far."""
        return self.num_calls_before + len(self.calls) > 0

    @property
    def message(self) -> Message:
        """Return a whole answer as a message."""
        return Message(
            role="assistant",
            content=self.content,
            reasoning=self.reasoning,
            tool_calls=self.calls,
            is_complete=self.stop_reason is StopReason.STOP,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The numbers of tokens of a job: the end of its answer."""

    num_prompt: int
    num_sampled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswer:
    """All answers of a job; prompt_logprobs has a row for each prompt where they were asked for."""

    parts: tuple[AnswerPart, ...]
    usage: Usage
    prompt_logprobs: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How answers are read: their form, the tools offered, and the stop strings that are cut.

    ends_with_call: they end with their first call, and show no other.
    """

    tokenizer: Tokenizer
    form: AnswerForm
    tools: tuple[ToolDefinition, ...] = ()
    cut: tuple[str, ...] = ()
    cuts_thoughts: bool = False
    ends_with_call: bool = False

    def begin(self) -> AnswerReader:
        """Return the reader of one answer."""
        return AnswerReader(
            self.form, self.tokenizer, self.tools, cut=self.cut, cuts_thoughts=self.cuts_thoughts
        )


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
    """One request: its prompts, and how to sample them."""

    parts: tuple[PromptJob, ...]
    sampling: SamplingParams
    num_choices: int = 1
    adapter: str = ""
    scores_prompt: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of tokens of all prompts."""
        return sum(part.prompt.num_tokens for part in self.parts)

    def prompt_ids(self) -> list[list[int]]:
        """Return the tokens of each prompt."""
        return [part.prompt.prompt.sequence.token_ids.tolist() for part in self.parts]


@dataclass(slots=True, kw_only=True)
class RunningAnswer:
    """One answer of a stream; only the task that answers uses it."""

    so_far: AnswerPart
    """What its parts had together, without tokens."""
    reader: AnswerReader
    call_ids: set[str]
    """The ids of the calls before this answer, and of its own."""
    most_calls: int | None = None
    _num_read: int = 0
    _ids: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _top_logprobs: list[TopLogprobs] = field(default_factory=list)

    def add(self, tokens: TokenChunk) -> AnswerPart | None:
        """Return the part that these tokens make; None while they may still change."""
        self._note(tokens)
        self._read(tokens.token_ids)
        return self._part(None)

    def whole(self, sampled: Sampled) -> AnswerPart:
        """Return an answer that nobody read before it ended, as one part."""
        self._note(sampled)
        return self.finish(sampled)

    def finish(self, sampled: Sampled) -> AnswerPart:
        """Return the last part: the rest of the text, and why the answer ended."""
        self._read(sampled.token_ids[self._num_read :])
        self.reader.finish()
        part = self._part(sampled.stop_reason)
        assert part is not None
        return part

    def _read(self, token_ids: Sequence[int]) -> None:
        self.reader.add(token_ids)
        self._num_read += len(token_ids)

    def _note(self, tokens: TokenChunk | Sampled) -> None:
        self._ids.extend(tokens.token_ids)
        self._logprobs.extend(tokens.logprobs)
        self._top_logprobs.extend(tokens.top_logprobs)

    def _part(self, stop_reason: StopReason | None) -> AnswerPart | None:
        before, read = self.so_far, self.reader.take()
        calls = tuple(
            ToolCall(id=self._id(call.id), name=call.name, arguments_json=call.arguments_json)
            for call in read.calls
            if not call.problem
        )
        if self.most_calls is not None:
            calls = calls[: self.most_calls - len(before.calls)]
        if not (read.content or read.reasoning or calls or stop_reason is not None):
            return None
        part = replace(
            before,
            content=read.content,
            reasoning=read.reasoning,
            calls=calls,
            token_ids=self._ids,
            logprobs=self._logprobs,
            top_logprobs=self._top_logprobs,
            num_calls_before=len(before.calls),
            stop_reason=stop_reason,
        )
        self._ids, self._logprobs, self._top_logprobs = [], [], []
        self.so_far = replace(
            before,
            content=before.content + read.content,
            reasoning=before.reasoning + read.reasoning,
            calls=before.calls + calls,
            is_first=False,
            stop_reason=stop_reason,
        )
        return part

    def _id(self, written: str) -> str:
        """Return the id that the policy wrote, where the conversation has it once, else a new one.

        Templates that write ids alone, as Kimi K2's, need what the policy wrote.
        """
        is_free = written and written not in self.call_ids
        own = written if is_free else f"call_{uuid.uuid4().hex}"
        self.call_ids.add(own)
        return own


@dataclass(frozen=True, slots=True, kw_only=True)
class WireHost:
    """What a wire serves with: one replica, and the recordings of agents."""

    replica: Replica
    renderer: Renderer
    store: RecordingStore
    model_name: str
    max_new_tokens: int

    @property
    def answering(self) -> Answering:
        """Return what answers jobs."""
        return Answering(self.replica, self.renderer)

    @property
    def prompts(self) -> Prompts:
        """Return what makes prompts."""
        return Prompts(self.renderer, max_model_len=self.replica.engine.max_model_len)

    def routes(self, route: HttpRoute) -> tuple[HttpRoute, HttpRoute]:
        """Return a route as it is, and the same one under the URL of a recording.

        "OpenAI.ListModels" at /v1/models is "OpenAI.RecordedListModels" there.
        """
        wire, _, name = route.name.partition(".")
        recorded = replace(
            route,
            name=f"{wire}.Recorded{name}",
            path=_RECORDED + route.path,
            operation={
                **route.operation,
                "parameters": [
                    path_parameter("recording_id", "The recording that keeps the call."),
                    *route.operation.get("parameters", ()),
                ],
            },
            admits=lambda parameters, key: self.store.has_key(parameters["recording_id"], key),
        )
        return route, recorded

    def recording_of(self, request: HttpRequest) -> Recording | None:
        """Return the open recording in a request's path; None on a plain route."""
        recording_id = request.parameters.get("recording_id")
        if recording_id is None:
            return None
        add_log_fields({"recording_id": recording_id})
        recording = self.store.find(recording_id)
        recording.require_open()
        return recording

    def adapter_of(self, model: str, recording: Recording | None) -> str:
        """Return the adapter of that name; "" for the policy. UnknownModel for any other name."""
        if model in self.replica.adapters:
            return model
        # A recorded agent may send the name of any model: the one it was written for.
        if recording is None and model != self.model_name:
            raise UnknownModel(
                "The model of that name is not served here.",
                remedy=f"Ask for '{self.model_name}'; /v1/models lists what there is.",
            )
        return ""

    def sampling(
        self,
        recording: Recording | None,
        *,
        stop: tuple[str, ...] = (),
        **fields: Any,
    ) -> SamplingParams:
        """Return the sampling of the call, else of its recording, else this service's default.

        A field that is None is absent.
        """
        default = SamplingParams()
        if recording is not None:
            default = sampling_of_turn(recording.spec.sampling, len(recording.calls))
        own = {name: value for name, value in fields.items() if value is not None}
        sampling = replace(default, stop=stop or default.stop, **own)
        return with_defaults(sampling, max_new_tokens=self.max_new_tokens)

    def reader(
        self,
        form: AnswerForm | None = None,
        *,
        tools: tuple[ToolDefinition, ...] = (),
        cut: tuple[str, ...] = (),
        cuts_thoughts: bool = False,
        ends_with_call: bool = False,
    ) -> Reader:
        """Return how answers of this form are read; without one they are content alone."""
        return Reader(
            tokenizer=self.renderer.tokenizer,
            form=form or AnswerForm(),
            tools=tools,
            cut=cut,
            cuts_thoughts=cuts_thoughts,
            ends_with_call=ends_with_call,
        )

    def part(
        self,
        call_id: str,
        prompt: CallPrompt,
        sampling: SamplingParams,
        recording: Recording | None,
        *,
        reader: Reader | None = None,
    ) -> PromptJob:
        """Return a prompt to be answered; a recording begins to note its call.

        reader: how the answers are read; they are content alone without it.
        """
        call = None if recording is None else recording.begin(call_id, prompt, sampling)
        reader = reader or self.reader()
        return PromptJob(prompt=prompt, reader=reader, recording=recording, call=call)


def path_parameter(name: str, description: str) -> dict[str, Any]:
    """Return what the OpenAPI page says of a part of a route's path."""
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string", "minLength": 1, "pattern": "^[^/]+$"},
    }


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
        if part.call is not None:
            part.call.end(CallState.CONTEXT_FULL)
        raise ContextTooLong(
            f"The prompt has {part.prompt.num_tokens} tokens, which leaves no room in the context "
            f"of {limit}.",
            remedy="Send a shorter conversation, or start the service with a larger context.",
        )

    async def whole(self, job: AnswerJob, request: HttpRequest) -> JobAnswer:
        """Return all answers as a whole."""
        started = time.perf_counter()
        parts: list[AnswerPart] = []
        with _noting_in_recordings(job, request):
            for part in job.parts:
                self.require_room(part)
            answers = await all_of(
                self.sample(part, job.sampling, adapter=job.adapter, num=job.num_choices)
                for part in job.parts
            )
            scores = await self._prompt_logprobs(job)
            for part, sampled in zip(job.parts, answers, strict=True):
                own = [
                    _running(part, index=len(parts) + number).whole(output)
                    for number, output in enumerate(sampled)
                ]
                self.record(part, sampled, [a.message for a in own], time.perf_counter() - started)
                parts.extend(own)
        num_sampled = sum(len(part.token_ids) for part in parts)
        usage = Usage(num_prompt=job.num_prompt_tokens, num_sampled=num_sampled)
        return JobAnswer(parts=tuple(parts), usage=usage, prompt_logprobs=scores)

    async def stream(
        self, job: AnswerJob, request: HttpRequest
    ) -> AsyncGenerator[AnswerPart | Usage, None]:
        """Yield the answers part by part, and the usage at last."""
        with _noting_in_recordings(job, request):
            for part in job.parts:
                self.require_room(part)
            running = _Running(self, job)
            try:
                async for answer in running.parts():
                    yield answer
            finally:
                running.cancel()  # free the engine's slots when the caller leaves
        yield Usage(num_prompt=job.num_prompt_tokens, num_sampled=running.num_sampled)

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
        stop = await self._renderer.find_stop_tokens(
            sampling.stop,
            part.reader.form,
            part.reader.tools,
            in_reasoning=sampling.stop_in_reasoning,
            ends_with_call=part.reader.ends_with_call,
        )
        sampled = await self._replica.sample(
            part.prompt.prompt.sequence.token_ids.tolist(),
            sampling,
            stop=part.stop_tokens(stop),
            num_samples=num,
            on_tokens=on_tokens,
            adapter=adapter,
        )
        if any(output.stop_reason is StopReason.CANCELLED for output in sampled):
            raise Unavailable("The engine cancelled the sample.", reason=Reason.CANCELLED)
        return list(sampled)

    async def _prompt_logprobs(self, job: AnswerJob) -> tuple[tuple[float, ...], ...] | None:
        """Return the log-probs of each prompt's tokens after its first; None unless asked for."""
        if not job.scores_prompt:
            return None
        scored = await self._replica.logprobs(job.prompt_ids(), adapter=job.adapter)
        return tuple(tuple(scores.logprobs.tolist()) for scores in scored)

    def record(
        self,
        part: PromptJob,
        sampled: list[Sampled],
        messages: Sequence[Message],
        generate_s: float,
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
                message=message,
            )
            for output, message in zip(sampled, messages, strict=True)
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
        self._answers = [
            _running(job.parts[index // job.num_choices], index=index)
            for index in range(len(job.parts) * job.num_choices)
        ]
        self._tasks = [self._start(index) for index in range(len(self._answers))]
        self.num_sampled = 0

    async def parts(self) -> AsyncIterator[AnswerPart]:
        """Yield what each event adds until all samples have ended."""
        num_left = len(self._tasks)
        while num_left:
            index, tokens = await self._events.get()
            if tokens is not None:
                part = self._answers[index].add(tokens)
                if part is not None:
                    yield part
                continue
            num_left -= 1
            (sampled,) = self._tasks[index].result()
            self.num_sampled += len(sampled.token_ids)
            last = self._answers[index].finish(sampled)
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
        part = self._job.parts[number]
        messages = [self._answers[i].so_far.message for i in indices]
        self._answering.record(part, sampled, messages, seconds)


def _running(part: PromptJob, *, index: int) -> RunningAnswer:
    ids = {call.id for message in part.prompt.messages for call in message.tool_calls}
    return RunningAnswer(
        so_far=AnswerPart(index=index),
        reader=part.reader.begin(),
        call_ids=ids,
        most_calls=1 if part.reader.ends_with_call else None,
    )


@contextmanager
def _noting_in_recordings(job: AnswerJob, request: HttpRequest) -> Iterator[None]:
    """Note in the recordings of a job what cut it short."""
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        owner, message = _WHY[reason := request.why_cancelled()]
        failure = Failure(owner=owner, reason=reason, message=message)
        _end_calls(job, CallState.CUT_SHORT, failure)
        raise
    except InvalidInput:
        _end_calls(job, CallState.REFUSED)
        raise
    except Exception as error:
        why = error.reason if isinstance(error, DialoopError) else Reason.ENGINE_FAILED
        failure = Failure(owner=Owner.INFERENCE, reason=why, message="Sampling failed.")
        _end_calls(job, CallState.CUT_SHORT, failure)
        raise


def _end_calls(job: AnswerJob, state: CallState, failure: Failure | None = None) -> None:
    for part in job.parts:
        if part.call is not None:
            part.call.end(state, failure)
