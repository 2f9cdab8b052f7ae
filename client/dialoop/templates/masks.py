"""A whole conversation as token ids and a mask of what the assistant wrote.

encoded = encode_conversation(template, tokenizer, history, add_generation_prompt=False)
    encoded.token_ids[encoded.assistant_mask]      # the assistant's tokens and no others

The mask comes from where the template writes the assistant's text: from its generation blocks, or,
when it has none, from marks that stand for the contents in a second rendering. A content is never
searched for in the text. Special tokens that a message merely spells get no special ids.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dialoop.errors import DialoopError, Unsupported
from dialoop.messages import Message
from dialoop.reasons import Reason
from dialoop.templates.parsing import absent_character, guard_special_tokens, with_texts
from dialoop.tokens.tokenizer import Encoded, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from dialoop.templates.chat_template import ChatTemplate, Span

_MARK = ("\ufdd0", "\ufdd1")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedConversation:
    """A conversation: text, int32 ids [L] and whether the assistant wrote each token, bool [L].

    assistant_mask is None when it was not asked for. offsets: the half-open range of characters of
    each token, int64 [L, 2]; only where it was asked for.
    """

    text: str
    token_ids: NDArray[np.int32]
    assistant_mask: NDArray[np.bool_] | None = None
    offsets: NDArray[np.int64] | None = None


def encode_conversation(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    history: Sequence[Message],
    *,
    with_mask: bool = True,
    with_offsets: bool = False,
    include_eos: bool = False,
    **options: Any,
) -> EncodedConversation:
    """Render the conversation with `options` (those of ChatTemplate.render) and tokenise it.

    include_eos: the mask also covers the special token that ends each of the assistant's turns, as
    a model that learns by imitation needs it. Raises Unsupported (MASK_UNAVAILABLE) when the
    template does not show where the assistant's text stands.
    """
    (encoded,) = encode_conversations(
        template,
        tokenizer,
        (history,),
        with_mask=with_mask,
        with_offsets=with_offsets,
        include_eos=include_eos,
        **options,
    )
    return encoded


def encode_conversations(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    histories: Iterable[Sequence[Message]],
    *,
    with_mask: bool = True,
    with_offsets: bool = False,
    include_eos: bool = False,
    **options: Any,
) -> tuple[EncodedConversation, ...]:
    """Encode each conversation as `encode_conversation` does, all of them in one call."""
    histories = tuple(histories)
    rendered = [
        _render_with_spans(template, history, options, with_mask=with_mask) for history in histories
    ]
    codes = tokenizer.encode_all([text for text, _ in rendered])
    encoded: list[EncodedConversation] = []
    for history, (text, spans), ids in zip(histories, rendered, codes, strict=True):
        if tokenizer.spells_special(_all_text(history)):
            text, spans, tokens = _encode_with_literals(
                template, tokenizer, history, options, with_mask
            )
        elif with_mask or with_offsets:
            fast = None if with_offsets else _in_bytes(text, ids, tokenizer)
            tokens = fast or _in_characters(tokenizer.encode(text, trusted=True))
        else:
            nowhere = np.zeros(0, np.int64)
            tokens = _Tokens(np.array(ids, np.int32), nowhere, nowhere)
        mask = _mask(tokens, spans, tokenizer, include_eos=include_eos) if with_mask else None
        encoded.append(
            EncodedConversation(
                text=text,
                token_ids=tokens.ids,
                assistant_mask=mask,
                offsets=np.stack((tokens.starts, tokens.ends), axis=1) if with_offsets else None,
            )
        )
    return tuple(encoded)


def assistant_spans(
    template: ChatTemplate, history: Sequence[Message], text: str, **options: Any
) -> tuple[Span, ...]:
    """Return where a template without generation blocks writes what the assistant says."""
    spans: list[Span] = []
    contents = content_spans(template, history, text, **options)
    for index, message in enumerate(history):
        if message.role != "assistant":
            continue
        if message.tool_calls or message.reasoning:
            spans.append(_turn_span(template, history, index, text, options))
        elif contents is None:
            raise _no_mask()
        elif index in contents:
            spans.append(contents[index])
    return tuple(spans)


def content_spans(
    template: ChatTemplate, history: Sequence[Message], text: str, **options: Any
) -> dict[int, Span] | None:
    """Return where each message's content stands in the rendered text, by the message's index.

    Contents that the template leaves out are left out here. None when it changes them otherwise
    than by trimming.
    """
    marks = {i: f"{_MARK[0]}{i}{_MARK[1]}" for i, message in enumerate(history) if message.text}
    marked_history = tuple(
        replace(message, content=marks[i]) if i in marks else message
        for i, message in enumerate(history)
    )
    try:
        marked = template.render(marked_history, **options)
    except DialoopError:
        return None
    if any(marked.count(mark) > 1 for mark in marks.values()):
        return None
    shown = [i for i, mark in marks.items() if mark in marked]
    glues: list[str] = []
    for i in shown:
        glue, mark, marked = marked.partition(marks[i])
        if not mark:
            return None  # contents stand in another order
        glues.append(glue)
    return _locate_contents(text, [*glues, marked], [history[i].text for i in shown], shown)


def _locate_contents(
    text: str, glues: list[str], contents: list[str], indices: list[int]
) -> dict[int, Span] | None:
    """Return the contents' spans in glue, content, glue, ...; None where that is not the text."""
    if not text.startswith(glues[0]):
        return None
    position = len(glues[0])
    spans: dict[int, Span] = {}
    for index, content, glue in zip(indices, contents, glues[1:], strict=True):
        for shape in (content, content.strip(), content.lstrip(), content.rstrip()):
            if text.startswith(shape + glue, position):
                break
        else:
            return None
        spans[index] = (position, position + len(shape))
        position += len(shape) + len(glue)
    return spans if position == len(text) else None


