"""TemplateService: decode, call, encode."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dialoop.chat import History
from dialoop.errors import AlreadyExists, InvalidInput, Unsupported
from dialoop.reasons import Reason
from dialoop.templates.chat_template import require_variables
from dialoop.templates.masks import EncodedConversation, content_spans, encode_conversation
from dialoop.templates.registry import TemplateInfo
from dialoop.v1 import template_service_pb2 as pb
from dialoop.v1 import template_service_pb2_grpc as rpc
from dialoop.wire import history_from_proto, history_to_proto, sequence_to_proto, tool_from_proto
from dialoop.wire.templates import template_info_to_proto, template_parser_from_proto

from dialoop_services.inference.rendered_sequence import rendered_sequence
from dialoop_services.inference.requests import template_options_of

if TYPE_CHECKING:
    import grpc
    from dialoop.sequences import Sequence
    from dialoop.templates.chat_template import ChatTemplate

    from dialoop_services.inference.rendering import Renderer

    Context = grpc.aio.ServicerContext[Any, Any]


class TemplateServicer(rpc.TemplateServiceServicer):
    """The replica's own template under its model's name, and those of its registry."""

    def __init__(self, renderer: Renderer, name: str) -> None:
        self._renderer = renderer
        self._name = name

    async def RegisterTemplate(
        self, request: pb.RegisterTemplateRequest, context: Context
    ) -> pb.RegisterTemplateResponse:
        if request.name == self._name:
            raise AlreadyExists(
                f"'{self._name}' is the model's own template.",
                reason=Reason.TEMPLATE_CONFLICT,
                remedy="Choose another name.",
            )
        has_parser = request.HasField("parser")
        info = self._renderer.templates.add_chat_template(
            request.name,
            request.source,
            template_parser_from_proto(request.parser) if has_parser else None,
            request.model_family_keywords,
            replace=request.replace,
        )
        return pb.RegisterTemplateResponse(template=template_info_to_proto(info))

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
        others = [info for info in self._renderer.templates.list() if info.name != self._name]
        found = [template_info_to_proto(info) for info in (own, *others)]
        return pb.ListTemplatesResponse(templates=found)

    async def Render(self, request: pb.RenderRequest, context: Context) -> pb.RenderResponse:
        variables = template_options_of(request.template_options_json)
        require_variables(variables)
        opens = request.add_generation_prompt if request.HasField("add_generation_prompt") else None
        rendered, sequence = self._rendered(
            self._template(request.template_name),
            history_from_proto(request.history),
            {
                "add_generation_prompt": opens,
                "continue_final_message": request.continue_final_message,
                "tools": [tool_from_proto(tool) for tool in request.tools] or None,
                **variables,
            },
        )
        mask = rendered.assistant_mask
        return pb.RenderResponse(
            text=rendered.text,
            sequence=sequence_to_proto(sequence),
            assistant_mask=None if mask is None else mask.tolist(),
        )

    async def Parse(self, request: pb.ParseRequest, context: Context) -> pb.ParseResponse:
        template = self._template(request.template_name)
        if request.WhichOneof("rendered") is None:
            raise InvalidInput(
                "There is neither text nor token_ids to parse.",
                reason=Reason.NOT_PARSEABLE,
                remedy="Send one of them.",
            )
        if request.WhichOneof("rendered") == "text":
            messages = template.parse(request.text)
        else:
            messages = template.parse_tokens(self._ids(request), self._renderer.tokenizer)
        return pb.ParseResponse(history=history_to_proto(History(messages)))

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

    def _rendered(
        self, template: ChatTemplate, history: History, options: dict[str, Any]
    ) -> tuple[EncodedConversation, Sequence]:
        tokenizer = self._renderer.tokenizer
        try:
            found = encode_conversation(template, tokenizer, history, with_offsets=True, **options)
        except Unsupported as error:
            if error.reason != Reason.MASK_UNAVAILABLE:
                raise
            given = {"with_mask": False, "with_offsets": True, **options}
            found = replace(
                encode_conversation(template, tokenizer, history, **given), assistant_mask=None
            )
        spans = content_spans(template, history, found.text, **options) or {}
        return found, rendered_sequence(found, spans)
