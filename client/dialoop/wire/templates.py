"""Templates and their parsers to protobuf and back."""

from __future__ import annotations

from dialoop.templates.declared_parser import TemplateParser
from dialoop.templates.registry import TemplateInfo
from dialoop.v1 import template_service_pb2 as pb
from dialoop.wire.codec import Codec, FieldRow

TEMPLATE_PARSER = Codec(TemplateParser, pb.TemplateParser)
TEMPLATE_INFO = Codec(
    TemplateInfo,
    pb.TemplateInfo,
    model_family_keywords=FieldRow(
        lambda _: {}, lambda _: (), spreads=True
    ),  # stays in the registry
)
