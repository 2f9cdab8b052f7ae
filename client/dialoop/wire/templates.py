"""Templates and their parsers to protobuf and back."""

from __future__ import annotations

from dialoop.templates.declared_parser import TemplateParser
from dialoop.templates.registry import TemplateInfo
from dialoop.v1 import template_service_pb2 as pb

_TEXTS = (
    "message_pattern",
    "tool_call_start",
    "tool_call_end",
    "tool_response_start",
    "tool_response_end",
    "reasoning_start",
    "reasoning_end",
)


def template_parser_to_proto(parser: TemplateParser) -> pb.TemplateParser:
    """A parser as data."""
    texts = {name: getattr(parser, name) for name in _TEXTS}
    return pb.TemplateParser(roles=dict(parser.roles), end_markers=parser.end_markers, **texts)


def template_parser_from_proto(proto: pb.TemplateParser) -> TemplateParser:
    """A parser as data; InvalidInput (TEMPLATE_INVALID) when its fields do not fit together."""
    texts = {name: getattr(proto, name) for name in _TEXTS}
    return TemplateParser(roles=dict(proto.roles), end_markers=tuple(proto.end_markers), **texts)


def template_info_to_proto(info: TemplateInfo) -> pb.TemplateInfo:
    """What is known of a template."""
    return pb.TemplateInfo(
        name=info.name,
        digest=info.digest,
        version=info.version,
        invertible=info.invertible,
        is_default=info.is_default,
    )


def template_info_from_proto(proto: pb.TemplateInfo) -> TemplateInfo:
    """What is known of a template."""
    return TemplateInfo(
        name=proto.name,
        digest=proto.digest,
        version=proto.version,
        invertible=proto.invertible,
        is_default=proto.is_default,
    )
