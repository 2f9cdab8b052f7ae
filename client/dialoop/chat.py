"""Histories of messages and the contract between a policy and an environment.

All values are immutable; a method returns a new object.

    prompt = History.from_chats([{"role": "user", "content": "What is 3+4?"}])
    asked = ChatHistory(prompt=prompt)
    answered = asked.respond(Message(role="assistant", content="Result=7<submit>"))
    answered.require_full()      # user, assistant
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack, overload

from dialoop.errors import DialoopWarning, InvalidHistory, PreconditionFailed
from dialoop.messages import ContentPart as ContentPart
from dialoop.messages import Message as Message
from dialoop.messages import ToolCall as ToolCall
from dialoop.messages import ToolDefinition as ToolDefinition
from dialoop.messages import message_from_chat, messages_from_chats
from dialoop.reasons import Reason
from dialoop.representations import messages_html, messages_line, messages_text

if TYPE_CHECKING:
    from dialoop.templates.options import TemplateOptions
    from dialoop.templates.registry import TemplateRegistry
    from dialoop.text_and_tokens import Text, Tokens
    from dialoop.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class History(Sequence[Message]):
    """An ordered run of messages.

    Chat-API dicts among them become messages, and a list becomes a tuple. A single message becomes
    a history of one, with a warning; anything else is InvalidHistory (WRONG_TYPE).
    """

    messages: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        if type(self.messages) is not tuple or not {type(m) for m in self.messages} <= _MESSAGE:
            object.__setattr__(self, "messages", _as_messages(self.messages, "messages"))

    @overload
    @classmethod
    def from_chats(cls, chats: Iterable[Mapping[str, Any]] | Mapping[str, Any]) -> History: ...
    @overload
    @classmethod
    def from_chats(cls, chats: Iterable[Iterable[Mapping[str, Any]]]) -> Histories: ...
    @classmethod
    def from_chats(cls, chats: Any) -> History | Histories:
        """Make a history of chat-API dicts, or histories of lists of them (of any lengths).

        A single dict is promoted to a history of one message, with a warning.
        """
        chats = _promote(chats)
        items = list(chats)
        if items and not isinstance(items[0], (Mapping, Message)):
            _require_two_deep(items)
            return Histories(
                tuple(
                    cls(messages_from_chats(_promote(chat), f"chats[{i}]"))
                    for i, chat in enumerate(items)
                )
            )
        return cls(messages_from_chats(items))

    @classmethod
    def from_columns(cls, *, role: Sequence[Any], content: Sequence[Any]) -> History | Histories:
        """Make a history of a role and a content for each message, or histories of lists of them.

        History.from_columns(role=["user", "assistant"], content=["3+4?", "7"]).content[1]   # "7"
        """
        if isinstance(role, str) or isinstance(content, str) or len(role) != len(content):
            raise InvalidHistory(
                f"There are {len(role)} roles and {len(content)} contents.",
                reason=Reason.RAGGED,
                remedy="Give two lists of the same length.",
            )
        pairs = tuple(zip(role, content, strict=True))
        if role and not isinstance(role[0], str):
            rows: list[Any] = [cls.from_columns(role=r, content=c) for r, c in pairs]
            return Histories(tuple(rows))
        return cls(tuple(Message(role=r, content=c) for r, c in pairs))

    @classmethod
    def from_text(
        cls,
        text: str,
        tokenizer: Tokenizer | None = None,
        *,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        registry: TemplateRegistry | None = None,
        keep_default_system: bool = False,
    ) -> History:
        """Read a rendered conversation back through its template's parser.

        Qwen's template writes a system message where there is none; it is left out unless
        `keep_default_system`. Raises InvalidInput (NOT_PARSEABLE), PreconditionFailed (NO_PARSER).
        """
        from dialoop.templates.options import choose_template

        template = choose_template(tokenizer, chat_template, chat_template_name, registry)
        return cls(template.parse(text, keep_default_system=keep_default_system))

    @classmethod
    def from_tokens(
        cls,
        token_ids: Sequence[int],
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        registry: TemplateRegistry | None = None,
        keep_default_system: bool = False,
    ) -> History:
        """Read token ids back; text that merely spells a special token opens and closes no turn."""
        from dialoop.templates.options import choose_template

        template = choose_template(tokenizer, chat_template, chat_template_name, registry)
        messages = template.parse_tokens(
            token_ids, tokenizer, keep_default_system=keep_default_system
        )
        return cls(messages)

    def to_chats(self) -> list[dict[str, Any]]:
        """Return the chat-API dicts of the messages."""
        return [message.to_chat() for message in self.messages]

    def apply_chat_template(
        self, tokenizer: Tokenizer | None = None, **options: Unpack[TemplateOptions]
    ) -> Any:
        """Return the conversation as text, token ids, or a dict with masks; see TemplateOptions."""
        from dialoop.templates.options import apply_to_history

        return apply_to_history(self, tokenizer, options)

    def append(self, message: Message | Mapping[str, Any]) -> History:
        """Return this history followed by one message or chat-API dict."""
        return history_of((*self.messages, message_from_chat(message)))

    def extend(self, messages: History | Iterable[Message | Mapping[str, Any]]) -> History:
        """Return this history followed by others' messages."""
        if not isinstance(messages, History):
            messages = History(_as_messages(messages, "messages"))
        return history_of(self.messages + messages.messages) if messages else self

    @property
    def role(self) -> tuple[str, ...]:
        """Return the role of each message."""
        return tuple(message.role for message in self.messages)

    @property
    def content(self) -> tuple[str | tuple[ContentPart, ...], ...]:
        """Return the content of each message."""
        return tuple(message.content for message in self.messages)

    def starts_with(self, other: History) -> bool:
        """Return whether the first messages are exactly those of `other`."""
        return self.messages[: len(other)] == other.messages

    def __repr__(self) -> str:
        return f"History({len(self)} messages: {messages_line(self)})"

    def __rich__(self) -> Any:
        return messages_text(self)

    def _repr_html_(self) -> str:
        return messages_html(self)

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
            return history_of(self.messages[index])
        return self.messages[index]


