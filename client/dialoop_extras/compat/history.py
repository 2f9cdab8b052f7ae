"""The same names as `dialoop.chat`."""

from dialoop.chat import (
    ChatHistory,
    ContentPart,
    Histories,
    History,
    Message,
    ToolCall,
    ToolDefinition,
    as_history,
)

__all__ = [
    "ChatHistory",
    "ContentPart",
    "Histories",
    "History",
    "Message",
    "ToolCall",
    "ToolDefinition",
    "as_history",
]
