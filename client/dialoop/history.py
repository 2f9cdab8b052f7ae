"""The same names as `dialoop.chat`."""

from dialoop.chat import ChatHistory, ContentPart, History, Message, ToolCall, as_history

__all__ = ["ChatHistory", "ContentPart", "History", "Message", "ToolCall", "as_history"]