def _turn_span(
    template: ChatTemplate,
    history: Sequence[Message],
    index: int,
    text: str,
    options: dict[str, Any],
) -> Span:
    """Return the span after the opening of the assistant's turn, without what ends the turn."""
    others = {k: v for k, v in options.items() if k not in _OPENING}
    before = template.render(history[:index], add_generation_prompt=True, **others)
    through = template.render(history[: index + 1], add_generation_prompt=False, **others)
    if not (through.startswith(before) and text.startswith(through)):
        raise _no_mask()
    empty = template.render(
        (*history[:index], Message(role="assistant")), add_generation_prompt=False, **others
    )
    closing = empty.removeprefix(before)
    end = len(through) - (len(closing) if through.endswith(closing) else 0)
    return len(before), end


_OPENING = ("add_generation_prompt", "continue_final_message")


def _render_with_spans(
    template: ChatTemplate, history: Sequence[Message], options: dict[str, Any], *, with_mask: bool
) -> tuple[str, tuple[Span, ...]]:
    if not with_mask:
        return template.render(history, **options), ()
    if template.has_generation_blocks:
        return template.render_blocks(history, **options)
    text = template.render(history, **options)
    return text, assistant_spans(template, history, text, **options)


def _all_text(history: Sequence[Message]) -> str:
    """Join all texts of the messages."""
    texts: list[str] = []
    for message in history:
        texts += (message.role, message.text, message.reasoning, message.name)
        texts += message.tool_responses
        for call in message.tool_calls:
            texts += (call.name, call.arguments_json)
    return "\n".join(texts)


