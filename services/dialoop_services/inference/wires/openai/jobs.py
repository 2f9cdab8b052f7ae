"""From the body of an OpenAI request to a job; what cannot be served is refused here."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dialoop.answers import GRAMMARS
from dialoop.reasons import Reason
from dialoop.trajectory import SamplingParams

from dialoop_services.inference.engine import Engine, SupportsConstraints, SupportsTopLogprobs
from dialoop_services.inference.recordings.store import Recording
from dialoop_services.inference.rendering import apart
from dialoop_services.inference.wires.base import AnswerJob, WireHost
from dialoop_services.inference.wires.bodies import field_error
from dialoop_services.inference.wires.openai.answers import Shape, TokenView
from dialoop_services.inference.wires.openai.messages import history_of
from dialoop_services.inference.wires.openai.models import (
    ChatBody,
    CompletionBody,
    NamedTool,
    SamplingBody,
    ToolBody,
)
from dialoop_services.inference.wires.prompts import Offer

_RESERVED = {"messages", "tools", "add_generation_prompt", "tokenize", "documents"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Makes jobs, each with the shape of its answer; the calls of a recording are recorded."""

    host: WireHost

    async def chat(
        self, body: ChatBody, recording: Recording | None, *, size: int
    ) -> tuple[AnswerJob, Shape]:
        """Return the job of a chat completion, whose body has so many bytes."""
        self.host.adapter_of(body.model, recording)
        engine = self.host.replica.engine
        offers_tools = bool(body.tools) and body.tool_choice != "none"
        grammar = self.host.renderer.form(offers_tools=offers_tools).calls
        constraint = constraint_of(body, engine, grammar)
        num_top = body.top_logprobs or 0
        if num_top and not body.logprobs:
            raise field_error("top_logprobs", "logprobs is not true", remedy="Set logprobs.")
        sampling = self._sampling(body, body.max_completion_tokens, recording)
        sampling = replace(sampling, constraint=constraint)
        known = _top_logprobs("top_logprobs", num_top, sampling, engine)
        sampling, prompts = replace(sampling, top_logprobs=known), self.host.prompts
        offer = Offer(
            tools=tuple(tool.given for tool in body.tools or ()) if offers_tools else (),
            options=_options(body),
        )
        messages = history_of(body.messages)
        prompt = await apart(prompts.chat, messages, offer, recording, size=size)
        adapter = self.host.adapter_of(body.model, recording)  # it may be gone by now
        form = self.host.renderer.answer_form(prompt.prompt, offers_tools=offers_tools)
        if constraint and form.starts_in_reasoning:
            raise field_error(
                "response_format" if body.response_format else "tool_choice",
                "this model's answers begin with reasoning, which would have that form",
                remedy="Leave it out, or turn thinking off in chat_template_kwargs.",
            )
        call_id = f"chatcmpl-{uuid.uuid4().hex}"
        tools = tuple(tool.definition for tool in body.tools or ())
        reader = self.host.reader(
            form,
            tools=tools,
            cut=_cut_of(body),
            cuts_thoughts=sampling.stop_in_reasoning,
            ends_with_call=offers_tools and not body.parallel_tool_calls,
        )
        part = self.host.part(call_id, prompt, sampling, recording, reader=reader)
        job = AnswerJob(parts=(part,), sampling=sampling, num_choices=body.n, adapter=adapter)
        shape = self._shape(body, call_id, adapter, with_logprobs=body.logprobs, num_top=num_top)
        return job, replace(shape, warnings=_warnings(body))

    async def completion(
        self, body: CompletionBody, recording: Recording | None, *, size: int
    ) -> tuple[AnswerJob, Shape]:
        """Return the job of a plain completion of one or more prompts."""
        self.host.adapter_of(body.model, recording)
        num_top = body.logprobs or 0
        if body.stream and body.prompt_logprobs is not None:
            raise field_error("prompt_logprobs", "stream is set", remedy="Leave one of them out.")
        if recording is not None and body.ignore_eos:
            why = "the calls of a recording end with the policy's turn"
            raise field_error("ignore_eos", why, remedy="Leave it out.")
        sampling = self._sampling(body, None, recording)
        num_known = _top_logprobs("logprobs", num_top, sampling, self.host.replica.engine)
        sampling = replace(sampling, top_logprobs=num_known)
        call_id, rows = f"cmpl-{uuid.uuid4().hex}", _rows(body)
        if recording is not None:
            recording.require_open(len(rows))
        ids = [call_id + (f"-{i}" if len(rows) > 1 else "") for i in range(len(rows))]
        encode = partial(
            self.host.prompts.completion,
            recording=recording,
            add_special_tokens=body.add_special_tokens,
        )
        made = [await apart(encode, row, size=size) for row in rows]
        adapter = self.host.adapter_of(body.model, recording)  # it may be gone by now
        reader = self.host.reader(cut=_cut_of(body))
        parts = tuple(
            replace(
                self.host.part(own_id, prompt, sampling, recording, reader=reader),
                stop_ids=tuple(body.stop_token_ids or ()),
                ignores_end=body.ignore_eos,
            )
            for prompt, own_id in zip(made, ids, strict=True)
        )
        job = AnswerJob(
            parts=parts,
            sampling=sampling,
            num_choices=body.n,
            adapter=adapter,
            scores_prompt=body.prompt_logprobs is not None,
        )
        with_logprobs = body.logprobs is not None
        shape = self._shape(body, call_id, adapter, with_logprobs=with_logprobs, num_top=num_top)
        return job, shape

    def _shape(
        self,
        body: SamplingBody,
        call_id: str,
        adapter: str,
        *,
        with_logprobs: bool,
        num_top: int,
    ) -> Shape:
        replica = self.host.replica
        policy = replica.adapters[adapter] if adapter else replica.engine.policy_version
        return Shape(
            call_id=call_id,
            model=body.model,
            fingerprint=str(policy),
            view=TokenView(
                tokenizer=self.host.renderer.tokenizer,
                is_chat=isinstance(body, ChatBody),
                with_logprobs=with_logprobs,
                num_top=num_top,
                with_ids=body.return_token_ids,
            ),
            with_prompt_ids=body.return_token_ids,
            with_usage=body.includes_usage,
        )

    def _sampling(
        self,
        body: SamplingBody,
        max_completion_tokens: int | None,
        recording: Recording | None,
    ) -> SamplingParams:
        return self.host.sampling(
            recording,
            stop=body.stop_strings,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            seed=body.seed,
            stop_in_reasoning=body.stop_in_reasoning if isinstance(body, ChatBody) else None,
            max_new_tokens=body.max_tokens or max_completion_tokens,
        )


