"""TemplateService: decode, call, encode."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from dialoop.chat import History
from dialoop.errors import AlreadyExists, InvalidInput, Unsupported
from dialoop.messages import Message
from dialoop.reasons import Reason
from dialoop.sequences import Sequence, Source, sequence_of
from dialoop.templates.chat_template import ChatTemplate, Span, require_variables
from dialoop.templates.masks import EncodedConversation, encode_conversation
from dialoop.templates.registry import TemplateInfo
from dialoop.templates.slots import find_places
from dialoop.v1 import template_service_pb2 as pb
from dialoop.v1 import template_service_pb2_grpc as rpc
from dialoop.wire.messages import HISTORY, tool_from_proto
from dialoop.wire.sequences import sequence_to_proto
from dialoop.wire.templates import TEMPLATE_INFO, TEMPLATE_PARSER

from dialoop_services.inference.rendering import GenerationRequest, Renderer
from dialoop_services.inference.requests import template_options_of

Context = grpc.aio.ServicerContext[Any, Any]


class TemplateServicer(rpc.TemplateServiceServicer):
    """Serves the model's own template under the model's name, and those of the registry."""

    def __init__(self, renderer: Renderer, name: str, *, max_model_len: int) -> None:
        self._renderer = renderer
        self._max_model_len = max_model_len
        self._name = name
        self._registering = asyncio.Lock()

    async def RegisterTemplate(
        self, request: pb.RegisterTemplateRequest, context: Context
    ) -> pb.RegisterTemplateResponse:
        if request.name == self._name:
            raise AlreadyExists(
                f"'{self._name}' is the model's own template.",
                reason=Reason.TEMPLATE_CONFLICT,
                remedy="Choose another name.",
            )
        async with self._registering:
            info = await self._renderer.run_foreign(partial(self._register, request))
        return pb.RegisterTemplateResponse(template=TEMPLATE_INFO.to_proto(info))

    def _register(self, request: pb.RegisterTemplateRequest) -> TemplateInfo:
        templates, parser = self._renderer.templates, None
        if request.HasField("parser"):
            templates.require_compilable(request.parser.message_pattern)
            parser = TEMPLATE_PARSER.from_proto(request.parser)
        return templates.add_chat_template(
            request.name,
            request.source,
            parser,
            request.model_family_keywords,
            replace=request.replace,
        )

    async def ListTemplates(
        self, request: pb.ListTemplatesRequest, context: Context
    ) -> pb.ListTemplatesResponse:
        template = self._renderer.template
        own = TemplateInfo(
            name=self._name,
            digest=template.digest,
            version=1,
            invertible=template.parser is not None,
            is_default=True,
        )
        tokenizer, templates = self._renderer.tokenizer, self._renderer.templates
        others = [info for info in templates.list() if info.name != self._name]
        names = {info.name for info in others}
        for named in tokenizer.chat_templates.keys() - names - {"default"}:
            its = templates.choose(tokenizer, chat_template_name=named)
            others.append(
                TemplateInfo(
                    name=named,
                    digest=its.digest,
                    version=1,
                    invertible=its.parser is not None,
                )
            )
        others.sort(key=lambda info: info.name)
        infos = [TEMPLATE_INFO.to_proto(info) for info in (own, *others)]
        return pb.ListTemplatesResponse(templates=infos)

    async def Render(self, request: pb.RenderRequest, context: Context) -> pb.RenderResponse:
        variables = template_options_of(request.template_options_json)
        require_variables(variables)
        opens = request.add_generation_prompt if request.HasField("add_generation_prompt") else None
        options = {
            "add_generation_prompt": opens,
            "continue_final_message": request.continue_final_message,
            "tools": [tool_from_proto(tool) for tool in request.tools] or None,
            **variables,
        }
        template, history = (
            self._template(request.template_name).for_tools(options["tools"]),
            HISTORY.from_proto(request.history),
        )
        self._renderer.require_may_fit(GenerationRequest(history=history), self._max_model_len)
        rendered, sequence = await self._renderer.run_with(
            request.template_name,
            partial(self._render, template, history, options),
            is_long=True,  # a mask takes several renderings
        )
        mask = rendered.assistant_mask
        return pb.RenderResponse(
            text=rendered.text,
            sequence=sequence_to_proto(sequence),
            assistant_mask=None if mask is None else mask.tolist(),
        )

    async def Parse(self, request: pb.ParseRequest, context: Context) -> pb.ParseResponse:
        if request.WhichOneof("rendered") is None:
            raise InvalidInput(
                "There is neither text nor token_ids to parse.",
                reason=Reason.NOT_PARSEABLE,
                remedy="Send one of them.",
            )
        messages = await self._renderer.run_with(
            request.template_name, partial(self._parse, request), is_long=True
        )
        return pb.ParseResponse(history=HISTORY.to_proto(History(messages)))

    def _parse(self, request: pb.ParseRequest) -> tuple[Message, ...]:
        template, keeps = self._template(request.template_name), request.keep_default_system
        if request.WhichOneof("rendered") == "text":
            return template.parse(request.text, keep_default_system=keeps)
        return template.parse_tokens(
            self._ids(request), self._renderer.tokenizer, keep_default_system=keeps
        )

    def _ids(self, request: pb.ParseRequest) -> list[int]:
        ids, limit = list(request.token_ids.values), self._renderer.tokenizer.vocab_size
        if any(not 0 <= token < limit for token in ids):
            raise InvalidInput(
                f"token_ids are not all from 0 to {limit - 1}.",
                reason=Reason.TOKEN_OUT_OF_RANGE,
                remedy="Send ids of this replica's tokenizer.",
            )
        return ids

    def _template(self, name: str) -> ChatTemplate:
        return self._renderer.template_named("" if name == self._name else name)

    def _render(
        self, template: ChatTemplate, history: History, options: dict[str, Any]
    ) -> tuple[EncodedConversation, Sequence]:
        tokenizer = self._renderer.tokenizer
        try:
            rendered = encode_conversation(
                template, tokenizer, history, with_offsets=True, **options
            )
        except Unsupported as error:
            if error.reason != Reason.MASK_UNAVAILABLE:
                raise
            unmasked = {"with_mask": False, "with_offsets": True, **options}
            rendered = replace(
                encode_conversation(template, tokenizer, history, **unmasked), assistant_mask=None
            )
        spans: dict[int, Span] = {}
        for place in find_places(template, history, rendered.text, **options) or ():
            if place.slot.field == "content" and place.is_first:
                begin, _ = spans.get(place.slot.index, (place.start, place.end))
                spans[place.slot.index] = (begin, place.end)
        return rendered, _rendered_sequence(rendered, spans)


def _rendered_sequence(rendered: EncodedConversation, contents: Mapping[int, Span]) -> Sequence:
    """Return a rendered conversation as segments: PROMPT where a content stands, else TEMPLATE.

    contents: the characters of the content of each message, by its index. A token belongs to where
    its first character stands. Without contents everything is PROMPT.
    """
    ids = rendered.token_ids.tolist()
    if rendered.offsets is None or not contents:
        return sequence_of([(ids, {"source": Source.PROMPT})])
    starts = rendered.offsets[:, 0]
    runs: list[tuple[list[int], dict[str, Any]]] = []
    done = 0
    for index, (begin, end) in sorted(contents.items(), key=lambda item: item[1]):
        first, last = int((starts < begin).sum()), int((starts < end).sum())
        runs.append((ids[done:first], {"source": Source.TEMPLATE}))
        if last > first:
            char_start = int(starts[first]) - begin
            fields = {
                "source": Source.PROMPT,
                "message_index": index,
                "char_start": char_start,
                "char_length": end - begin - char_start,
            }
            runs.append((ids[first:last], fields))
        done = last
    runs.append((ids[done:], {"source": Source.TEMPLATE}))
    return sequence_of(runs)
