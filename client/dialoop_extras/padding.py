"""Rows of different lengths as one array, and back; the lengths always travel with it.

    long = Tokens(prompt=(5, 8, 9), response=(2,), full=(5, 8, 9, 2))
    short = Tokens(prompt=(5,), response=(7, 2), full=(5, 7, 2))
    padded = pad_tokens([long, short], pad_token_id=2)
    padded.prompt.values      # [B, P] padded on the left
    padded.response.values    # [B, R] padded on the right
    padded.full.values        # [B, P + R] on both sides
    padded.unpad()            # [long, short]: the pad id 2 is a token as well
    pad_output(views, pad_token_id=2)    # the same with log-probs and masks of whole turns

A length is never recovered by comparing with the pad id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.views.views import Masks, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dialoop.views.views import LogProbs, TurnView
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Numbers = NDArray[np.int32]

PaddingSide = Literal["left", "right"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedRows:
    """values [B, W]; row i holds lengths[i] values from starts[i] on (int32 [B] each)."""

    values: Array
    starts: Numbers
    lengths: Numbers

    def rows(self) -> list[Array]:
        """Return the rows without padding."""
        spans = zip(self.values, self.starts, self.lengths, strict=True)
        return [row[start : start + length] for row, start, length in spans]

    def mask(self) -> NDArray[np.bool_]:
        """Return bool [B, W]: what is not padding."""
        places = np.arange(self.values.shape[1])[None, :]
        starts, lengths = self.starts[:, None], self.lengths[:, None]
        return (places >= starts) & (places < starts + lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedTokens:
    """Token ids of a batch; a part is absent where any conversation lacks it."""

    prompt: PaddedRows | None = None
    response: PaddedRows | None = None
    full: PaddedRows | None = None

    def unpad(self) -> list[Tokens]:
        """Return the conversations without padding, by their lengths."""
        parts = {name: getattr(self, name) for name in ("prompt", "response", "full")}
        rows = {name: part.rows() for name, part in parts.items() if part is not None}
        count = max((len(part_rows) for part_rows in rows.values()), default=0)
        return [
            Tokens(**{name: tuple(part_rows[i].tolist()) for name, part_rows in rows.items()})
            for i in range(count)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedOutput:
    """Turns, padded: tokens, masks [B, W] over the full tokens, and log-probs by part."""

    tokens: PaddedTokens
    masks: Masks
    log_probs: dict[str, PaddedRows]
    pad_token_id: int
    padding_side: PaddingSide


def pad_output(
    views: Sequence[TurnView], *, pad_token_id: int, padding_side: PaddingSide = "left"
) -> PaddedOutput:
    """Pad turns to arrays, as `pad_tokens`, `pad_masks` and `pad_logprobs` do.

    Raises InvalidInput without turns, or with a pad id that is no id.
    """
    if not views or pad_token_id < 0:
        raise InvalidInput(
            f"{len(views)} turns cannot be padded with token {pad_token_id}.",
            reason=Reason.BAD_PADDING,
            remedy="Give at least one turn, and the id of a token (0 or more) to pad with.",
        )
    tokens = pad_tokens(
        [view.tokens for view in views], pad_token_id=pad_token_id, padding_side=padding_side
    )
    return PaddedOutput(
        tokens=tokens,
        masks=pad_masks([view.masks for view in views], tokens),
        log_probs=pad_logprobs([view.log_probs for view in views], tokens),
        pad_token_id=pad_token_id,
        padding_side=padding_side,
    )


def _require_side(side: str) -> None:
    if side not in ("left", "right"):
        raise InvalidInput(
            f"padding_side is {side!r:.40}.",
            reason=Reason.BAD_PADDING,
            remedy="Use 'left' or 'right'.",
        )


def pad_tokens(
    batch: Sequence[Tokens], *, pad_token_id: int, padding_side: PaddingSide = "left"
) -> PaddedTokens:
    """Pad prompts left, responses right, full on both sides so that responses begin together.

    padding_side: where `full` is padded when its parts are not known.
    """
    _require_side(padding_side)
    prompt = _column([t.prompt for t in batch], "left", pad_token_id)
    response = _column([t.response for t in batch], "right", pad_token_id)
    full = _column([t.full for t in batch], padding_side, pad_token_id)
    if prompt is not None and response is not None and full is not None:
        values = np.concatenate([prompt.values, response.values], axis=1)
        full = PaddedRows(values=values, starts=prompt.starts, lengths=full.lengths)
    return PaddedTokens(prompt=prompt, response=response, full=full)


def pad_logprobs(batch: Sequence[LogProbs], tokens: PaddedTokens) -> dict[str, PaddedRows]:
    """Lay log-probs out as their tokens, float32 [B, W] by part; NaN is unknown or padding.

    A part is left out where it is unknown in every conversation.
    """
    padded: dict[str, PaddedRows] = {}
    for name in ("prompt", "response", "full"):
        rows, places = [getattr(log_probs, name) for log_probs in batch], getattr(tokens, name)
        if places is not None and any(row is not None for row in rows):
            aligned = [
                np.full(length, np.nan, np.float32) if row is None else row.align(int(length))
                for row, length in zip(rows, places.lengths, strict=True)
            ]
            padded[name] = _place(aligned, places, np.float32(np.nan))
    return padded


def pad_masks(batch: Sequence[Masks], tokens: PaddedTokens) -> Masks:
    """Lay masks out as the full tokens, bool [B, W]; False on padding."""
    if tokens.full is None:
        raise InvalidInput(
            "Masks need the full tokens, which are absent.", reason=Reason.FULL_MISSING
        )
    return Masks(
        all_attention_mask=tokens.full.mask(),
        all_assistant_mask=_assistant_mask(batch, tokens.full),
    )


def padded_rows(
    values: Array, lengths: Iterable[int] | None, *, padding_side: PaddingSide
) -> PaddedRows:
    """Read a padded array [B, W] by its lengths; raise InvalidInput (LENGTHS_MISSING) without.

    Only the lengths tell padding from tokens: many models pad with the token that ends a turn.
    """
    _require_side(padding_side)
    if lengths is None:
        raise InvalidInput(
            "Padded rows came without their lengths.",
            reason=Reason.LENGTHS_MISSING,
            remedy="Give the length of each row, or unpadded rows.",
        )
    counts = np.array(list(lengths), dtype=np.int32)
    if values.ndim != 2 or len(counts) != len(values) or np.any(counts > values.shape[1]):
        raise InvalidInput(
            f"{len(counts)} lengths up to {counts.max(initial=0)} do not fit values of shape "
            f"{values.shape}.",
            reason=Reason.RAGGED,
            remedy="Give values [B, W] and one length up to W for each row.",
        )
    starts = values.shape[1] - counts if padding_side == "left" else np.zeros_like(counts)
    return PaddedRows(values=values, starts=starts.astype(np.int32), lengths=counts)


def _column(
    rows: list[tuple[int, ...] | None], side: PaddingSide, pad_token_id: int
) -> PaddedRows | None:
    arrays = [np.array(row, dtype=np.int32) for row in rows if row is not None]
    if not arrays or len(arrays) != len(rows):
        return None
    lengths = np.array([len(row) for row in arrays], dtype=np.int32)
    width = int(lengths.max())
    starts = width - lengths if side == "left" else np.zeros_like(lengths)
    empty = np.empty((len(arrays), width), dtype=np.int32)
    places = PaddedRows(values=empty, starts=starts.astype(np.int32), lengths=lengths)
    return _place(arrays, places, np.int32(pad_token_id))


def _place(rows: Sequence[Array], places: PaddedRows, fill: Any) -> PaddedRows:
    values = np.full(places.values.shape, fill)
    for index, row in enumerate(rows):
        start = places.starts[index]
        values[index, start : start + len(row)] = row
    return PaddedRows(values=values, starts=places.starts, lengths=places.lengths)


def _assistant_mask(batch: Sequence[Masks], full: PaddedRows) -> NDArray[np.bool_] | None:
    rows = [masks.all_assistant_mask for masks in batch if masks.all_assistant_mask is not None]
    if len(rows) != len(batch):
        return None
    values: NDArray[np.bool_] = _place(rows, full, np.False_).values
    return values
