"""Whether a conversation goes on from given tokens, and with which text.

The template's text of the whole conversation must begin with what the tokens spell: then the rest
is what follows. Nothing else is assumed of a template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from dialoop.chat import History, Message
from dialoop.errors import DialoopError
from dialoop.sequences import ForkCause
from dialoop.templates.turns import AssistantTurn, hidden_fields
from dialoop.tokens.text_spans import Render, closing

_MARK = "\ufdd4sampled {}\ufdd5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The messages that the context's tokens cover.

    text: what the tokens spell. It ends with the message `last` as it was sampled: its content and
    then its `ending`. known_sampled: the sampled contents of those messages that the caller knows
    to be the sampled ones, however they are spelled now.
    """

    history: History
    text: str
    last: int
    content: str
    ending: str
    known_sampled: Mapping[int, str]

    @property
    def sampled(self) -> str:
        """Return the last message as it was sampled."""
        return self.content + self.ending

    @property
    def before(self) -> str:
        """Return the text before the last message."""
        return self.text[: len(self.text) - len(self.sampled)]

    def with_contents(self, contents: Mapping[int, str]) -> History:
        """Return the messages; those in `contents` hold nothing but that text."""
        return History(
            tuple(
                Message(role=message.role, content=contents[index])
                if index in contents
                else message
                for index, message in enumerate(self.history)
            )
        )


def continuation(
    past: Past, whole: str, render: Render, *, normal: Callable[[str], str]
) -> str | ForkCause:
    """Return what follows the past in `whole`, the rendered conversation, or why nothing can.

    normal: returns a text as the tokenizer gives it back.
    """
    past, is_same_before = _as_rendered(past, whole, render, normal)
    is_same = is_same_before and _is_what_was_sampled(past, render)
    if is_same and whole.startswith(past.text):
        return whole[len(past.text) :]
    if past.known_sampled:
        follows = _continue_known_sampled(past, whole, render)
        if follows is not None:
            return follows
    return ForkCause.TEMPLATE_REWRITES_PAST if is_same else ForkCause.HISTORY_REWRITTEN


def continuation_of_turns(
    past: Past,
    whole: str,
    turns: Iterable[AssistantTurn],
    sampled: Mapping[int, tuple[str, str]],
) -> str | ForkCause:
    """Return what follows the past in `whole`, where answers stand in the place of their turns.

    turns: in `whole`. sampled: content and ending of each answer, by message. The template may
    write an answer otherwise, but has to show all of it, and an end where it was sampled with one.
    """
    text, position = "", 0
    for turn in turns:
        content, ending = sampled.get(turn.index, ("", ""))
        if turn.index not in sampled:
            continue
        is_open = bool(ending) and turn.closed == turn.end
        if is_open or hidden_fields(past.history[turn.index], turn.fields):
            return ForkCause.TEMPLATE_REWRITES_PAST
        text += whole[position : turn.start] + content + ending
        position = turn.closed
    text += whole[position:]
    if not text.startswith(past.text):
        return ForkCause.TEMPLATE_REWRITES_PAST
    return text[len(past.text) :]


def _as_rendered(
    past: Past, whole: str, render: Render, normal: Callable[[str], str]
) -> tuple[Past, bool]:
    """Return the past as the template spells it, and whether that is what the tokens spell.

    A tokenizer may change text (Unicode forms, spaces): then only what it makes of the rendered
    text can be compared.
    """
    if whole.startswith(past.text):
        return past, True
    try:
        before = render(past.history[: past.last])
    except DialoopError:
        return past, False
    past_text = past.before
    is_same = (
        past_text == before or past_text == normal(before) or normal(past_text) == normal(before)
    )
    return (replace(past, text=before + past.sampled) if is_same else past), is_same


def _is_what_was_sampled(past: Past, render: Render) -> bool:
    """Return whether the last message is what was sampled, as it stands or as it is rendered."""
    message = past.history[past.last]
    is_bare = not message.tool_calls and not message.reasoning
    if is_bare and message.text == past.content:
        return True
    closing_text = closing(past.history[: past.last], render)
    try:
        through = render(past.history[: past.last + 1], add_generation_prompt=False)
    except DialoopError:
        return False
    rest = through.removeprefix(past.text)
    if past.ending and through.startswith(past.text) and not rest.strip():
        return True  # another token may end calls than contents
    if past.ending and closing_text == "":
        return through + past.ending == past.text  # the next role's mark ends a turn
    if closing_text is None or not closing_text.startswith(past.ending):
        return False
    return through == past.text + closing_text[len(past.ending) :]


def _continue_known_sampled(past: Past, whole: str, render: Render) -> str | ForkCause | None:
    """Continue as if the messages that are known to be sampled held exactly the sampled text.

    The template may space that otherwise; if it leaves out some of it, as it does with thinking,
    then it rewrites the past.
    """
    marks = {index: _MARK.format(index) for index in past.known_sampled}
    try:
        expected = render(past.with_contents(marks))
        raw = render(past.with_contents(past.known_sampled))
    except DialoopError:
        return None
    for index, mark in marks.items():
        if expected.count(mark) != 1:
            return None
        expected = expected.replace(mark, past.known_sampled[index])
    if not expected.startswith(past.text):
        return None
    if "".join(raw.split()) != "".join(expected.split()):
        return ForkCause.TEMPLATE_REWRITES_PAST
    follows = expected[len(past.text) :]
    return follows if whole.endswith(follows) else None
