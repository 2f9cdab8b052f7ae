"""A second reading of a JSON body that was refused: what it may mean, and the warning that says so.

A single message where several are expected is made a history:

{"history": {"prompt": {"role": "user", "content": "3+4"}}}                 a message for a history
{"history": {"prompt": {"messages": {"role": "user", "content": "3+4"}}}}   a message for its list
{"history": {"prompt": [{"role": "user", "content": "3+4"}]}}               a list for a history

All three become {"history": {"prompt": {"messages": [{"role": "user", "content": "3+4"}]}}}; the
first two with a warning, as one dimension was missing. A conversation where rows of them are
expected (LogProb's histories) becomes the one row, with a warning. Nothing else is promoted, and
nothing where the answer has no `warnings` to say it in. Sampling is also read in older names.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidHistory
from dialoop.reasons import Reason

from dialoop_services.rest.old_field_names import modern_sampling

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

_HISTORY, _CHAT = "dialoop.v1.History", "dialoop.v1.ChatHistory"
_GENERATE = "dialoop.v1.GenerateRequest"
_IS_ONE_MESSAGE = "a single message stands where {} is expected; it was made one."


def reread(body: bytes, request: Descriptor) -> tuple[bytes, list[str]] | None:
    """The body with messages made histories, and what to say of it; None where none was.

    Raises InvalidHistory (BATCH_OF_HISTORIES) where several conversations stand in one's place, and
    what `read_generate_options` does.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    found = _Reading()
    made = found.message(fields, request, "")
    return (json.dumps(made).encode(), found.warnings) if found.is_any else None


class _Reading:
    """A walk through a body along its request's descriptor."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.is_any = False

    def message(self, value: Any, kind: Descriptor, path: str) -> Any:
        if kind.full_name == _HISTORY:
            value = self._history(value, path)
        if not isinstance(value, dict):
            return value
        if kind.full_name == _GENERATE:
            value = self._sampling(value)
        known = kind.fields_by_name
        return {
            name: self._field(inner, known[name], _inside(path, name)) if name in known else inner
            for name, inner in value.items()
        }

    def _field(self, value: Any, field: FieldDescriptor, path: str) -> Any:
        kind = field.message_type
        if kind is None or kind.GetOptions().map_entry:
            return value
        if not field.is_repeated:
            return self.message(value, kind, path)
        if kind.full_name == _CHAT and isinstance(value, dict):
            value = self._wrapped(
                value, f"{path}: a single conversation stands where rows are expected; it is one."
            )
        if not isinstance(value, list):
            return value
        return [self.message(one, kind, f"{path}.{i}") for i, one in enumerate(value)]

    def _history(self, value: Any, path: str) -> Any:
        if _is_message(value):
            said = f"{path}: {_IS_ONE_MESSAGE.format('a history')}"
            return {"messages": self._wrapped(value, said)}
        if isinstance(value, list):
            _require_one_history(value, path)
            self.is_any = True
            return {"messages": value}
        if isinstance(value, dict) and _is_message(value.get("messages")):
            said = f"{_inside(path, 'messages')}: {_IS_ONE_MESSAGE.format('a list of messages')}"
            return {**value, "messages": self._wrapped(value["messages"], said)}
        return value

    def _sampling(self, value: dict[str, Any]) -> dict[str, Any]:
        found = modern_sampling(value)
        if found is None:
            return value
        self.is_any = True
        self.warnings.extend(found[1])
        return found[0]

    def _wrapped(self, value: Any, said: str) -> list[Any]:
        self.is_any = True
        self.warnings.append(said)
        return [value]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _require_one_history(messages: list[Any], path: str) -> None:
    if any(isinstance(one, list) for one in messages):
        raise InvalidHistory(
            f"{path} is a batch of histories where one is expected.",
            reason=Reason.BATCH_OF_HISTORIES,
            remedy="Send one request for each, or use /v1/batch/reset and /v1/batch/step.",
        )


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