def _cut_of(body: SamplingBody) -> tuple[str, ...]:
    """Return the stop strings that the answer is shown without."""
    return () if body.include_stop_str_in_output else body.stop_strings


def _rows(body: CompletionBody) -> list[str | list[int]]:
    """Return the prompts: texts or rows of ids."""
    prompt: Any = body.prompt
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return [prompt] if is_one else list(prompt)


def _options(body: ChatBody) -> dict[str, Any]:
    options = dict(body.chat_template_kwargs or {})
    for name in sorted(_RESERVED & options.keys()):
        field = f"chat_template_kwargs.{name}"
        raise field_error(
            field, "the request has a field of its own for this", remedy="Leave it out."
        )
    return options


def _top_logprobs(field: str, num_top: int, sampling: SamplingParams, engine: Engine) -> int:
    """Return how many of the likeliest tokens the engine is to name.

    One that knows the sampled token alone serves 0, and 1 at temperature 0, where it is that token.
    """
    if isinstance(engine, SupportsTopLogprobs):
        return num_top
    if num_top > 1 or (num_top == 1 and sampling.temperature != 0):
        raise field_error(
            field,
            f"the engine {engine.name} knows the sampled token's log-prob alone",
            remedy="Give 0, or 1 with temperature 0, or serve with another engine.",
            reason=Reason.UNSUPPORTED_LOGPROBS,
        )
    return 0


def _warnings(body: ChatBody) -> tuple[str, ...]:
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    if not both or body.max_tokens == body.max_completion_tokens:
        return ()
    return (
        f"max_tokens {body.max_tokens} was taken, max_completion_tokens "
        f"{body.max_completion_tokens} was not: give one of them.",
    )


_CONSTRAINED = "hermes"
_OTHER_ENGINE = 'Leave it out, or serve with engine = "vllm".'


def constraint_of(body: ChatBody, engine: Engine, grammar: str) -> str:
    """Return the constraint of the answer as `SamplingParams` has it; empty where it is free.

    grammar: of the calls that this policy's template writes.

    Raise FieldsRefused: UNSUPPORTED_TOOL_CHOICE or UNSUPPORTED_RESPONSE_FORMAT where the engine
    cannot hold an answer to it, INVALID_FIELD where the request contradicts itself.
    """
    forces_call = body.tool_choice not in ("auto", "none")
    form = body.response_format
    has_form = form is not None and form.type != "text"
    for is_asked, field, reason in (
        (forces_call, "tool_choice", Reason.UNSUPPORTED_TOOL_CHOICE),
        (has_form, "response_format", Reason.UNSUPPORTED_RESPONSE_FORMAT),
    ):
        if is_asked and not isinstance(engine, SupportsConstraints):
            why = f"the engine {engine.name} does not hold answers to a form"
            raise field_error(field, why, remedy=_OTHER_ENGINE, reason=reason)
    if forces_call:
        if has_form:
            why = "the answer cannot be a tool call and of that form"
            raise field_error("response_format", why, remedy="Leave it or tool_choice out.")
        if grammar not in ("", _CONSTRAINED):
            why = f"calls in the form {grammar} cannot be forced, only those in JSON between tags"
            reason = Reason.UNSUPPORTED_TOOL_CHOICE
            raise field_error("tool_choice", why, remedy='Send "auto".', reason=reason)
        return _calls(_forced_tools(body), is_single=not body.parallel_tool_calls)
    if form is None or not has_form:
        return ""
    if body.tools and body.tool_choice != "none":
        why = "an answer of that form could call no tool"
        raise field_error(
            "response_format", why, remedy="Leave tools out, or set tool_choice none."
        )
    if form.json_schema is None:
        return json.dumps({"type": "json_object"})
    return json.dumps({"type": "json_schema", "schema": form.json_schema.schema_})


def _forced_tools(body: ChatBody) -> list[ToolBody]:
    tools = body.tools or []
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
    if not tools:
        why = "there is no such tool in tools"
        raise field_error("tool_choice", why, remedy="Send the tool that is to be called.")
    return tools


def _calls(tools: list[ToolBody], *, is_single: bool) -> str:
    """Return the constraint to calls as Hermes and Qwen write them."""
    shape = GRAMMARS[_CONSTRAINED].shapes[0]
    tags: list[dict[str, Any]] = [
        {
            "begin": f"{shape.openings[-1]}\n"
            f'{{"name": {json.dumps(tool.function.name, ensure_ascii=False)}, "arguments": ',
            "schema": {"type": "object", **tool.function.parameters},
            "end": f"}}\n{shape.closings[0]}",
        }
        for tool in tools
    ]
    return json.dumps({"type": "tagged", "tags": tags, "is_single": is_single})
