"""A whole conversation as token ids and a mask of what the assistant wrote.

encoded = encode_conversation(template, tokenizer, history, add_generation_prompt=False)
    encoded.token_ids[encoded.assistant_mask]      # the assistant's tokens and no others

The mask comes from where the template writes the assistant's text: from its generation blocks, or,
when it has none, from marks that stand for the contents in a second rendering. A content is never
searched for in the text. Special tokens that a message merely spells get no special ids.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from dialoop.errors import Unsupported
from dialoop.reasons import Reason
from dialoop.templates.parsing import absent_character, guard_special_tokens, with_texts
from dialoop.templates.slots import require_plain_tools, texts_of
from dialoop.templates.turns import assistant_turns
from dialoop.tokens.tokenizer import Encoded, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from dialoop.messages import Message
    from dialoop.templates.chat_template import ChatTemplate, Span


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
    template = template.for_tools(options.get("tools"))
    if options.get("tools") is not None:
        options["tools"] = tuple(options["tools"])
        require_plain_tools(options["tools"], tokenizer)
    ended = template.ended(tokenizer) if with_mask else tokenizer
    rendered = [
        _render_with_spans(
            template, tokenizer, history, options, with_mask=with_mask, include_eos=include_eos
        )
        for history in histories
    ]
    codes = tokenizer.encode_all([text for text, _ in rendered])
    encoded: list[EncodedConversation] = []
    for history, (text, spans), ids in zip(histories, rendered, codes, strict=True):
        if tokenizer.spells_special("\n".join(chain(*map(texts_of, history)))):
            text, spans, tokens = _encode_with_literals(
                template, tokenizer, history, options, with_mask, include_eos
            )
        elif with_mask or with_offsets:
            fast = None if with_offsets else _in_bytes(text, ids, tokenizer)
            tokens = fast or _in_characters(tokenizer.encode(text, trusted=True))
        else:
            nowhere = np.zeros(0, np.int64)
            tokens = _Tokens(np.array(ids, np.int32), nowhere, nowhere)
        mask = None
        if with_mask:
            has_blocks = template.has_generation_blocks
            mask = _mask(tokens, spans, ended, of_blocks=has_blocks, include_eos=include_eos)
        encoded.append(
            EncodedConversation(
                text=text,
                token_ids=tokens.ids,
                assistant_mask=mask,
                offsets=np.stack((tokens.starts, tokens.ends), axis=1) if with_offsets else None,
            )
        )
    return tuple(encoded)


def _render_with_spans(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    history: Sequence[Message],
    options: dict[str, Any],
    *,
    with_mask: bool,
    include_eos: bool = False,
) -> tuple[str, tuple[Span, ...]]:
    if with_mask and template.has_generation_blocks:
        text, blocks = template.render_blocks(history, **options)
        opening = template.profile.opening
        if not opening.strip():
            return text, blocks
        # A template may write the opening in its block, which the policy is given.
        return text, tuple(
            (start + len(opening) * text.startswith(opening, start, end), end)
            for start, end in blocks
        )
    text = template.render(history, **options)
    if not with_mask:
        return text, ()
    turns = assistant_turns(template, tokenizer, history, text, **options)
    return text, tuple((turn.start, turn.closed if include_eos else turn.end) for turn in turns)


def _encode_with_literals(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    history: Sequence[Message],
    options: dict[str, Any],
    with_mask: bool,
    include_eos: bool,
) -> tuple[str, tuple[Span, ...], _Tokens]:
    """Return the text, spans and tokens of messages that spell special tokens."""
    plain, _ = _render_with_spans(template, tokenizer, history, options, with_mask=False)
    guard = absent_character(plain + "\n".join(chain(*map(texts_of, history))))
    safe = tuple(
        with_texts(message, lambda text: guard_special_tokens(text, guard, tokenizer))
        for message in history
    )
    text, spans = _render_with_spans(
        template, tokenizer, safe, options, with_mask=with_mask, include_eos=include_eos
    )
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
    tokens: _Tokens,
    spans: Iterable[Span],
    tokenizer: Tokenizer,
    *,
    of_blocks: bool,
    include_eos: bool,
) -> NDArray[np.bool_]:
    """Return a mask that is True on the tokens of the spans.

    of_blocks: the spans are generation blocks, in which a template writes the end of turn or
    behind which it does. Ends and blanks at a block's end are taken off, from the first end on;
    with `include_eos` that end counts.
    """
    mask = np.zeros(len(tokens.ids), dtype=np.bool_)
    starts, ends = tokens.starts, tokens.ends
    for begin, end in tokens.positions(spans):
        first = int(np.searchsorted(ends, begin, side="right"))
        if first < len(mask) and starts[first] < begin:
            first += tokenizer.is_special(
                int(tokens.ids[first])
            )  # it swallows the blanks behind it
        last = max(first, int(np.searchsorted(starts, end, side="left")))
        if of_blocks:
            at = last
            while at > first and (
                (is_end := tokens.ids[at - 1] in tokenizer.end_of_turn_ids)
                or not tokenizer.decode([int(tokens.ids[at - 1])]).strip()
            ):
                at -= 1
                last = at if is_end else last
            if include_eos and last < len(mask):
                last += tokens.ids[last] in tokenizer.end_of_turn_ids
        mask[first:last] = True
    return mask
