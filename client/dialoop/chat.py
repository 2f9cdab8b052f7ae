"""Messages, histories and the contract between a policy and an environment.

All values are immutable; a method returns a new object.

    prompt = History.from_chats([{"role": "user", "content": "What is 3+4?"}])
    asked = ChatHistory(prompt=prompt)
    answered = asked.respond(Message(role="assistant", content="Result=7<submit>"))
    answered.require_full()      # user, assistant
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from dialoop.errors import InvalidHistory, PreconditionFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentPart:
    """One part of a multimodal message, as `ContentPart(type="text", text="hi")`."""

    type: str
    text: str | None = None
    url: str | None = None
    data: bytes | None = None
    mime_type: str | None = None
    name: str | None = None
    size: int | None = None
    function_name: str | None = None
    function_arguments_json: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call a chat model asks for; `arguments_json` is JSON text: `'{"a": 3}'`."""

    name: str
    arguments_json: str
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDefinition:
    """A tool a chat model may call; `parameters_json` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters_json: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message: `Message(role="user", content="What is 3+4?")`."""

    role: str
    content: str | tuple[ContentPart, ...] = ""
    is_complete: bool = True
    tool_calls: tuple[ToolCall, ...] = ()
    tool_responses: tuple[str, ...] = ()
    reasoning: str = ""
    tool_call_id: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if not self.role:
            raise InvalidHistory("A message has no role.", remedy="Set role, as 'user'.")

    @property
    def text(self) -> str:
        """The content as text; parts that are not text contribute nothing."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content)

    @classmethod
    def from_chat(cls, chat: Mapping[str, Any]) -> Message:
        """Make a message from a chat-API dict with `role` and `content`."""
        content = chat.get("content")
        if content is None:
            content = ""
        if not isinstance(content, str):
            content = tuple(ContentPart(**part) for part in content)
        return cls(role=str(chat.get("role", "")), content=content)

    def to_chat(self) -> dict[str, Any]:
        """The dict a chat template reads; tool calls and responses only when there are some."""
        chat: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls:
            chat["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments_json},
                }
                for call in self.tool_calls
            ]
        if self.tool_responses:
            chat["tool_responses"] = list(self.tool_responses)
        return chat


@dataclass(frozen=True, slots=True)
class History:
    """An ordered run of messages."""

    messages: tuple[Message, ...] = ()

    @classmethod
    def from_chats(cls, chats: Iterable[Mapping[str, Any]]) -> History:
        """Make a history from chat-API dicts."""
        return cls(tuple(Message.from_chat(chat) for chat in chats))

    def to_chats(self) -> list[dict[str, Any]]:
        """The dicts a chat template reads."""
        return [message.to_chat() for message in self.messages]

    def append(self, message: Message) -> History:
        """This history followed by one message."""
        return History((*self.messages, message))

    def extend(self, messages: History | Iterable[Message]) -> History:
        """This history followed by others' messages."""
        return History((*self.messages, *messages))

    def starts_with(self, other: History) -> bool:
        """Whether the first messages are exactly those of `other`."""
        return self.messages[: len(other)] == other.messages

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> History: ...
    def __getitem__(self, index: int | slice) -> Message | History:
        if isinstance(index, slice):
            return History(self.messages[index])
        return self.messages[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatHistory:
    """Prompt, response and full; where all three are set, full == prompt ++ response.

    `None` is absent, which is not the same as an empty history.
    """

    prompt: History | None = None
    response: History | None = None
    full: History | None = None

    def __post_init__(self) -> None:
        if self.prompt is None or self.response is None or self.full is None:
            return
        if self.full.messages != self.prompt.messages + self.response.messages:
            raise InvalidHistory(
                f"full has {len(self.full)} messages that are not the {len(self.prompt)} of prompt "
                f"followed by the {len(self.response)} of response.",
                reason="FULL_NOT_PROMPT_AND_RESPONSE",
                remedy="Build full with ChatHistory.respond, or send response alone.",
            )

    def respond(self, *response: Message) -> ChatHistory:
        """This history answered: prompt, response and full, together."""
        if self.prompt is None:
            raise InvalidHistory(
                "There is no prompt to respond to.",
                reason="PROMPT_MISSING",
                remedy="Reset the environment first: its answer carries the prompt.",
            )
        answer = History(tuple(response))
        return replace(self, response=answer, full=self.prompt.extend(answer))

    def require_full(self) -> History:
        """The whole conversation; an error when the policy did not set it."""
        if self.full is None:
            raise InvalidHistory(
                "full is missing.",
                reason="FULL_MISSING",
                remedy="A policy must answer with prompt, response and full.",
            )
        return self.full

    def require_prompt(self) -> History:
        """The prompt; an error when it is absent."""
        if self.prompt is None:
            raise InvalidHistory(
                "prompt is missing.", reason="PROMPT_MISSING", remedy="Send history.prompt."
            )
        return self.prompt

    def completed_from(self, prompt: History) -> ChatHistory:
        """This answer to `prompt`, with `full` built where the caller sent `response` alone.

        Raises InvalidHistory (FULL_MISSING) when neither is there, and PreconditionFailed
        (HISTORY_REWRITTEN) when `full` does not begin with `prompt`.
        """
        if self.full is None and self.response is not None:
            return ChatHistory(prompt=prompt).respond(*self.response)
        full = self.require_full()
        if not full.starts_with(prompt):
            raise PreconditionFailed(
                f"full does not begin with the {len(prompt)} messages of the prompt.",
                reason="HISTORY_REWRITTEN",
                remedy="Send the prompt unchanged, followed by the response.",
            )
        return ChatHistory(prompt=prompt).respond(*full[len(prompt) :])


def as_history(messages: History | Sequence[Mapping[str, Any]] | str) -> History:
    """A history from what a user has at hand: a history, chat dicts or one user text."""
    if isinstance(messages, History):
        return messages
    if isinstance(messages, str):
        return History((Message(role="user", content=messages),))
    return History.from_chats(messages)
