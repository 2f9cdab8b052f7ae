"""Messages and tools of OpenAI's API as Dialoop's own, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dialoop.chat import History, Message, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dialoop_services.inference.wires.openai.models import ChatMessage


def history_of(messages: Iterable[ChatMessage]) -> History:
    """Return the conversation; text parts become one text, and `developer` becomes `system`.

    A tool's answer gets the name of the call that it answers, which Gemma 4's template writes.
    """
    named: dict[str, str] = {}
    history: list[Message] = []
    for message in messages:
        named |= {call.id: call.function.name for call in message.tool_calls or ()}
        history.append(_message(message, named.get(message.tool_call_id or "", "")))
    return History(tuple(history))


def _message(message: ChatMessage, answered: str) -> Message:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=text,
        reasoning=message.reasoning_content or message.reasoning or "",
        tool_calls=tuple(
            ToolCall(id=c.id, name=c.function.name, arguments_json=c.function.arguments)
            for c in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id or "",
        name=message.name or answered,
    )


def message_json(message: Message) -> dict[str, Any]:
    """Return an assistant's message as OpenAI's JSON."""
    document: dict[str, Any] = {"role": message.role, "content": message.text or None}
    if not message.tool_calls:
        document["content"] = message.text
    if message.reasoning:
        document["reasoning_content"] = message.reasoning
    if message.tool_calls:
        document["tool_calls"] = [call_json(call) for call in message.tool_calls]
    return document


def call_json(call: ToolCall) -> dict[str, Any]:
    """Return a tool call as OpenAI's JSON."""
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}
