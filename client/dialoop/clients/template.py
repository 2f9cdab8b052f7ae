"""TemplateClient: chat templates of an inference replica, what they render and what they read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dialoop.chat import History, ToolDefinition
from dialoop.clients.channel import Channel, rpc_of
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.sequences import Sequence
from dialoop.templates.declared_parser import TemplateParser
from dialoop.templates.registry import TemplateInfo
from dialoop.v1 import chat_pb2
from dialoop.v1 import template_service_pb2 as pb
from dialoop.wire.messages import HISTORY, tool_to_proto
from dialoop.wire.sequences import sequence_from_proto
from dialoop.wire.templates import TEMPLATE_INFO, TEMPLATE_PARSER


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RenderedConversation:
    """A conversation as text and tokens, and whether the assistant wrote each token, bool [L].

    assistant_mask is None where the template does not show it.
    """

    text: str
    sequence: Sequence
    assistant_mask: NDArray[np.bool_] | None


_rpc = partial(rpc_of, pb, "TemplateService", is_retried=True)
REGISTER_TEMPLATE = _rpc("RegisterTemplate")
LIST_TEMPLATES = _rpc("ListTemplates")
RENDER = _rpc("Render")
PARSE = _rpc("Parse")


class TemplateClient:
    """Registers, lists and uses the chat templates of one inference replica."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def register(
        self,
        name: str,
        source: str,
        *,
        parser: TemplateParser | None = None,
        model_family_keywords: Iterable[str] = (),
        replace: bool = False,
    ) -> TemplateInfo:
        """Add a template under a name; AlreadyExists (TEMPLATE_CONFLICT) unless `replace`."""
        request = pb.RegisterTemplateRequest(
            name=name,
            source=source,
            parser=None if parser is None else TEMPLATE_PARSER.to_proto(parser),
            model_family_keywords=model_family_keywords,
            replace=replace,
        )
        answer = await self._channel.call(REGISTER_TEMPLATE, request)
        return TEMPLATE_INFO.from_proto(answer.template)

    async def list_templates(self) -> tuple[TemplateInfo, ...]:
        """Return all templates, the default one first."""
        answer = await self._channel.call(LIST_TEMPLATES, pb.ListTemplatesRequest())
        return tuple(TEMPLATE_INFO.from_proto(info) for info in answer.templates)

    async def render(
        self,
        history: History,
        *,
        template_name: str = "",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Iterable[ToolDefinition | Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> RenderedConversation:
        """Render a conversation with the named template, by default the one Generate uses."""
        request = pb.RenderRequest(
            history=HISTORY.to_proto(history),
            template_name=template_name,
            continue_final_message=continue_final_message,
            tools=[tool_to_proto(tool) for tool in tools],
            template_options_json=json.dumps(dict(template_options)) if template_options else "",
        )
        if add_generation_prompt is not None:
            request.add_generation_prompt = add_generation_prompt
        answer = await self._channel.call(RENDER, request)
        sequence = sequence_from_proto(answer.sequence)
        has_mask = len(answer.assistant_mask) == len(sequence)
        return RenderedConversation(
            text=answer.text,
            sequence=sequence,
            assistant_mask=np.array(answer.assistant_mask, np.bool_) if has_mask else None,
        )

    async def parse(
        self,
        *,
        text: str | None = None,
        token_ids: Iterable[int] | None = None,
        template_name: str = "",
        keep_default_system: bool = False,
    ) -> History:
        """Read rendered text or ids back; PreconditionFailed (NO_PARSER) where nothing can.

        The system message that Qwen's template writes where there is none is left out, so that what
        was rendered comes back, unless `keep_default_system`.
        """
        if (text is None) == (token_ids is None):
            raise InvalidInput(
                "Either text or token_ids is to be parsed.",
                reason=Reason.NOT_PARSEABLE,
                remedy="Give one of them.",
            )
        request = pb.ParseRequest(
            template_name=template_name,
            text=text,
            token_ids=None if token_ids is None else chat_pb2.TokenIds(values=token_ids),
            keep_default_system=keep_default_system,
        )
        return HISTORY.from_proto((await self._channel.call(PARSE, request)).history)
