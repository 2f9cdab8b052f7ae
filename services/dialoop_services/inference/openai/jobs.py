"""From the body of an OpenAI request to a job; what cannot be served is refused here."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from dialoop.reasons import Reason
from dialoop.trajectory import SamplingParams
from pydantic import BaseModel, ValidationError

from dialoop_services.inference.engine import SupportsTopLogprobs
from dialoop_services.inference.openai.answers import Head, TokenView
from dialoop_services.inference.openai.calls import AnswerJob, PromptJob
from dialoop_services.inference.openai.errors import UnknownModel, body_error, field_error
from dialoop_services.inference.openai.forms import constraint_of
from dialoop_services.inference.openai.messages import history_of, tools_of
from dialoop_services.inference.openai.prompts import Offer, Prompts
from dialoop_services.inference.openai.streaming import Reader
from dialoop_services.inference.openai.tool_calls import CALL_END, AnswerSyntax

if TYPE_CHECKING:
    from dialoop_services.inference.engine import Engine
    from dialoop_services.inference.openai.models import ChatBody, CompletionBody, SamplingBody
    from dialoop_services.inference.recordings.store import CallPrompt, Recording
    from dialoop_services.inference.rendering import Renderer
    from dialoop_services.inference.replica.replica import Replica

_B = TypeVar("_B", bound=BaseModel)
_RESERVED = {"messages", "tools", "add_generation_prompt", "tokenize", "documents"}


def parse_body(kind: type[_B], body: bytes) -> _B:
    """Return the body; FieldsRefused says for each wrong field what was expected and found."""
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise body_error(error) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Makes jobs for one replica; the calls of a recording are recorded."""

    replica: Replica
    renderer: Renderer
    model_name: str
    max_new_tokens: int

    def chat(self, body: ChatBody, recording: Recording | None) -> AnswerJob:
        """Return the job of a chat completion."""
        self._require_model(body, recording)
        constraint = constraint_of(body, self.replica.engine)
        num_top = body.top_logprobs or 0
        if num_top and not body.logprobs:
            raise field_error("top_logprobs", "logprobs is not true", remedy="Set logprobs.")
        offers_tools = bool(body.tools) and body.tool_choice != "none"
        one_call = offers_tools and not body.parallel_tool_calls
        more_stops = (CALL_END,) if one_call else ()
        sampling = self._sampling(body, body.max_completion_tokens, recording, more_stops)
        engine = self.replica.engine
        sampling = replace(
            sampling,
            constraint=constraint,
            top_logprobs=_top_logprobs("top_logprobs", num_top, sampling, engine),
        )
        prompts = Prompts(self.renderer)
        offer = Offer(
            tools=tools_of(body.tools or ()) if offers_tools else (),
            options=_options(body),
        )
        prompt = prompts.chat(history_of(body.messages), offer, recording)
        syntax = prompts.syntax(prompt, reads_calls=offers_tools)
        if constraint and syntax.starts_in_reasoning:
            raise field_error(
                "response_format" if body.response_format else "tool_choice",
                "this model's answers begin with reasoning, which would have that form",
                remedy="Leave it out, or turn thinking off in chat_template_kwargs.",
            )
        head = self._head(body, f"chatcmpl-{uuid.uuid4().hex}", is_chat=True)
        return self._job(
            body,
            replace(head, warnings=_warnings(body)),
            [self._part(body, prompt, syntax, recording, sampling, head.call_id)],
            sampling,
            with_logprobs=body.logprobs,
            num_top=num_top,
        )

    def completion(self, body: CompletionBody, recording: Recording | None) -> AnswerJob:
        """Return the job of a plain completion of one or more prompts."""
        self._require_model(body, recording)
        num_top = body.logprobs or 0
        if body.stream and body.prompt_logprobs is not None:
            raise field_error("prompt_logprobs", "stream is set", remedy="Leave one of them out.")
        if recording is not None and body.ignore_eos:
            why = "the calls of a recording end with the policy's turn"
            raise field_error("ignore_eos", why, remedy="Leave it out.")
        sampling = self._sampling(body, None, recording, ())
        num_known = _top_logprobs("logprobs", num_top, sampling, self.replica.engine)
        sampling = replace(sampling, top_logprobs=num_known)
        prompts = Prompts(self.renderer)
        head = self._head(body, f"cmpl-{uuid.uuid4().hex}", is_chat=False)
        rows = _rows(body)
        if recording is not None:
            recording.require_open(len(rows))
        ids = [head.call_id + (f"-{i}" if len(rows) > 1 else "") for i in range(len(rows))]
        made = [prompts.completion(row, recording) for row in rows]
        parts = [
            replace(
                self._part(body, prompt, AnswerSyntax(), recording, sampling, call_id),
                stop_ids=tuple(body.stop_token_ids or ()),
                ignores_end=body.ignore_eos,
            )
            for prompt, call_id in zip(made, ids, strict=True)
        ]
        with_logprobs = body.logprobs is not None
        job = self._job(body, head, parts, sampling, with_logprobs=with_logprobs, num_top=num_top)
        return replace(job, scores_prompt=body.prompt_logprobs is not None)

    def _part(
        self,
        body: SamplingBody,
        prompt: CallPrompt,
        syntax: AnswerSyntax,
        recording: Recording | None,
        sampling: SamplingParams,
        call_id: str,
    ) -> PromptJob:
        cut = () if body.include_stop_str_in_output else body.stop_strings
        call = None if recording is None else recording.begin(call_id, prompt, sampling)
        reader = Reader(tokenizer=self.renderer.tokenizer, syntax=syntax, cut=cut)
        return PromptJob(prompt=prompt, reader=reader, recording=recording, call=call)

    def _job(
        self,
        body: SamplingBody,
        head: Head,
        parts: list[PromptJob],
        sampling: SamplingParams,
        *,
        with_logprobs: bool,
        num_top: int,
    ) -> AnswerJob:
        return AnswerJob(
            head=head,
            parts=tuple(parts),
            sampling=sampling,
            num_choices=body.n,
            adapter=self._adapter(body),
            view=TokenView(
                tokenizer=self.renderer.tokenizer,
                is_chat=head.is_chat,
                with_logprobs=with_logprobs,
                num_top=num_top,
                with_ids=body.return_token_ids,
            ),
            with_prompt_ids=body.return_token_ids,
            with_usage=body.includes_usage,
        )

    def _head(self, body: SamplingBody, call_id: str, *, is_chat: bool) -> Head:
        adapter = self._adapter(body)
        policy = self.replica.adapters[adapter] if adapter else self.replica.engine.policy_version
        fingerprint = str(policy)
        return Head(call_id=call_id, model=body.model, fingerprint=fingerprint, is_chat=is_chat)

    def _adapter(self, body: SamplingBody) -> str:
        return body.model if body.model in self.replica.adapters else ""

    def _require_model(self, body: SamplingBody, recording: Recording | None) -> None:
        # A recorded agent may send the name of any model: the one it was written for.
        if recording is None and body.model not in {self.model_name, *self.replica.adapters}:
            raise UnknownModel(
                "The model of that name is not served here.",
                remedy=f"Ask for '{self.model_name}'; /v1/models lists what there is.",
            )

    def _sampling(
        self,
        body: SamplingBody,
        max_completion_tokens: int | None,
        recording: Recording | None,
        more_stops: tuple[str, ...],
    ) -> SamplingParams:
        """Return the sampling of the call, else of its recording, else this service's default."""
        fields: dict[str, Any] = {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "min_p": body.min_p,
            "repetition_penalty": body.repetition_penalty,
            "seed": body.seed,
            "max_new_tokens": body.max_tokens or max_completion_tokens,
        }
        default = SamplingParams() if recording is None else recording.spec.sampling
        sampling = replace(default, **{k: v for k, v in fields.items() if v is not None})
        return replace(
            sampling,
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            max_new_tokens=sampling.max_new_tokens or self.max_new_tokens,
            stop=(*(body.stop_strings or default.stop), *more_stops),
        )


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
