"""The calls of TemplateService that every door must answer alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from dialoop.v1 import template_service_pb2 as tem
from google.protobuf.message import Message as Proto

Call = Callable[[str, Proto], Awaitable[Any]]


async def template_script(call: Call, history: dict[str, Any]) -> None:
    async def of(name: str, request: Proto) -> Any:
        return await call(f"TemplateService.{name}", request)

    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"
    )
    for fields in (
        {"source": source},
        {"source": source},
        {"source": f"{source}!"},
        {"source": ""},
    ):
        await of("RegisterTemplate", tem.RegisterTemplateRequest(name="plain", **fields))
    parser = tem.TemplateParser(message_pattern="(")
    await of(
        "RegisterTemplate", tem.RegisterTemplateRequest(name="p", source=source, parser=parser)
    )
    await of("ListTemplates", tem.ListTemplatesRequest())
    for name in ("bytes", "plain", "qwen", "nope"):
        for fields in ({"history": history, "add_generation_prompt": False}, {}):
            await of("Render", tem.RenderRequest(template_name=name, **fields))
    options = tem.RenderRequest(
        template_name="bytes", history=history, template_options_json="[]", tools=[{"name": "f"}]
    )
    await of("Render", options)
    for fields in ({"text": "<|im_start|>user\nhi"}, {"token_ids": {"values": [1, 2]}}, {}):
        for name in ("bytes", "plain"):
            await of("Parse", tem.ParseRequest(template_name=name, **fields))
