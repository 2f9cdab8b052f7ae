"""The bodies of the OpenAI-compatible routes: every field that is accepted, with its type.

A field that is null counts as absent. "Accepted and ignored" fields do not change the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from dialoop.messages import ToolDefinition
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from dialoop_services.runtime.calls import MAX_ITEMS

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16


def _require_no_penalty(value: float) -> float:
    if value:
        raise ValueError(
            f"{value:g} would change what is sampled with every token, and training needs the "
            "distribution that was sampled: leave it out, or give repetition_penalty, with which "
            "the call is not trained on"
        )
    return value


_NoPenalty = Annotated[float, AfterValidator(_require_no_penalty)]
_FEW = Field(max_length=MAX_ITEMS)
_TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class _Body(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class FunctionCall(_Body):
    """The function a tool call names."""

    name: str = Field(min_length=1)
    arguments: str
    """JSON text."""


class ToolCallBody(_Body):
    """A tool call of an assistant's message."""

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPartBody(_Body):
    """A part of a message; text is the only kind that is read here."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """`developer` means the same as `system`."""
    content: str | Annotated[list[ContentPartBody], _FEW] | None = None
    tool_calls: Annotated[list[ToolCallBody], _FEW] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    """Accepted and ignored."""
    annotations: Annotated[list[Any], _FEW] | None = None
    """Accepted and ignored."""

    @model_validator(mode="after")
    def _require_what_the_role_needs(self) -> ChatMessage:
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("expected tool_call_id in a message of role tool, found none")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls belong to role assistant, found {self.role}")
        says = self.role == "assistant" and (self.reasoning_content or self.reasoning)
        if self.content is None and not self.tool_calls and not says:
            raise ValueError("expected content, found none")
        return self


class FunctionBody(_Body):
    """What the model may call."""

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON schema of the arguments."""
    strict: bool = False
    """Accepted and ignored: arguments keep to their schema where tool_choice forces the call."""


class ToolBody(_Body):
    """A tool of type function."""

    type: Literal["function"]
    function: FunctionBody
    _given: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def given(self) -> Mapping[str, Any]:
        """Return the tool as the client wrote it, which the chat template gets."""
        return self._given

    @property
    def definition(self) -> ToolDefinition:
        """Return the tool with the schema by which its arguments are read."""
        function = self.function
        return ToolDefinition(name=function.name, parameters_json=json.dumps(function.parameters))

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: Any, read: ModelWrapValidatorHandler[ToolBody]) -> ToolBody:
        body = read(data)
        if isinstance(data, dict):
            body._given = data
        return body


class NamedFunction(_Body):
    """A function by its name."""

    name: str


class NamedTool(_Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class StreamOptions(_Body):
    """What a stream carries beside the answer."""

    include_usage: bool = False
    """A last event with the numbers of tokens."""
    include_obfuscation: bool = False
    """Accepted and ignored."""


class JsonSchemaFormat(_Body):
    """A JSON schema with a name."""

    name: str = Field(min_length=1)
    schema_: dict[str, Any] = Field(default={}, alias="schema")
    """JSON schema of the answer."""
    description: str = ""
    """Accepted and ignored."""
    strict: bool = False
    """Accepted and ignored: the schema is always kept."""


class ResponseFormat(_Body):
    """The form of the answer: free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    """Other than text with engines that can hold answers to a form; these are not trained on."""
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _require_a_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("expected json_schema with type json_schema, and only then")
        return self


class SamplingBody(_Body):
    """What the chat and the plain completion have in common."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    """0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    """0 and -1 are none."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Add prompt_token_ids, and token_ids to each choice."""
    repetition_penalty: float | None = Field(default=None, gt=0)
    """1 is none; with another the calls are not trained on."""
    presence_penalty: _NoPenalty = 0
    """Only 0: training needs the distribution that was sampled."""
    frequency_penalty: _NoPenalty = 0
    """Only 0."""
    user: str | None = None
    """Accepted and ignored."""
    metadata: dict[str, str] | None = None
    """Accepted and ignored."""
    store: bool | None = None
    """Accepted and ignored."""
    service_tier: str | None = None
    """Accepted and ignored."""
    safety_identifier: str | None = None
    """Accepted and ignored."""
    prompt_cache_key: str | None = None
    """Accepted and ignored."""
    prompt_cache_retention: str | None = None
    """Accepted and ignored."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings; empty for none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Return whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(SamplingBody):
    """A chat completion."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_ITEMS)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """max_tokens wins where both are given, with a warning."""
    stop_in_reasoning: bool | None = None
    """Whether stop strings end the answer in its reasoning too. By default they end its content."""
    tools: Annotated[list[ToolBody], _FEW] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    """auto; none to hide the tools; required or a tool's name with engines that can hold answers to
    a form, and such calls are not trained on."""
    parallel_tool_calls: bool = True
    """False ends the answer with its first call, and shows no other."""
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """How many of the likeliest tokens each position names. An engine that knows the sampled token
    alone serves 0, and 1 at temperature 0."""
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""


class CompletionBody(SamplingBody):
    """A plain completion: the prompt is continued as it stands."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[_TokenId], Field(min_length=1, fail_fast=True)]
        | Annotated[
            list[Annotated[list[_TokenId], Field(min_length=1, fail_fast=True)]],
            Field(min_length=1, max_length=MAX_CHOICES),
        ]
    )
    """Text, token ids, or a list of either; special tokens that a text spells count."""
    add_special_tokens: bool = True
    """Put before a text what the tokenizer puts there, mostly a BOS, unless it begins so."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """How many of the likeliest tokens each position names. An engine that knows the sampled token
    alone serves 0, and 1 at temperature 0."""
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=MAX_STOP_STRINGS)] | None = None
    """Tokens that end an answer, beside the end of turn."""
    ignore_eos: bool = False
    """Go on after the end of turn; not in a recording."""
    prompt_logprobs: Literal[0] | None = None
    """0 adds to each choice the log-prob of each token of its prompt, at temperature 1, as vLLM
    does: null for the first, then {"id": {"logprob": ...}}. Not in a stream."""
    echo: Literal[False] = False
    best_of: Literal[1] = 1
