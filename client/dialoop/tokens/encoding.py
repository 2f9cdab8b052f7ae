"""Pieces of rendered text as tokens, each token in the segment of who wrote it."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from dialoop.sequences import Sequence, sequence_of
from dialoop.tokens.tokenizer import Encoded, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dialoop.tokens.text_spans import Piece

_Run = tuple[list[int], dict[str, Any]]


def tokens_of(
    pieces: Iterable[Piece], tokenizer: Tokenizer, *, turn: int, before: int | None
) -> Sequence:
    """Tokenise pieces, those between literal ones as one text; `before` is the token they follow.

    The ids are those of one text wherever no piece is literal.
    """
    runs: list[_Run] = []
    shown = (piece for piece in pieces if piece.text)
    for is_literal, group in groupby(shown, key=lambda piece: piece.is_literal):
        for part in ([piece] for piece in group) if is_literal else [list(group)]:
            text = "".join(piece.text for piece in part)
            encoded = (
                tokenizer.encode(text) if is_literal else _encode_after(text, tokenizer, before)
            )
            runs += _assign(encoded, part, turn)
            before = encoded.ids[-1] if encoded.ids else before
    return sequence_of(runs)


def _encode_after(text: str, tokenizer: Tokenizer, before: int | None) -> Encoded:
    """Encode a text as after a special token; some tokenizers add a space otherwise."""
    if before is None or not tokenizer.is_special(before):
        return tokenizer.encode(text, trusted=True)
    anchor = tokenizer.decode([before])
    encoded = tokenizer.encode(anchor + text, trusted=True)
    if not encoded.ids or encoded.ids[0] != before:
        return tokenizer.encode(text, trusted=True)
    shift = len(anchor)
    return Encoded(
        ids=encoded.ids[1:],
        offsets=tuple((start - shift, end - shift) for start, end in encoded.offsets[1:]),
    )


def _assign(encoded: Encoded, pieces: list[Piece], turn: int) -> Iterator[_Run]:
    """Give each token to the piece its first character lies in."""
    position, index = 0, 0
    for piece in pieces:
        end = position + len(piece.text)
        first = index
        while index < len(encoded.ids) and encoded.offsets[index][0] < end:
            index += 1
        if index > first:
            start = max(0, encoded.offsets[first][0] - position)
            stop = min(len(piece.text), encoded.offsets[index - 1][1] - position)
            yield list(encoded.ids[first:index]), _fields(piece, turn, start, stop)
        position = end


def _fields(piece: Piece, turn: int, start: int, stop: int) -> dict[str, Any]:
    is_shown = piece.message_index is not None and piece.char_start is not None
    return {
        "source": piece.source,
        "turn": turn,
        "message_index": piece.message_index,
        "char_start": (piece.char_start or 0) + start if is_shown else 0,
        "char_length": stop - start if is_shown else 0,
    }
