"""Whether a conversation goes on from given tokens, and with which text.

The template's text of the whole conversation must begin with what the tokens spell: then the rest
is what follows. Nothing else is assumed of a template.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dialoop.chat import History, Message
from dialoop.errors import DialoopError
from dialoop.sequences import ForkCause
from dialoop.tokens.text_spans import closing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dialoop.tokens.text_spans import Render

_MARK = "\ufdd4vouched {}\ufdd5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What is said to be covered by tokens already.

    spelled: what the tokens spell. It ends with the message `last` as it was sampled, which is its
    content and what it `ended` with. vouched: the contents as sampled of those messages that the
    caller knows to be the sampled ones, however they are spelled now.
    """

    history: History
    spelled: str
    last: int
    content: str
    ended: str
    vouched: Mapping[int, str]

    @property
    def sampled(self) -> str:
        """Return the last message as it was sampled."""
        return self.content + self.ended

    @property
    def before(self) -> str:
        """Return the text before the last message."""
        return self.spelled[: len(self.spelled) - len(self.sampled)]

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

    normal: a text as the tokenizer gives it back.
    """
    past, is_same_before = _as_rendered(past, whole, render, normal)
    is_same = is_same_before and _is_what_was_sampled(past, render)
    if is_same and whole.startswith(past.spelled):
        return whole[len(past.spelled) :]
    if past.vouched:
        follows = _vouched_continuation(past, whole, render)
        if follows is not None:
            return follows
    return ForkCause.TEMPLATE_REWRITES_PAST if is_same else ForkCause.HISTORY_REWRITTEN


def _as_rendered(
    past: Past, whole: str, render: Render, normal: Callable[[str], str]
) -> tuple[Past, bool]:
    """Return the past as the template spells it, and whether that is what the tokens spell.

    A tokenizer may change text (Unicode forms, spaces): then only what it makes of the rendered
    text can be compared.
    """
    if whole.startswith(past.spelled):
        return past, True
    try:
        before = render(past.history[: past.last])
    except DialoopError:
        return past, False
    told = past.before
    is_same = told == before or told == normal(before) or normal(told) == normal(before)
    return (replace(past, spelled=before + past.sampled) if is_same else past), is_same


def _is_what_was_sampled(past: Past, render: Render) -> bool:
    """Return whether the last message is what was sampled, as it stands or as it is rendered."""
    message = past.history[past.last]
    is_bare = not message.tool_calls and not message.reasoning
    if is_bare and message.text == past.content:
        return True
    ending = closing(past.history[: past.last], render)
    if ending is None or not ending.startswith(past.ended):
        return False
    try:
        through = render(past.history[: past.last + 1], add_generation_prompt=False)
    except DialoopError:
        return False
    return through == past.spelled + ending[len(past.ended) :]


def _vouched_continuation(past: Past, whole: str, render: Render) -> str | ForkCause | None:
    """Continue as if the messages that are known to be sampled held exactly the sampled text.

    The template may space that otherwise; if it leaves out some of it, as it does with thinking,
    then it rewrites the past.
    """
    marks = {index: _MARK.format(index) for index in past.vouched}
    try:
        expected = render(past.with_contents(marks))
        raw = render(past.with_contents(past.vouched))
    except DialoopError:
        return None
    for index, mark in marks.items():
        if expected.count(mark) != 1:
            return None
        expected = expected.replace(mark, past.vouched[index])
    if not expected.startswith(past.spelled):
        return None
    if "".join(raw.split()) != "".join(expected.split()):
        return ForkCause.TEMPLATE_REWRITES_PAST
    follows = expected[len(past.spelled) :]
    return follows if whole.endswith(follows) else None
