r"""What a chat template does: asked, not assumed.

    profile = template.profile
    profile.form                          # how it wants to be given calls and thoughts
    profile["reasoning"].verdict          # kept, dropped or refused
    turn_ends(profile, tokenizer).texts   # the end of turn

The template renders short conversations whose texts are words of their own, and what comes back is
read. Of several forms of a message the one that keeps most is taken.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final, Protocol

from dialoop.errors import DialoopError, InvalidInput
from dialoop.messages import CALL_IDS, DEFAULT_FORM, Message, MessageForm, with_call_ids
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dialoop.tokens.tokenizer import Tokenizer

    Chat = dict[str, Any]

MAX_PROBE_S = 10.0
KEPT, DROPPED, REFUSED = "kept", "dropped", "refused"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_ARGUMENTS: Final = {"place": "qplace7", "count": 3}
_THINK = ("<think>", "</think>")
_TAG = re.compile(r"<[^<>]+>")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldVerdict:
    """What the template does with a field: `kept`, `dropped` or `refused`, and a note."""

    field: str
    verdict: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closings:
    """What the template writes after the last text of an answer, and of a call.

    `_last` where nothing follows; `_followed` up to the next message's text, or None.
    """

    answer_last: str = ""
    answer_followed: str | None = None
    call_last: str | None = None
    call_followed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateProfile:
    """What a template does.

    reasoning: the texts around a thought. opening: what it writes after a user's message where the
    policy is asked. written_call: what it writes of a call, of which `dialoop.answers.grammar_of`
    tells the grammar. takes_written_calls: whether tools' answers may follow a call that stands in
    the content, as the policy wrote it.
    """

    form: MessageForm = DEFAULT_FORM
    reasoning: tuple[str, str] | None = None
    written_call: str = ""
    opening: str = ""
    closings: Closings = Closings()
    takes_written_calls: bool = True
    verdicts: tuple[FieldVerdict, ...] = ()

    def __getitem__(self, field: str) -> FieldVerdict:
        return next(verdict for verdict in self.verdicts if verdict.field == field)

    @property
    def empty_thought(self) -> re.Pattern[str]:
        """Return what matches a thought without text, which the template writes by itself."""
        return self._thought(r"\s*{start}\s*{end}\s*")

    @property
    def opened_thought(self) -> re.Pattern[str]:
        """Return what matches a thought at a text's end that is only begun, or is empty."""
        return self._thought(r"{start}\s*({end}\s*)?$|{end}\s*$")

    def _thought(self, pattern: str) -> re.Pattern[str]:
        start, end = map(re.escape, self.reasoning or self.form.thought)
        return re.compile(pattern.format(start=start, end=end) if start and end else "(?!)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnds:
    """The tokens that end the assistant's turn: ids to sample, and their texts.

    answer, call: what ends an answer and a call. past: texts that stand in their place in the
    conversation's past.
    """

    answer: int | None
    call: int | None
    ids: tuple[int, ...]
    texts: tuple[str, ...]
    past: tuple[str, ...]

    def of(self, message: Message) -> int | None:
        """Return the token that ends this message's turn."""
        return self.call if message.tool_calls else self.answer


class Template(Protocol):
    """What is asked: a source, and how it renders dicts as they are."""

    @property
    def source(self) -> str:
        """Return the template's text."""
        ...

    def render_chats(
        self,
        chats: Sequence[Mapping[str, Any]],
        *,
        opens: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text; raise DialoopError where the template refuses."""
        ...


def probe(template: Template) -> TemplateProfile:
    """Ask a template; it renders some sixty short conversations.

    Raise InvalidInput (TEMPLATE_LIMIT) where that takes too long.
    """
    return _Probe(template).profile()


class _Probe:
    """Asks one template."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._form = DEFAULT_FORM
        self._verdicts: list[FieldVerdict] = []
        self._deadline = time.monotonic() + MAX_PROBE_S

    def profile(self) -> TemplateProfile:
        """Return what the template does."""
        self._form = self._call_form()
        key, thought = self._reasoning_key()
        self._form = replace(self._form, reasoning_key=key, thought=thought)
        self._note_fields()
        return TemplateProfile(
            form=self._form,
            reasoning=self._reasoning_marks(),
            written_call=self._written_call(),
            opening=self._opening(),
            closings=self._closings(),
            takes_written_calls=self._takes_written_calls(),
            verdicts=tuple(self._verdicts),
        )

    def _text(
        self, *chats: Chat, opens: bool = False, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str | None:
        """Return the rendered text; None where the template refuses it. Raise TEMPLATE_LIMIT."""
        if time.monotonic() > self._deadline:
            raise InvalidInput(
                f"The chat template renders some sixty short conversations in more than "
                f"{MAX_PROBE_S:.0f} s.",
                reason=Reason.TEMPLATE_LIMIT,
                remedy="Use a template that does less.",
            )
        changed = with_call_ids(list(chats), self._form.call_ids)
        try:
            return self._template.render_chats(changed, opens=opens, tools=tools)
        except DialoopError as error:
            if error.reason == Reason.TEMPLATE_LIMIT:
                raise  # it would take too long each time
            return None

    def _call_form(self) -> MessageForm:
        """Return the form in which calls lose least."""
        best, most = DEFAULT_FORM, 0
        for ids, no_content, as_text in product(CALL_IDS, ("", None), (False, True)):
            form = MessageForm(arguments_as_text=as_text, no_content=no_content, call_ids=ids)
            score = self._score_of_calls(form)
            if score > most:
                best, most = form, score
        return best

    def _score_of_calls(self, form: MessageForm) -> int:
        last = self._called(form)
        followed = self._called(form, _tool())
        score = 0
        for text in (last, followed):
            if text is None or "qname7" not in text or "qplace7" not in text:
                continue
            # An object shown as Python shows it, or a text put into JSON as a text.
            is_foreign = "'place'" in text or '\\"place\\"' in text
            score += 1 if is_foreign else 2
        return score

    def _called(self, form: MessageForm, *later: Chat, name: str = "qname7") -> str | None:
        call = _call(form, name)
        call["id"] = "call_qcall7_0123456789"
        chats = [_user(), _assistant(form.no_content, calls=[call]), *later]
        return self._text(*with_call_ids(chats, form.call_ids))

    def _reasoning_key(self) -> tuple[str, tuple[str, str]]:
        """Return the key under which most thoughts are kept, and marks of thoughts in contents."""
        scores = {key: self._score_of_reasoning(key) for key in _REASONING_KEYS}
        key = max(scores, key=lambda key: scores[key])
        has_marks = all(mark in self._template.source for mark in _THINK)
        if scores[key] or not has_marks:
            return key, _THINK if has_marks else ("", "")
        return "", _THINK

    def _score_of_reasoning(self, key: str) -> int:
        form = self._form
        final = self._text(_user(), {**_assistant("qcontent7"), key: "qthought7"})
        call = {**_assistant(form.no_content, calls=[_call(form)]), key: "qthought7"}
        called = self._text(_user(), call, _tool())
        return sum(text is not None and "qthought7" in text for text in (final, called))

    def _answer(self, content: str | None = "qcontent7", *, calls: bool = False) -> Chat:
        """Return an assistant's message with a thought, in the form that was found."""
        form, called = self._form, [_call(self._form)] if calls else None
        if form.reasoning_key:
            return {**_assistant(content, calls=called), form.reasoning_key: "qthought7"}
        start, end = form.thought
        return _assistant(f"{start}\nqthought7\n{end}\n\n{content or ''}", calls=called)

    def _reasoning_marks(self) -> tuple[str, str] | None:
        text = self._text(_user(), self._answer())
        if text is None or not 0 <= text.find("qthought7") < text.find("qcontent7"):
            return None
        before, _, rest = text.partition("qthought7")
        after = rest.partition("qcontent7")[0].strip()
        opening = self._text(_user(), opens=True) or ""
        start = before.removeprefix(common_start(before, opening)).strip()
        if not start:  # the opening begins the thought
            start = (_TAG.findall(before.rstrip()) or [""])[-1]
        end = _TAG.match(after)
        return (start, end.group() if end else after) if start and after else None

    def _written_call(self) -> str:
        form = self._form
        text = self._text(_user(), _assistant(form.no_content, calls=[_call(form)]))
        if text is None or "qname7" not in text:
            return ""
        opening = self._text(_user(), opens=True) or ""
        return text.removeprefix(common_start(text, opening))

    def _takes_written_calls(self) -> bool:
        said = (_assistant("qcontent7"), _tool())
        text = self._text(_user(), *said, *said)
        return text is not None and text.count("qresult7") == len(said)

    def _opening(self) -> str:
        asked = _after(self._text(_user(), opens=True), "quser7") or ""
        return asked.removeprefix(_after(self._text(_user()), "quser7") or "")

    def _closings(self) -> Closings:
        form = self._form
        call = _assistant(form.no_content, calls=[_call(form)])
        last = self._text(_user(), _assistant("qcontent7"))
        followed = self._text(_user(), _assistant("qcontent7"), _user("qnext7"))
        return Closings(
            answer_last=_after(last, "qcontent7") or "",
            answer_followed=_between(followed, "qcontent7", "qnext7"),
            call_last=_after(self._text(_user(), call), "qplace7"),
            call_followed=_between(self._text(_user(), call, _tool()), "qplace7", "qresult7"),
        )

    def _note_fields(self) -> None:
        """Note what the template does with each field."""
        form = self._form
        call = _assistant(form.no_content, calls=[_call(form)])
        two = _assistant(form.no_content, calls=[_call(form), _call(form, "qsecond7")])
        spoken = _assistant("qcontent7", calls=[_call(form)])
        key = form.reasoning_key or "in the content"
        called = self._answer(form.no_content, calls=True)
        again = (_user("qnext7"), _assistant("qlast7"))
        self._note("system", "qsystem7", _message("system", "qsystem7"), _user())
        self._note("developer", "qdev7", _message("developer", "qdev7"), _user())
        self._note("user", "quser7", _user())
        self._note("content", "qcontent7", _user(), _assistant("qcontent7"))
        self._note("content, later", "qcontent7", _user(), _assistant("qcontent7"), *again)
        self._note("reasoning", "qthought7", _user(), self._answer(), note=key)
        self._note("reasoning of a call", "qthought7", _user(), called, _tool(), note=key)
        self._note("reasoning, later", "qthought7", _user(), self._answer(), *again)
        shape = "text" if form.arguments_as_text else "object"
        nothing = "none" if form.no_content is None else "empty"
        shape = f"arguments as {shape}, content {nothing}"
        self._note("call.name", "qname7", _user(), call, note=shape)
        self._note("call.arguments", "qplace7", _user(), call, note=shape)
        self._note("call.id", "qcall7", _user(), call)
        self._note("several calls", "qsecond7", _user(), two)
        self._note("content of a call", "qcontent7", _user(), spoken)
        self._note_mark_of_later_call()
        self._note("tool answer", "qresult7", _user(), call, _tool())
        self._note("tool answer, id", "qcall7", _user(), call, _tool())
        self._note("tool answer, name", "qname7", _user(), _tool())
        for part in ("qname7", "qabout7", "qparameter7"):
            self._note(f"tools, {_TOOL_PARTS[part]}", part, _user(), tools=[_PROBE_TOOL])

    def _note_mark_of_later_call(self) -> None:
        """Note whether the mark with which the policy is asked stands before a later call too."""
        mark = _TAG.search(self._opening())
        first = _assistant(self._form.no_content, calls=[_call(self._form)])
        later = _assistant(self._form.no_content, calls=[_call(self._form, "qsecond7")])
        asked = (_user(), first, _tool(), _assistant("qlast7"), _user("qnext7"))
        text = self._text(*asked, later)
        before = _between(text, "qnext7", "qsecond7") or ""
        is_there = mark is None or mark.group() in before
        verdict = REFUSED if text is None else KEPT if is_there else DROPPED
        self._verdicts.append(FieldVerdict(field="mark of a later call", verdict=verdict))

    def _note(
        self,
        field: str,
        word: str,
        *chats: Chat,
        note: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        text = self._text(*chats, tools=tools)
        verdict = REFUSED if text is None else KEPT if word in text else DROPPED
        self._verdicts.append(FieldVerdict(field=field, verdict=verdict, note=note))


_TOOL_PARTS = {"qname7": "name", "qabout7": "description", "qparameter7": "parameters"}
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "qname7",
        "description": "qabout7",
        "parameters": {
            "type": "object",
            "properties": {"qparameter7": {"type": "string", "description": "text"}},
            "required": ["qparameter7"],
        },
    },
}


def turn_ends(profile: TemplateProfile, tokenizer: Tokenizer) -> TurnEnds:
    """Return what ends the assistant's turn: as the template writes it, then as the model's files.

    A template that writes no token there leaves it to the files.
    """
    closings, declared = profile.closings, tokenizer.end_of_turn_ids
    named = tuple(tokenizer.decode([token]) for token in declared)
    last = tokenizer.added_texts(closings.answer_last)
    followed = tokenizer.added_texts(closings.answer_followed or "")
    answer = _end_of_answer(last, followed)
    call = _end_of_call(closings, answer, named, tokenizer)
    texts = tuple(dict.fromkeys(text for text in (answer, call) if text))
    ids = [tokenizer.single_token(text) for text in texts]
    return TurnEnds(
        answer=tokenizer.single_token(answer) if answer else next(iter(declared), None),
        call=tokenizer.single_token(call or answer) if call or answer else None,
        ids=tuple(dict.fromkeys((*(i for i in ids if i is not None), *declared))),
        texts=tuple(dict.fromkeys((*texts, *named))),
        past=followed[:1],
    )


def _end_of_answer(last: tuple[str, ...], followed: tuple[str, ...]) -> str:
    """Return the end of an answer from the added tokens after it: alone, and with a turn after."""
    if followed and followed[0] in last:
        return followed[0]
    return (last or followed or ("",))[-1 if last else 0]


def _end_of_call(
    closings: Closings, answer: str, named: tuple[str, ...], tokenizer: Tokenizer
) -> str:
    if closings.call_last is None:
        return ""
    last = tokenizer.added_texts(closings.call_last)
    if answer in last:
        return answer
    if last and last[-1] in named:
        return last[-1]
    follows = (closings.call_followed or "").removeprefix(closings.call_last)
    next_ones = tokenizer.added_texts(follows) if follows != closings.call_followed else ()
    # The next role's mark ends calls where it ends answers, or where the model's files say so.
    by_role = not closings.answer_last.strip()
    return next((text for text in next_ones[:1] if by_role or text in named), answer)


def _message(role: str, content: str | None) -> Chat:
    return {"role": role, "content": content}


def _user(content: str = "quser7") -> Chat:
    return _message("user", content)


def _assistant(content: str | None, calls: list[Chat] | None = None) -> Chat:
    chat = _message("assistant", content)
    return chat if calls is None else {**chat, "tool_calls": calls}


def _tool() -> Chat:
    return {**_message("tool", "qresult7"), "tool_call_id": "qcall7abc", "name": "qname7"}


def _call(form: MessageForm, name: str = "qname7") -> Chat:
    arguments = json.dumps(_ARGUMENTS) if form.arguments_as_text else _ARGUMENTS
    function = {"name": name, "arguments": arguments}
    return {"id": "qcall7abc", "type": "function", "function": function}


def common_start(first: str, second: str) -> str:
    """Return what both texts begin with, up to where a mark begins in which they part."""
    pairs = enumerate(zip(first, second, strict=False))
    length = next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))
    mark = first.rfind("<", 0, length)
    parts = length < min(len(first), len(second))
    return first[:mark] if parts and mark > first.rfind(">", 0, length) else first[:length]


def _after(text: str | None, word: str) -> str | None:
    return None if text is None or word not in text else text.rpartition(word)[2]


def _between(text: str | None, first: str, second: str) -> str | None:
    after = _after(text, first)
    return None if after is None or second not in after else after.partition(second)[0]