def _encode_with_literals(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    history: Sequence[Message],
    options: dict[str, Any],
    with_mask: bool,
) -> tuple[str, tuple[Span, ...], _Tokens]:
    """Return the text, spans and tokens of messages that spell special tokens."""
    plain, _ = _render_with_spans(template, history, options, with_mask=False)
    guard = absent_character(plain + _all_text(history))
    safe = tuple(
        with_texts(message, lambda text: guard_special_tokens(text, guard, tokenizer))
        for message in history
    )
    text, spans = _render_with_spans(template, safe, options, with_mask=with_mask)
    if text.replace(guard, "") != plain:
        raise Unsupported(
            "A message spells a special token that the chat template reads for its meaning.",
            reason=Reason.SPECIAL_TOKEN_SPELLED,
            remedy="Leave it out of the text, or send token ids.",
        )
    ids: list[int] = []
    offsets: list[Span] = []
    position = 0
    for start, end in (*tokenizer.special_spans(text), (len(text), len(text))):
        for part, trusted in ((text[position:start], False), (text[start:end], True)):
            base = sum(len(p) for p in (text[:position].replace(guard, ""),))
            if trusted:
                base += len(text[position:start].replace(guard, ""))
            code = tokenizer.encode(part.replace(guard, ""), trusted=trusted)
            ids += code.ids
            offsets += [(base + first, base + last) for first, last in code.offsets]
        position = end
    moved = tuple(
        (len(text[:start].replace(guard, "")), len(text[:end].replace(guard, "")))
        for start, end in spans
    )
    return plain, moved, _in_characters(Encoded(ids=tuple(ids), offsets=tuple(offsets)))


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """Ids [L] and where each starts and ends in the text, [L]: in characters or UTF-8 bytes."""

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    text: str = ""
    in_bytes: bool = False

    def positions(self, spans: Iterable[Span]) -> Iterable[Span]:
        """Return the spans of characters in the unit of the offsets."""
        if not self.in_bytes or self.text.isascii():
            return spans
        moved: list[Span] = []
        done = at = 0
        for span in spans:
            ends = []
            for character in span:
                at += len(self.text[done:character].encode())
                done = character
                ends.append(at)
            moved.append((ends[0], ends[1]))
        return moved


def _in_bytes(text: str, ids: list[int], tokenizer: Tokenizer) -> _Tokens | None:
    """Return where each token stands, by the bytes it spells; None if these are not the text."""
    table = tokenizer.byte_lengths
    is_plain = text.isascii()
    if table is None or not (is_plain or unicodedata.is_normalized("NFC", text)):
        return None
    numbers = np.array(ids, np.int32)
    lengths = table[numbers]
    ends = lengths.cumsum()
    if len(ids) and ends[-1] != (len(text) if is_plain else len(text.encode())):
        return None
    return _Tokens(numbers, ends - lengths, ends, text, True)


def _in_characters(code: Encoded) -> _Tokens:
    offsets = np.array(code.offsets, np.int64).reshape(-1, 2)
    return _Tokens(np.array(code.ids, np.int32), offsets[:, 0], offsets[:, 1])


def _mask(
    tokens: _Tokens, spans: Iterable[Span], tokenizer: Tokenizer, *, include_eos: bool
) -> NDArray[np.bool_]:
    """Return a mask that is True on the tokens of the spans, and on no special token after them."""
    size = len(tokens.ids)
    mask = np.zeros(size, dtype=np.bool_)
    starts, ends = tokens.starts, tokens.ends
    for begin, end in tokens.positions(spans):
        first = int(np.searchsorted(ends, begin, side="right"))
        last = max(first, int(np.searchsorted(starts, end, side="left")))
        while last > first and _ends_turn(int(tokens.ids[last - 1]), tokenizer):
            last -= 1
        if include_eos and last < size and _ends_turn(int(tokens.ids[last]), tokenizer):
            last += 1
        mask[first:last] = True
    return mask


def _ends_turn(token_id: int, tokenizer: Tokenizer) -> bool:
    return tokenizer.is_special(token_id) or token_id in tokenizer.end_of_turn_ids


def _no_mask() -> Unsupported:
    return Unsupported(
        "The chat template does not show where the assistant's text stands.",
        reason=Reason.MASK_UNAVAILABLE,
        remedy="Give the template generation blocks, or train on sampled tokens.",
    )
