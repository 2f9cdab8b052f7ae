r"""Rendered conversations back to messages: the inverse of a chat template.

    CHATML.parse("<|im_start|>user\nhi<|im_end|>\n", {})      # one complete user message

A turn is opened only where the one before has ended, so an opening inside a turn is content. From
token ids (`parse_tokens`) only ids of special tokens open and close turns: text that merely spells
one is content, whatever it says. From text the two cannot be told apart.

What a format does not write (ids of tool calls, names) comes back empty.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dialoop.answers.values import read_members
from dialoop.errors import DialoopError, InvalidInput
from dialoop.messages import Message, ToolCall
from dialoop.reasons import Reason
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.user_functions import call_now

SpecialTokens = Mapping[str, str]
"""bos_token, eos_token and so on, as the tokenizer spells them."""

_NONCHARACTERS = tuple(map(chr, range(0xFDD4, 0xFDF0)))
THINK = ("<think>\n", "\n</think>\n\n")
TOOL_CALL = ("\n<tool_call>\n", "\n</tool_call>")
TOOL_RESPONSE = ("\n<tool_response>\n", "\n</tool_response>")


class Parser(Protocol):
    """Reads a rendered conversation back."""

    def parse(self, text: str, special_tokens: SpecialTokens) -> tuple[Message, ...]:
        """Return the messages; raise InvalidInput (NOT_PARSEABLE) where there are none."""


ParserFunction = Callable[[str], Iterable[Message] | Awaitable[Iterable[Message]]]
"""A function, sync or async, that reads a rendered conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionParser:
    """A parser of the user's own, in this process only."""

    function: ParserFunction

    def parse(self, text: str, special_tokens: SpecialTokens) -> tuple[Message, ...]:
        """Return what the function finds."""
        return tuple(call_now(self.function, text))


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnParser:
    """Formats whose turns are `start role after_role content end glue`, as ChatML's.

    default_system: what the template writes when there is no system message; dropped again.
    tools_start, tools_end: around the tools in the system message; dropped again.
    """

    start: str
    after_role: str
    ends: tuple[str, ...]
    glue: str = ""
    reasoning: tuple[str, str] | None = None
    tool_call: tuple[str, str] | None = None
    tool_response: tuple[str, str] | None = None
    default_system: str | None = None
    tools_start: str = ""
    tools_end: str = ""

    def parse(self, text: str, special_tokens: SpecialTokens) -> tuple[Message, ...]:
        """Return the turns, the last one incomplete where nothing ends it."""
        position = len(_bos(text, special_tokens))
        messages: list[Message] = []
        while position < len(text):
            if not text.startswith(self.start, position):
                raise not_parseable(f"At character {position} no turn begins.")
            role, body, position, is_complete = self._turn(text, position + len(self.start))
            messages += self._messages(role, body, is_complete)
        if not messages:
            raise not_parseable("There is no turn in it.")
        return tuple(self._without_additions(messages))

    def _turn(self, text: str, position: int) -> tuple[str, str, int, bool]:
        """Return role, body, where the next turn begins, and whether this one has ended."""
        role_end = text.find(self.after_role, position)
        if role_end < 0:
            return text[position:], "", len(text), False
        begin = role_end + len(self.after_role)
        search = begin
        while (span := _first(text, self.ends, search)) is not None:
            end, search = span
            for glue in dict.fromkeys((self.glue, "")):
                after = search + len(glue)
                if text.startswith(glue, search) and (
                    after == len(text) or text.startswith(self.start, after)
                ):
                    return text[position:role_end], text[begin:end], after, True
        return text[position:role_end], text[begin:], len(text), False

    def _messages(self, role: str, body: str, is_complete: bool) -> list[Message]:
        if not role:
            raise not_parseable("A turn has no role.")
        if role == "tool" and self.tool_response is not None:
            contents = split_responses(f"\n{body}", *self.tool_response)
            if contents is not None:
                messages = [Message(role=role, content=content) for content in contents]
                return [*messages[:-1], replace(messages[-1], is_complete=is_complete)]
        message = Message(role=role, content=body, is_complete=is_complete)
        if role == "assistant" and self.tool_call is not None:
            rest, calls = split_calls(f"\n{body}", *self.tool_call)
            message = replace(message, content=rest[1:], tool_calls=calls)
        if role == "assistant" and self.reasoning is not None:
            reasoning, content = split_reasoning(message.text, *self.reasoning)
            message = replace(message, content=content, reasoning=reasoning)
        return [message]

    def _without_additions(self, messages: list[Message]) -> list[Message]:
        """Drop the tools and the system message that the template itself adds."""
        first = messages[0]
        if first.role != "system":
            return messages
        if self.tools_start and first.text.endswith(self.tools_end):
            content, marker, _ = first.text.rpartition(self.tools_start)
            first = replace(first, content=content) if marker else first
        if first.text == self.default_system and first.is_complete:
            return messages[1:]
        return [first, *messages[1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixParser:
    """Formats that write `User: ...` and `Assistant: ...` in plain text, as Falcon's.

    A paragraph that begins with one of the prefixes ends the turn before it, whoever wrote it:
    the format has nothing to tell them apart. A system message comes first or not at all.
    assistant_end: what ends the assistant's turn; None means the tokenizer's eos_token.
    """

    user: str = "User: "
    assistant: str = "Assistant:"
    user_end: str = "\n\n"
    assistant_end: str | None = None

    def parse(self, text: str, special_tokens: SpecialTokens) -> tuple[Message, ...]:
        """Return the turns, the last one incomplete where nothing ends it."""
        eos = special_tokens.get("eos_token", "")
        own_end = eos if self.assistant_end is None else self.assistant_end
        position = len(_bos(text, special_tokens))
        messages: list[Message] = []
        while position < len(text):
            role, begin = self._find_start(text, position, is_first=not messages)
            ends = (own_end, eos) if role == "assistant" else (self.user_end,)
            end, position = self._find_end(text, begin, tuple(dict.fromkeys(filter(None, ends))))
            content = text[begin:end]
            if role == "assistant":
                content = content.removeprefix(" ")
            messages.append(Message(role=role, content=content, is_complete=position > end))
        if not messages:
            raise not_parseable("There is no turn in it.")
        return tuple(messages)

    def _find_start(self, text: str, position: int, *, is_first: bool) -> tuple[str, int]:
        for role, prefix in (("user", self.user), ("assistant", self.assistant)):
            if text.startswith(prefix, position):
                return role, position + len(prefix)
        if not is_first:
            raise not_parseable(f"At character {position} no turn begins.")
        return "system", position

    def _find_end(self, text: str, begin: int, ends: tuple[str, ...]) -> tuple[int, int]:
        """Return where the content ends and the next turn begins; equal when nothing ends it."""
        search = begin
        while (span := _first(text, ends, search)) is not None:
            end, after = span
            if after == len(text) or text.startswith((self.user, self.assistant), after):
                return end, after
            search = end + 1
        return len(text), len(text)


CHATML = TurnParser(
    start="<|im_start|>",
    after_role="\n",
    ends=("<|im_end|>", "<|endoftext|>"),
    glue="\n",
    reasoning=THINK,
)
QWEN = replace(
    CHATML,
    tool_call=TOOL_CALL,
    tool_response=TOOL_RESPONSE,
    default_system="You are a helpful assistant.",
    tools_start="\n\n# Tools\n\nYou may call one or more functions",
    tools_end='{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
)
LLAMA = TurnParser(start="<|header_start|>", after_role="<|header_end|>\n\n", ends=("<|eot|>",))
LLAMA3 = replace(
    LLAMA,
    start="<|start_header_id|>",
    after_role="<|end_header_id|>\n\n",
    ends=("<|eot_id|>",),
)
FALCON = PrefixParser(assistant_end="\n")
DEEPSEEK = PrefixParser()


def parse_tokens(
    parser: Parser,
    token_ids: Sequence[int],
    tokenizer: Tokenizer,
    special_tokens: SpecialTokens,
) -> tuple[Message, ...]:
    """Read token ids as messages; special tokens that are merely spelled are content."""
    parts = _special_and_other_texts(token_ids, tokenizer)
    whole = "".join(text for text, _ in parts)
    guard = absent_character(whole)
    text = "".join(
        part if is_special else guard_special_tokens(part, guard, tokenizer)
        for part, is_special in parts
    )
    messages = parser.parse(text, special_tokens)
    return tuple(with_texts(message, lambda text: text.replace(guard, "")) for message in messages)


def absent_character(text: str) -> str:
    """Return a noncharacter that the text does not hold."""
    for char in _NONCHARACTERS:
        if char not in text:
            return char
    raise InvalidInput("The text holds every noncharacter.", remedy="Leave one of them out.")


def parser_for(
    render: Callable[[Sequence[Message]], str], special_tokens: SpecialTokens
) -> Parser | None:
    """Return a built-in parser that reads back what `render` writes, tried on small examples.

    render: writes a whole conversation, without the opening of another turn.
    """
    for form in (QWEN, CHATML, LLAMA, LLAMA3):
        try:
            parser = _with_default_system(form, render, special_tokens)
            if all(parser.parse(render(probe), special_tokens) == probe for probe in _PROBES):
                return parser
        except DialoopError:
            continue
    return None


def _with_default_system(
    parser: TurnParser, render: Callable[[Sequence[Message]], str], special_tokens: SpecialTokens
) -> TurnParser:
    """Return the parser with the system message that `render` writes where there is none.

    It differs from one Qwen to the next.
    """
    written = replace(parser, default_system=None).parse(render(_PROBES[0]), special_tokens)
    has_more = len(written) > len(_PROBES[0]) and written[0].role == "system"
    return replace(parser, default_system=written[0].text if has_more else None)


def not_parseable(message: str) -> InvalidInput:
    """Return the error for a text that is not what the template renders."""
    return InvalidInput(
        f"The text is not a conversation that this template rendered: {message}",
        reason=Reason.NOT_PARSEABLE,
        remedy="Give what was rendered with the same template, special tokens included.",
    )


def _probe(*texts: str) -> tuple[Message, ...]:
    roles = ("user", "assistant") * len(texts)
    return tuple(Message(role=r, content=t) for r, t in zip(roles, texts, strict=False))


_PROBES = (
    _probe("one", "two"),
    _probe("one", "two", "three\n\nfour", "five"),
    _probe(" one\n", " two "),
    (Message(role="system", content="zero"), *_probe("one", "two")),
)


def _bos(text: str, special_tokens: SpecialTokens) -> str:
    bos = special_tokens.get("bos_token", "")
    return bos if bos and text.startswith(bos) else ""


def _first(text: str, markers: tuple[str, ...], position: int) -> tuple[int, int] | None:
    """Start and end of the first of the markers from `position` on."""
    positions = ((text.find(marker, position), marker) for marker in markers)
    starts = [(start, start + len(marker)) for start, marker in positions if start >= 0]
    return min(starts, default=None)


def _special_and_other_texts(
    token_ids: Sequence[int], tokenizer: Tokenizer
) -> list[tuple[str, bool]]:
    """Return the text of each special token, and of each run of other tokens."""
    parts: list[tuple[str, bool]] = []
    run: list[int] = []
    for token in token_ids:
        if tokenizer.is_special(int(token)):
            if run:
                parts.append((tokenizer.decode(run), False))
                run = []
            parts.append((tokenizer.decode([int(token)]), True))
        else:
            run.append(int(token))
    if run:
        parts.append((tokenizer.decode(run), False))
    return parts


def guard_special_tokens(text: str, guard: str, tokenizer: Tokenizer) -> str:
    """Put a guard inside each special token that the text spells, until it spells none."""
    while spans := tokenizer.special_spans(text):
        parts, position = [], 0
        for start, _ in spans:
            parts.append(text[position : start + 1])
            position = start + 1
        text = guard.join([*parts, text[position:]])
    return text


def with_texts(message: Message, change: Callable[[str], str]) -> Message:
    """Return the message with each of its texts changed."""
    return replace(
        message,
        role=change(message.role),
        content=change(message.text),
        reasoning=change(message.reasoning),
        name=change(message.name),
        tool_call_id=change(message.tool_call_id),
        tool_responses=tuple(map(change, message.tool_responses)),
        tool_calls=tuple(
            replace(
                call,
                name=change(call.name),
                id=change(call.id),
                arguments_json=change(call.arguments_json),
            )
            for call in message.tool_calls
        ),
    )


def split_reasoning(content: str, start: str, end: str) -> tuple[str, str]:
    """Return the reasoning, and the content after it; no reasoning without the two marks."""
    if not content.startswith(start):
        return "", content
    reasoning, marker, rest = content[len(start) :].partition(end)
    return (reasoning, rest) if marker and reasoning else ("", content)


def split_calls(content: str, start: str, end: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the content, and the tool calls that end it; what is no tool call stays content."""
    calls: list[ToolCall] = []
    while content.endswith(end):
        begin = content.rfind(start)
        call = None if begin < 0 else _call(content[begin + len(start) : -len(end)])
        if call is None:
            break
        calls.insert(0, call)
        content = content[:begin]
    return content, tuple(calls)


def split_responses(content: str, start: str, end: str) -> tuple[str, ...] | None:
    """Return the answers of tools that the content consists of; None when it is something else."""
    if not content.startswith(start):
        return None
    return tuple(content[len(start) :].removesuffix(end).split(end + start))


def _call(text: str) -> ToolCall | None:
    """Return the call that a template wrote; arguments that it had as text stand in a string."""
    members = read_members(text)
    if members is None or members.keys() != {"name", "arguments"}:
        return None
    name, arguments = members["name"].value, members["arguments"]
    if not isinstance(name, str) or not name:
        return None
    is_text = isinstance(arguments.value, str)
    return ToolCall(name=name, arguments_json=arguments.value if is_text else arguments.text)
