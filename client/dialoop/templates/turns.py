"""What a template writes of the assistant's messages, and what it adds of its own.

    history = History([*history, Message(role="assistant", content="7")])
    text = template.render(history)
    *_, turn = assistant_turns(template, tokenizer, history, text)
    text[turn.start : turn.end]      # thought, content, calls and their marks: "7"
    text[turn.end : turn.closed]     # the token that ends the turn

A turn begins where the opening ends with which the policy is asked, and behind a thought without
text that the template adds. It ends before the token that ends turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dialoop.errors import Unsupported
from dialoop.reasons import Reason
from dialoop.templates.probe import common_start, turn_ends
from dialoop.templates.slots import Place, Skeleton, Slot, fit, skeleton_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dialoop.messages import Message
    from dialoop.templates.chat_template import ChatTemplate
    from dialoop.templates.probe import TurnEnds
    from dialoop.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """What the assistant wrote of a message, as half-open ranges of characters.

    closed: where the token after it ends, if that is one that ends turns; else `end`. fields: of
    the message, that are shown. places: of all texts of the conversation.
    """

    index: int
    start: int
    end: int
    closed: int
    fields: frozenset[str]
    places: tuple[Place, ...]


def assistant_turns(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    history: Sequence[Message],
    text: str,
    *,
    only: int | None = None,
    **options: Any,
) -> tuple[AssistantTurn, ...]:
    """Return the assistant's turns in `text`, which is `history` rendered with `options`.

    only: the index of the one message that is asked for.
    Raise Unsupported (MASK_UNAVAILABLE) where the template does not show where they lie.
    """
    template = template.for_tools(options.get("tools"))
    skeleton = skeleton_of(template, history, **options)
    places = None if skeleton is None else fit(skeleton, text)
    if skeleton is None or places is None:
        raise no_mask()
    reader = _TurnReader(template, history, skeleton, places, options)
    reader.ends = turn_ends(template.profile, tokenizer)
    indices = range(len(history)) if only is None else (only,)
    turns = (reader.turn(index) for index in indices if history[index].role == "assistant")
    return tuple(turn for turn in turns if turn is not None)


def plain_turn(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    history: Sequence[Message],
    text: str,
    options: Mapping[str, Any],
) -> AssistantTurn | None:
    """Return the last message's turn where it is opening, content, end: as most are, and quicker.

    None where the text is anything else, so that the marks have to tell.
    """
    message = history[-1]
    if message.tool_calls or message.reasoning or not message.is_complete:
        return None
    opened = template.render(history[:-1], **options)
    content = message.text
    if not content.strip() or not text.startswith(opened + content):
        return None
    start, end = len(opened), len(opened) + len(content)
    rest = text[end:]
    closing = next(
        (t for t in turn_ends(template.profile, tokenizer).texts if rest.startswith(t)), ""
    )
    if not closing or rest[len(closing) :].strip():
        return None
    slot = Slot(index=len(history) - 1, field="content", text=content)
    return AssistantTurn(
        index=slot.index,
        start=start,
        end=end,
        closed=end + len(closing),
        fields=frozenset({"content"}),
        places=(Place(slot=slot, start=start, end=end, is_first=True),),
    )


class _TurnReader:
    """Finds the turns in one rendered conversation."""

    ends: TurnEnds

    def __init__(
        self,
        template: ChatTemplate,
        history: Sequence[Message],
        skeleton: Skeleton,
        places: tuple[Place, ...],
        options: dict[str, Any],
    ) -> None:
        self._template = template
        self._history = history
        self._skeleton = skeleton
        self._places = places
        self._options = {k: v for k, v in options.items() if k not in _OPENING}
        self._openings: dict[tuple[str, bool], str] = {}
        self._own: dict[int, list[int]] = {}
        for number, place in enumerate(places):
            if place.is_first:
                self._own.setdefault(place.slot.index, []).append(number)

    def turn(self, index: int) -> AssistantTurn | None:
        """Return the turn of a message; None where nothing of it is shown."""
        own = self._own.get(index, [])
        if not own:
            return None
        first, last = self._places[own[0]], self._places[own[-1]]
        hidden = {slot.field for slot in self._skeleton.hidden if slot.index == index}
        fields = frozenset(self._places[n].slot.field for n in own) - hidden
        start = self._start(index, own[0], has_thought="reasoning" in fields)
        end, closed = self._end(index, own[-1], last.end)
        if not self._history[index].is_complete:
            closed = end
        return AssistantTurn(
            index=index,
            start=min(start, first.start),
            end=end,
            closed=closed,
            fields=fields,
            places=self._places,
        )

    def _start(self, index: int, number: int, *, has_thought: bool) -> int:
        glue, place = self._skeleton.glues[number], self._places[number]
        glue_start = place.start - len(glue)
        opening = self._opening(index, glue)
        if not glue.startswith(opening):
            # It may begin a thought that the message lacks, or write an empty one where it has one.
            opening = self._template.profile.opened_thought.sub("", opening)
        start = len(common_start(glue, opening))
        added = self._template.profile.empty_thought.match(glue, start)
        if added is not None and not has_thought:
            return glue_start + added.end()
        if opening[start:].strip():
            raise no_mask()
        return glue_start + start

    def _opening(self, index: int, glue: str) -> str:
        """Return what follows the last text before message `index`, where the policy is asked."""
        before = self._history[index - 1] if index else None
        key = (before.role if before else "", bool(before and before.tool_calls))
        known = self._openings.get(key)
        bare = None if known is None else self._template.profile.opened_thought.sub("", known)
        if known is not None and bare is not None and glue.startswith(bare):
            return known
        asked = skeleton_of(
            self._template, self._history[:index], add_generation_prompt=True, **self._options
        )
        if asked is None:  # a template may refuse what does not begin with the user
            opening = self._template.profile.opening
            at = glue.rfind(opening) if opening else -1
            if at < 0:
                raise no_mask()
            return glue[: at + len(opening)]
        self._openings[key] = asked.glues[-1]
        return asked.glues[-1]

    def _end(self, index: int, number: int, position: int) -> tuple[int, int]:
        """Return where the turn ends, and where the token that ends it does."""
        glue = self._skeleton.glues[number + 1]
        for texts in (self.ends.texts, self.ends.past):
            found = [(at, -len(text)) for text in texts if (at := glue.find(text)) >= 0]
            if found:
                at, length = min(found)
                end = position + at
                return end, end - length * (texts is self.ends.texts)
        # No token ends it: what the template writes where nothing follows belongs to it.
        alone = skeleton_of(
            self._template,
            self._history[: index + 1],
            add_generation_prompt=False,
            **self._options,
        )
        closing = "" if alone is None else common_start(glue, alone.glues[-1]).rstrip()
        return position + len(closing), position + len(closing)


def hidden_fields(message: Message, shown: frozenset[str]) -> list[str]:
    """Return what a message of the assistant has that is not among the shown fields."""
    has = {
        "the content": bool(message.text.strip()) and "content" not in shown,
        "the reasoning": bool(message.reasoning.strip()) and "reasoning" not in shown,
        "the calls": bool(message.tool_calls) and "call.name" not in shown,
    }
    return [name for name, is_hidden in has.items() if is_hidden]


_OPENING = ("add_generation_prompt", "continue_final_message")


def no_mask() -> Unsupported:
    """Return the error of a template that does not show where the assistant's text stands."""
    return Unsupported(
        "The chat template does not show where the assistant's text stands.",
        reason=Reason.MASK_UNAVAILABLE,
        remedy="Give the template generation blocks, or train on sampled tokens.",
    )
