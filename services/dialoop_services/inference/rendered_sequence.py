"""A rendered conversation as a sequence: which message each token shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dialoop.sequences import Sequence, Source, sequence_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop.templates.chat_template import Span
    from dialoop.templates.masks import EncodedConversation


def rendered_sequence(rendered: EncodedConversation, contents: Mapping[int, Span]) -> Sequence:
    """Segments of PROMPT where a message's content stands, of TEMPLATE everywhere else.

    contents: the characters of the content of each message, by its index. A token belongs to where
    its first character stands. Without contents everything is PROMPT.
    """
    ids = rendered.token_ids.tolist()
    if rendered.offsets is None or not contents:
        return sequence_of([(ids, {"source": Source.PROMPT})])
    starts = rendered.offsets[:, 0]
    pieces: list[tuple[list[int], dict[str, Any]]] = []
    done = 0
    for index, (begin, end) in sorted(contents.items(), key=lambda item: item[1]):
        first, last = int((starts < begin).sum()), int((starts < end).sum())
        pieces.append((ids[done:first], {"source": Source.TEMPLATE}))
        if last > first:
            char_start = int(starts[first]) - begin
            fields = {
                "source": Source.PROMPT,
                "message_index": index,
                "char_start": char_start,
                "char_length": end - begin - char_start,
            }
            pieces.append((ids[first:last], fields))
        done = last
    pieces.append((ids[done:], {"source": Source.TEMPLATE}))
    return sequence_of(pieces)
