"""No text of a message is lost in silence: it stands in the prompt, or an error names it."""

from __future__ import annotations

import contextlib
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from dialoop.chat import History, Message, ToolCall, ToolDefinition
from dialoop.errors import DialoopError
from dialoop.messages import ContentPart
from dialoop.reasons import Reason
from dialoop.templates import slots
from dialoop.templates.chat_template import ChatTemplate
from dialoop.tokens.builder import Prompt, TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer

from tests.support.families import FAMILIES, family

FEW, MANY = range(10), range(10, 310)
_TOOL = ToolDefinition(name="look_up", description="Looks it up.", parameters_json="{}")


class _Marked:
    """A conversation of a seed in which every text is a word of its own."""

    def __init__(self, seed: int) -> None:
        self._pick = random.Random(seed)
        self._numbers = itertools.count()
        self.fields: dict[str, tuple[int, str]] = {}
        self.messages: list[Message] = []
        self._question()
        for _ in range(self._pick.randint(0, 3)):
            self._answer()
        if self.messages[-1].role == "assistant":
            self._add(Message(role="user"), "content")

    def _question(self) -> None:
        for role in ("system", "developer"):
            if self._pick.random() < 0.3:
                self._add(Message(role=role), "content")
        self._add(Message(role="user"), "content", *self._maybe("name", 0.2))

    def _answer(self) -> None:
        num_calls = self._pick.choice((0, 0, 1, 1, 2))
        chance = 0.4 if num_calls else 0.95
        fields = (*self._maybe("content", chance), *self._maybe("reasoning", 0.4))
        index = len(self.messages)
        calls = tuple(
            ToolCall(
                name=self._mark(index, "tool_calls.name"),
                arguments_json=f'{{"word": "{self._mark(index, "tool_calls.arguments")}"}}',
                id=f"callid{index}{number}"[-9:].rjust(9, "c"),
            )
            for number in range(num_calls)
        )
        self._add(Message(role="assistant", tool_calls=calls), *fields)
        for call in calls:
            self._add(Message(role="tool", tool_call_id=call.id, name=call.name), "content")
        if not calls and self._pick.random() < 0.8:
            self._add(Message(role="user"), "content")

    def _maybe(self, field: str, chance: float) -> tuple[str, ...]:
        return (field,) if self._pick.random() < chance else ()

    def _add(self, message: Message, *fields: str) -> None:
        index = len(self.messages)
        marks = {field: self._mark(index, field) for field in fields}
        if "content" in marks and self._pick.random() < 0.2:
            parts = (marks["content"], self._mark(index, "content"))
            marks |= {"content": tuple(ContentPart(type="text", text=text) for text in parts)}
        self.messages.append(replace(message, **marks))

    def _mark(self, index: int, field: str) -> str:
        mark = f"zq{next(self._numbers)}word"
        self.fields[mark] = (index, field)
        return mark


@pytest.mark.parametrize("name", FAMILIES)
def test_every_text_of_a_few_conversations_is_shown_or_named(name):
    _compare(name, FEW)


@pytest.mark.heavy(reason="300 conversations for each family")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_text_of_many_conversations_is_shown_or_named(name):
    _compare(name, MANY)