@dataclass(frozen=True, slots=True)
class Histories:
    """Conversations of different lengths, side by side; each keeps its own length.

    Lists of messages among them become histories.
    """

    histories: tuple[History, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.histories, (str, History, Message, Mapping)):
            raise _wrong_type(self.histories, "histories", "a list of histories")
        parts = tuple(self.histories)
        for i, part in enumerate(parts):
            if isinstance(part, (str, Message, Mapping)):
                raise _wrong_type(part, f"histories[{i}]", "a history or a list of messages")
        histories = tuple(h if isinstance(h, History) else History(tuple(h)) for h in parts)
        object.__setattr__(self, "histories", histories)

    @property
    def role(self) -> tuple[tuple[str, ...], ...]:
        """Return the roles of each history."""
        return tuple(history.role for history in self.histories)

    @property
    def content(self) -> tuple[tuple[str | tuple[ContentPart, ...], ...], ...]:
        """Return the contents of each history."""
        return tuple(history.content for history in self.histories)

    def to_chats(self) -> list[list[dict[str, Any]]]:
        """Return the chat-API dicts of each history."""
        return [history.to_chats() for history in self.histories]

    def append(self, messages: Sequence[Message]) -> Histories:
        """Return each history followed by its own message."""
        return self.extend([(message,) for message in messages])

    def extend(self, others: Histories | Sequence[Iterable[Message]]) -> Histories:
        """Return each history followed by its own messages."""
        if len(others) != len(self):
            raise InvalidHistory(
                f"{len(others)} lists of messages cannot extend {len(self)} histories.",
                remedy="Give one list for each history; it may be empty.",
            )
        pairs = zip(self.histories, others, strict=True)
        return Histories(tuple(history.extend(messages) for history, messages in pairs))

    def apply_chat_template(
        self, tokenizer: Tokenizer | None = None, **options: Unpack[TemplateOptions]
    ) -> Any:
        """Return each history's result in a list, or a dict of padded rows; see TemplateOptions."""
        from dialoop.templates.options import apply_to_histories

        return apply_to_histories(self, tokenizer, options)

    def __iter__(self) -> Iterator[History]:
        return iter(self.histories)

    def __len__(self) -> int:
        return len(self.histories)

    @overload
    def __getitem__(self, index: int) -> History: ...
    @overload
    def __getitem__(self, index: slice) -> Histories: ...
    def __getitem__(self, index: int | slice) -> History | Histories:
        if isinstance(index, slice):
            return Histories(self.histories[index])
        return self.histories[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatHistory:
    """Prompt, response and full; where all three are set, full == prompt ++ response.

    `None` means absent, which differs from an empty history. A list of messages or of chat-API
    dicts becomes a history.
    """

    prompt: History | None = None
    response: History | None = None
    full: History | None = None

    def __post_init__(self) -> None:
        if not {type(self.prompt), type(self.response), type(self.full)} <= _PARTS:
            for name in ("prompt", "response", "full"):
                part = getattr(self, name)
                if part is not None and not isinstance(part, History):
                    object.__setattr__(self, name, history_of(_as_messages(part, name)))
        if self.prompt is None or self.response is None or self.full is None:
            return
        if self.full.messages != self.prompt.messages + self.response.messages:
            raise InvalidHistory(
                f"full has {len(self.full)} messages that are not the {len(self.prompt)} of prompt "
                f"followed by the {len(self.response)} of response.",
                reason=Reason.FULL_NOT_PROMPT_AND_RESPONSE,
                remedy="Build full with ChatHistory.respond, or send response alone.",
            )

    def respond(self, *response: Message) -> ChatHistory:
        """Return this history with the response: prompt, response and full are all set."""
        if self.prompt is None:
            raise InvalidHistory(
                "There is no prompt to respond to.",
                reason=Reason.PROMPT_MISSING,
                remedy="Reset the environment first: its answer carries the prompt.",
            )
        return _as_answer(self.prompt, History(tuple(response)))

    def require_full(self) -> History:
        """Return the whole conversation; InvalidHistory (FULL_MISSING) where it is not set."""
        if self.full is None:
            raise InvalidHistory(
                "full is missing.",
                reason=Reason.FULL_MISSING,
                remedy="A policy must answer with prompt, response and full.",
            )
        return self.full

    def require_prompt(self) -> History:
        """Return the prompt; raise InvalidHistory (PROMPT_MISSING) where it is absent."""
        if self.prompt is None:
            raise InvalidHistory(
                "prompt is missing.", reason=Reason.PROMPT_MISSING, remedy="Send history.prompt."
            )
        return self.prompt

    def to_text(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        registry: TemplateRegistry | None = None,
        **options: Any,
    ) -> Text:
        """Render prompt (with the assistant's opening), response and full; PROMPT_NOT_PREFIX.

        The template is chosen as in `History.apply_chat_template`; `options` are its variables.
        """
        from dialoop.templates.options import choose_template
        from dialoop.templates.parts import text_of_parts

        template = choose_template(tokenizer, chat_template, chat_template_name, registry)
        return text_of_parts(self.prompt, self.full, template, **options)

    def to_tokens(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        registry: TemplateRegistry | None = None,
        **options: Any,
    ) -> Tokens:
        """Encode prompt, response and full as `to_text` renders them.

        What a policy sampled has its own ids, which these need not equal; this is for
        demonstrations and scoring.
        """
        from dialoop.templates.options import as_tokenizer, choose_template
        from dialoop.templates.parts import tokens_of_parts

        template = choose_template(tokenizer, chat_template, chat_template_name, registry)
        ours = as_tokenizer(tokenizer) or tokenizer
        return tokens_of_parts(self.prompt, self.full, template, ours, **options)

    def completed_from(self, prompt: History) -> ChatHistory:
        """Return this answer to `prompt`; build `full` where the caller sent none.

        Raises InvalidHistory where there is no response either (FULL_MISSING) or another one than
        in `full` (FULL_NOT_PROMPT_AND_RESPONSE), and PreconditionFailed (HISTORY_REWRITTEN) where
        what was sent does not begin with `prompt`.
        """
        response = self.response
        if response is None:
            response = self.require_full()[len(prompt) :]
        if self.prompt not in (None, prompt):
            raise _rewritten("prompt is not", prompt)
        if self.full is None:
            return _as_answer(prompt, response)
        if not self.full.starts_with(prompt):
            raise _rewritten("full does not begin with", prompt)
        return ChatHistory(prompt=prompt, response=response, full=self.full)


_PARTS = {History, type(None)}
_MESSAGE = {Message}


def _rewritten(what: str, prompt: History) -> PreconditionFailed:
    return PreconditionFailed(
        f"{what} the {len(prompt)} messages of the episode's prompt.",
        reason=Reason.HISTORY_REWRITTEN,
        remedy="Send the prompt unchanged, or the response alone; GetSession shows the prompt.",
    )


def _as_answer(prompt: History, response: History) -> ChatHistory:
    """Return prompt, response and both as full."""
    return ChatHistory(prompt=prompt, response=response, full=prompt.extend(response))


def _require_two_deep(conversations: Iterable[Any]) -> None:
    for i, chat in enumerate(conversations):
        if isinstance(chat, (list, tuple)) and chat and isinstance(chat[0], (list, tuple)):
            raise InvalidHistory(
                f"chats[{i}][0] is a list, so the conversations are nested three deep.",
                reason=Reason.WRONG_TYPE,
                remedy="Give a list of conversations: call from_chats for each list of them.",
            )


def _promote(chats: Any) -> Any:
    """Return a list, also of a single message; that gets a warning."""
    if not isinstance(chats, (Mapping, Message)):
        return chats
    warnings.warn(
        "A single message stands where a list of messages is expected; Dialoop made one of it.",
        DialoopWarning,
        stacklevel=3,
    )
    return [chats]


def history_of(messages: tuple[Message, ...]) -> History:
    """Make a history of messages that are known to be messages, without looking at each again."""
    history = object.__new__(History)
    object.__setattr__(history, "messages", messages)
    return history


def _as_messages(value: Any, where: str) -> tuple[Message, ...]:
    """Return messages; a single one gets a warning. InvalidHistory (WRONG_TYPE) for others."""
    if isinstance(value, (Message, Mapping)):
        warnings.warn(
            f"{where} is a single message where a history is expected; Dialoop made one of it.",
            DialoopWarning,
            stacklevel=5,
        )
        value = (value,)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _wrong_type(value, where, "a list of messages")
    return messages_from_chats(value, where)


def _wrong_type(value: Any, where: str, expected: str) -> InvalidHistory:
    return InvalidHistory(
        f"{where}: expected {expected}, found {type(value).__name__} {value!r:.40}.",
        reason=Reason.WRONG_TYPE,
        remedy='Give [Message(role="user", content="...")], or dicts with role and content.',
    )


Messages = History | Sequence[Mapping[str, Any]] | str
"""What becomes a history where one is asked for: itself, chat dicts, or the text of one user."""


def as_history(messages: Messages) -> History:
    """Make a history of what a user has at hand: a history, chat dicts or one user text."""
    if isinstance(messages, History):
        return messages
    if isinstance(messages, str):
        return History((Message(role="user", content=messages),))
    return History.from_chats(messages)
