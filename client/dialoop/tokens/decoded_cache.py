"""The texts that token rows spell, remembered: a longer row costs only what it adds."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dialoop.sequences import Ids
    from dialoop.tokens.tokenizer import Tokenizer


class SpelledTexts:
    """Decodes rows of ids and remembers the newest texts, up to `max_chars` in all.

    A memory of a pure function: what it has forgotten, or what another process built, is decoded
    anew with the same result.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_chars: int = 8_000_000) -> None:
        self._tokenizer = tokenizer
        self._max_chars = max_chars
        self._num_chars = 0
        self._texts: OrderedDict[bytes, str] = OrderedDict()

    def of(self, ids: Ids) -> str:
        """Return the text of the ids [L]."""
        key = _digest(ids)
        text = self._texts.get(key)
        if text is None:
            text = self._tokenizer.decode(ids.tolist())
            self._keep(key, text)
        else:
            self._texts.move_to_end(key)
        return text

    def grown(self, ids: Ids, more: Ids) -> None:
        """Remember the text of `ids` followed by `more`, where that of `ids` is known."""
        text = self._texts.get(_digest(ids))
        if text is not None:
            text = self._tokenizer.decode_more(text, ids, more.tolist())
            self._keep(_digest(np.concatenate([ids, more])), text)

    def _keep(self, key: bytes, text: str) -> None:
        if key in self._texts:
            return
        self._texts[key] = text
        self._num_chars += len(text)
        while self._num_chars > self._max_chars:
            _, oldest = self._texts.popitem(last=False)
            self._num_chars -= len(oldest)


def _digest(ids: Ids) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
