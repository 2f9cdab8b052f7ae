"""torchrl's `torchrl.data.llm.history`: `dialoop.chat`, and a History by torchrl's arguments.

History(role="user", content="Hello").append({"role": "assistant", "content": "Hi"}, dim=-1)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dialoop.chat import (
    ChatHistory,
    ContentPart,
    Histories,
    Message,
    ToolCall,
    ToolDefinition,
    as_history,
    history_of,
)
from dialoop.chat import History as Messages
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason

from dialoop_extras.compat.names import add_default_template as add_chat_template

__all__ = [
    "ChatHistory",
    "ContentPart",
    "Histories",
    "History",
    "Message",
    "ToolCall",
    "ToolDefinition",
    "add_chat_template",
    "as_history",
    "lazy_stack",
]


class SourceHistory(Messages):
    """torchrl's History: messages, or one by its role and content.

    It is a value: `append` and `extend` return the longer one, so inplace=True is refused. It
    compares equal to a plain history of the same messages.
    """

    __slots__ = ()

    def __init__(
        self,
        messages: Iterable[Message | Mapping[str, Any]] = (),
        *,
        role: str | None = None,
        content: Any = None,
        **fields: Any,
    ) -> None:
        one = {name: value for name, value in {"role": role, "content": content}.items() if value}
        if one or fields:
            messages = (*messages, {**one, **fields})
        super().__init__(tuple(messages))  # type: ignore[arg-type]  # dicts become messages

    def append(
        self, message: Any, *, inplace: bool | None = None, dim: int | None = None
    ) -> SourceHistory:
        """Return this history followed by one message, or by a history of one."""
        if isinstance(message, Messages):
            return self.extend(message, inplace=inplace, dim=dim)
        _require_value(inplace, dim)
        return SourceHistory(super().append(message))

    def extend(
        self, messages: Any, *, inplace: bool | None = None, dim: int | None = None
    ) -> SourceHistory:
        """Return this history followed by others' messages."""
        _require_value(inplace, dim)
        return SourceHistory(super().extend(messages))

    @property
    def batch_dims(self) -> int:
        """Return 1: a history is one conversation of messages."""
        return 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Messages):
            return NotImplemented
        return self.messages == other.messages

    def __hash__(self) -> int:
        return hash(history_of(self.messages))


History = SourceHistory


def lazy_stack(histories: Iterable[Messages], dim: int = 0) -> SourceHistory:
    """Return the messages of the histories as one history: tensordict's stack of single messages.

    Raises InvalidInput (BAD_OPTIONS) for another `dim`.
    """
    _require_value(None, dim)
    return SourceHistory([message for history in histories for message in history])


def _require_value(inplace: bool | None, dim: int | None) -> None:
    if inplace:
        raise InvalidInput(
            "inplace is True, and a history is a value.",
            reason=Reason.BAD_OPTIONS,
            remedy="Take what the call returns: history = history.append(message).",
        )
    if dim not in (None, -1, 0):
        raise InvalidInput(
            f"dim is {dim}, and a history has one dimension, its messages.",
            reason=Reason.BAD_OPTIONS,
            remedy="Leave it out; History.from_chats makes several histories side by side.",
        )
