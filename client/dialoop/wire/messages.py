"""Messages and histories, as text, tokens, log-probs and masks, to protobuf and back."""

from __future__ import annotations

import json
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np

from dialoop.chat import (
    ChatHistory,
    ContentPart,
    History,
    Message,
    ToolCall,
    ToolDefinition,
)
from dialoop.environments.modes import Text, Tokens
from dialoop.errors import InvalidHistory
from dialoop.messages import tool_for_template
from dialoop.reasons import Reason
from dialoop.trajectory import Distribution
from dialoop.v1 import chat_pb2 as pb
from dialoop.views.views import LogProbRow, LogProbs, Masks
from dialoop.wire.codec import Codec, FieldRow, array, many, submessage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dialoop.sequences import Floats


def _content_fields(content: str | tuple[ContentPart, ...]) -> dict[str, Any]:
    if isinstance(content, str):
        return {"content": content}
    return {"parts": pb.ContentParts(parts=map(PART.to_proto, content))}


def _content(proto: pb.Message) -> str | tuple[ContentPart, ...]:
    if proto.WhichOneof("body") == "parts":
        return tuple(map(PART.from_proto, proto.parts.parts))
    return proto.content


def _mask(values: Any) -> Any:
    return np.array(values, dtype=np.bool_) if values else None


def _token_ids(ids: Any) -> pb.TokenIds | None:
    return None if ids is None else pb.TokenIds(values=ids)


PART = Codec(ContentPart, pb.ContentPart)
TOOL_CALL = Codec(ToolCall, pb.ToolCall)
TOOL = Codec(
    ToolDefinition,
    pb.ToolDefinition,
    parameters_json=FieldRow(str, lambda schema: schema or "{}"),
)
_TEXT_IF_ANY = FieldRow(lambda text: text or None, str)
MESSAGE = Codec(
    Message,
    pb.Message,
    content=FieldRow(_content_fields, _content, spreads=True),
    is_complete=FieldRow(lambda is_complete: None if is_complete else False, bool),
    tool_calls=many(TOOL_CALL),
    reasoning=_TEXT_IF_ANY,
    tool_call_id=_TEXT_IF_ANY,
    name=_TEXT_IF_ANY,
)
HISTORY = Codec(History, pb.History, messages=many(MESSAGE))
CHAT_HISTORY = Codec(
    ChatHistory,
    pb.ChatHistory,
    prompt=submessage(HISTORY),
    response=submessage(HISTORY),
    full=submessage(HISTORY),
)
TEXT = Codec(Text, pb.Text)
_IDS = FieldRow(_token_ids, lambda proto: tuple(proto.values))
TOKENS = Codec(Tokens, pb.Tokens, prompt=_IDS, response=_IDS, full=_IDS)
LOG_PROB_ROW = Codec(LogProbRow, pb.LogProbValues, values=array(np.float32))
LOG_PROBS = Codec(
    LogProbs,
    pb.LogProbs,
    prompt=submessage(LOG_PROB_ROW),
    response=submessage(LOG_PROB_ROW),
    full=submessage(LOG_PROB_ROW),
    # A distribution that this version does not know becomes None.
    distribution=FieldRow(int, {int(member): member for member in Distribution}.get),
)
_MASK = FieldRow(methodcaller("tolist"), _mask)
MASKS = Codec(Masks, pb.Masks, all_attention_mask=_MASK, all_assistant_mask=_MASK)


def tool_to_proto(tool: ToolDefinition | Mapping[str, Any]) -> pb.ToolDefinition:
    """Return a tool; a dict goes as it is."""
    if isinstance(tool, ToolDefinition):
        return TOOL.to_proto(tool)
    return pb.ToolDefinition(given_json=json.dumps(tool_for_template(tool), ensure_ascii=False))


def tool_from_proto(proto: pb.ToolDefinition) -> ToolDefinition | Mapping[str, Any]:
    """Return a tool, or the dict that was sent; InvalidHistory (TOOL_INVALID) for no object."""
    if not proto.given_json:
        return TOOL.from_proto(proto)
    try:
        tool = json.loads(proto.given_json)
    except (ValueError, RecursionError):
        tool = None
    if not isinstance(tool, dict):
        raise InvalidHistory(
            "given_json of a tool is not a JSON object.",
            reason=Reason.TOOL_INVALID,
            remedy="Give the tool as a chat API has it, with type and function.",
        )
    return tool


def token_ids_to_proto(rows: Iterable[Iterable[int]]) -> list[pb.TokenIds]:
    """Return rows of token ids."""
    return [pb.TokenIds(values=map(int, row)) for row in rows]


def logprobs_to_proto(rows: Iterable[Floats]) -> list[pb.LogProbValues]:
    """Return rows of log-probs from position 1 on: the token at position 0 has none."""
    return [pb.LogProbValues(values=row.tolist(), start=1) for row in rows]


def logprobs_from_proto(rows: Iterable[pb.LogProbValues]) -> tuple[Floats, ...]:
    """Return rows of log-probs, float32, from position 1 on."""
    return tuple(np.array(row.values[:], dtype=np.float32) for row in rows)
