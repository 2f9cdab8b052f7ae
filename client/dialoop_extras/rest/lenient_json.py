"""Read a rejected JSON body a second time, leniently, and warn about each correction.

A single message where several are expected becomes a history:

{"history": {"prompt": {"role": "user", "content": "3+4"}}}                 a message for a history
{"history": {"prompt": {"messages": {"role": "user", "content": "3+4"}}}}   a message for its list
{"history": {"prompt": [{"role": "user", "content": "3+4"}]}}               a list for a history

All three become {"history": {"prompt": {"messages": [{"role": "user", "content": "3+4"}]}}}; the
first two give a warning, because a dimension was missing. One conversation where rows of them are
expected (LogProb's histories) becomes the only row, with a warning. Nothing else is corrected, and
nothing at all where the answer has no `warnings`. Old names of sampling parameters are read too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidHistory
from dialoop.reasons import Reason

from dialoop_extras.rest.old_field_names import rename_old_sampling

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

_HISTORY, _CHAT = "dialoop.v1.History", "dialoop.v1.ChatHistory"
_GENERATE = "dialoop.v1.GenerateRequest"
_SINGLE_MESSAGE = "there is a single message where {} is expected; it was read as one."


def read_leniently(body: bytes, request: Descriptor) -> tuple[bytes, list[str]] | None:
    """Return the corrected body and its warnings, or None where nothing could be corrected.

    Raise InvalidHistory (BATCH_OF_HISTORIES) where there are several conversations in place of
    one, and what `read_generate_options` raises.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    reader = _LenientReader()
    corrected = reader.read_message(fields, request, "")
    return (json.dumps(corrected).encode(), reader.warnings) if reader.has_corrected else None


class _LenientReader:
    """Walks through a body along its request's descriptor and corrects it."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.has_corrected = False

    def read_message(self, value: Any, kind: Descriptor, path: str) -> Any:
        if kind.full_name == _HISTORY:
            value = self._history(value, path)
        if not isinstance(value, dict):
            return value
        if kind.full_name == _GENERATE:
            value = self._sampling(value)
        fields = kind.fields_by_name
        return {
            name: self._field(inner, fields[name], _inside(path, name)) if name in fields else inner
            for name, inner in value.items()
        }

    def _field(self, value: Any, field: FieldDescriptor, path: str) -> Any:
        kind = field.message_type
        if kind is None or kind.GetOptions().map_entry:
            return value
        if not field.is_repeated:
            return self.read_message(value, kind, path)
        if kind.full_name == _CHAT and isinstance(value, dict):
            value = self._wrap(
                value,
                f"{path}: there is a single conversation where rows are expected; it was read as "
                "one row.",
            )
        if not isinstance(value, list):
            return value
        return [self.read_message(item, kind, f"{path}.{i}") for i, item in enumerate(value)]

    def _history(self, value: Any, path: str) -> Any:
        if _is_message(value):
            warning = f"{path}: {_SINGLE_MESSAGE.format('a history')}"
            return {"messages": self._wrap(value, warning)}
        if isinstance(value, list):
            _require_one_history(value, path)
            self.has_corrected = True
            return {"messages": value}
        if isinstance(value, dict) and _is_message(value.get("messages")):
            warning = f"{_inside(path, 'messages')}: {_SINGLE_MESSAGE.format('a list of messages')}"
            return {**value, "messages": self._wrap(value["messages"], warning)}
        return value

    def _sampling(self, value: dict[str, Any]) -> dict[str, Any]:
        renamed = rename_old_sampling(value)
        if renamed is None:
            return value
        self.has_corrected = True
        self.warnings.extend(renamed[1])
        return renamed[0]

    def _wrap(self, value: Any, warning: str) -> list[Any]:
        self.has_corrected = True
        self.warnings.append(warning)
        return [value]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _require_one_history(messages: list[Any], path: str) -> None:
    if any(isinstance(message, list) for message in messages):
        raise InvalidHistory(
            f"{path} is a batch of histories where one is expected.",
            reason=Reason.BATCH_OF_HISTORIES,
            remedy="Send one request for each, or use /v1/batch/reset and /v1/batch/step.",
        )


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