def _compare(name: str, seeds: range) -> None:
    tokenizer = Tokenizer.from_directory(family(name).directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    num_shown = 0
    for seed in seeds:
        marked = _Marked(seed)
        options = {"tools": (_TOOL,)} if seed % 2 and family(name).reads.tools else {}
        last_user = max(i for i, m in enumerate(marked.messages) if m.role == "user")
        made = _made(builder, marked, options)
        if isinstance(made, DialoopError):
            named = {f"messages[{i}].{field}" for i, field in marked.fields.values()}
            is_told = any(field in made.message for field in named)
            assert is_told or made.reason != Reason.TEMPLATE_DROPS_FIELD, made.message
            continue
        num_shown += 1
        text = tokenizer.decode(made.sequence.token_ids)
        lost = {
            place
            for mark, place in marked.fields.items()
            if mark not in text and not _goes_by_design(name, marked.messages, last_user, *place)
        }
        assert not lost, (name, seed, lost)
    assert num_shown, "nothing was compared"


def _goes_by_design(
    name: str, messages: list[Message], last_user: int, index: int, field: str
) -> bool:
    """Whether it is a past thought, or what gpt-oss writes as one: a content beside a call."""
    beside_call = name == "gpt_oss" and field == "content" and bool(messages[index].tool_calls)
    return index < last_user and (field == "reasoning" or beside_call)


def _made(builder: TokenBuilder, marked: _Marked, options: dict[str, Any]) -> Prompt | DialoopError:
    try:
        return builder.prompt(History(marked.messages), options=options)
    except DialoopError as error:
        return error


def test_what_a_template_leaves_out_is_named():
    tokenizer = Tokenizer.from_directory(family("phi4").directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    history = History(
        (
            Message(role="user", content="one?"),
            Message(role="tool", content="seven", tool_call_id="call_1"),
        )
    )
    with pytest.raises(DialoopError, match=r"leaves out messages\[1\]\.content") as raised:
        builder.prompt(history)
    assert raised.value.reason == Reason.TEMPLATE_DROPS_FIELD


def _builder(name: str) -> TokenBuilder:
    tokenizer = Tokenizer.from_directory(family(name).directory)
    return TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))


def _call(arguments: str, name: str = "look_up") -> ToolCall:
    return ToolCall(id="callid123", name=name, arguments_json=arguments)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "glm4_5"])
def test_what_was_seen_of_a_shorter_conversation_says_nothing_of_a_longer_one(name):
    builder = _builder(name)
    for words in (("one",), ("one", "two"), ("one", "two", "three" * 40)):
        parts = tuple(ContentPart(type="text", text=word) for word in words)
        prompt = builder.prompt(History((Message(role="user", content=parts),)))
        assert words[-1] in builder.tokenizer.decode(prompt.sequence.token_ids)
    ask = Message(role="user", content="one?")
    for num in (1, 2, 3):
        calls = tuple(_call(f'{{"word": "seven{number}", "n": {number}}}') for number in range(num))
        told = Message(role="tool", content="7", tool_call_id="callid123")
        builder.prompt(History((ask, Message(role="assistant", tool_calls=calls), told)))


@pytest.mark.parametrize("depth", [300, 480, 600, 900, 1500])
def test_arguments_as_deep_as_anybody_likes_are_shown_or_refused(depth):
    ask = Message(role="user", content="one?")
    call = _call(f'{{"x": {"[" * depth}7{"]" * depth}}}')
    told = Message(role="tool", content="7", tool_call_id="callid123")
    history = History((ask, Message(role="assistant", tool_calls=(call,)), told))
    builder = _builder("qwen3")
    with contextlib.suppress(DialoopError):
        builder.prompt(history)
    schema: Any = {}
    for _ in range(depth):
        schema = {"properties": {"x": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with contextlib.suppress(DialoopError):
        builder.prompt(History((ask,)), options={"tools": (tool,)})


def test_what_a_template_shows_until_the_next_question_may_go_after_it():
    ask, told = Message(role="user", content="one?"), Message(role="tool", content="seven")
    called = Message(
        role="assistant", content="I look it up.", tool_calls=(_call('{"word": "x"}'),)
    )
    rounds = (ask, called, replace(told, tool_call_id="callid123"))
    later = (Message(role="assistant", content="It is 7."), Message(role="user", content="two?"))
    _builder("gpt_oss").prompt(History((*rounds, *later)))
    with pytest.raises(DialoopError, match=r"leaves out messages\[1\]\.content"):
        _builder("llama3_1").prompt(History((*rounds, *later)))


def test_other_threads_may_look_while_what_is_known_is_dropped(monkeypatch):
    monkeypatch.setattr(slots, "_MAX_HIDDEN", 2)
    template = _builder("qwen2_5").template

    def look(seed: int) -> None:
        for number in range(60):
            told = [Message(role="user", content="x")] * (1 + (seed + number) % 7)
            slots.require_shown(template, History(told))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(look, range(6)))
