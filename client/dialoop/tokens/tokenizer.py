"""A model directory's tokenizer, through the light `tokenizers` library (no torch)."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import tokenizers
    from numpy.typing import NDArray

    from dialoop.sequences import Ids

_REPLACEMENT = "\ufffd"
_MAX_TOKENS_PER_CHARACTER = 4
_WINDOW = 8
_PIECE = 4000
LONG_TEXT = 1 << 14
"""Characters from which on to encode a text takes so long that others should go on meanwhile."""
_MOST_COMPOSED = 4  # characters that a normaliser makes one of
_HEX_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SHOWN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = (byte for byte in range(0x100) if byte not in _SHOWN)
_BYTES = {chr(byte): byte for byte in _SHOWN} | {
    chr(0x100 + number): byte for number, byte in enumerate(_HIDDEN)
}
"""The byte that each character of a byte-level vocabulary stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Token ids and, for each, the half-open range of characters it spells."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]


@contextmanager
def _whole_characters(texts: Iterable[str]) -> Iterator[None]:
    """Say which half of a character made the library refuse a text; it says the type is wrong."""
    try:
        yield
    except TypeError:
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"A text has half a character, {error.object[error.start]!r}: no token spells it.",
                reason=Reason.HALF_CHARACTER,
                remedy='Leave it out: text.encode(errors="replace").decode() puts a ? there.',
            ) from None
        raise


class Tokenizer:
    """Encodes text to ids and decodes ids; only trusted text gives ids of special tokens."""

    def __init__(
        self, trusting: tokenizers.Tokenizer, literal: tokenizers.Tokenizer, config: dict[str, Any]
    ) -> None:
        literal.encode_special_tokens = True
        self._trusting = trusting
        self._literal = literal
        self._config = config
        added = trusting.get_added_tokens_decoder()
        special_texts = sorted((t.content for t in added.values() if t.special), key=len)
        self._special = re.compile("|".join(map(re.escape, reversed(special_texts))) or r"(?!)")
        added_texts = sorted((t.content for t in added.values()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added_texts)) or r"(?!)")
        self._special_ids = frozenset(i for i, t in added.items() if t.special)
        self._added_ids = frozenset(added)
        self.digest = hashlib.sha256(trusting.to_str().encode()).hexdigest()[:16]
        self.end_of_turn_ids = self._find_ends()
        """Ids that end a message: the eos_token, then those the generation config names."""

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Read tokenizer.json, and the tokenizer's and generation's configs where they are.

        Raises InvalidConfig when there is no tokenizer.json.
        """
        import tokenizers

        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InvalidConfig(
                f"The model directory {directory} has no tokenizer.json.",
                reason=Reason.TOKENIZER_MISSING,
                remedy="Save the tokenizer there with tokenizer.save_pretrained(directory).",
            )
        config_path = directory / "tokenizer_config.json"
        config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
        # As in transformers, files stand in for all templates of the config.
        files = {"default": directory / "chat_template.jinja"}
        files |= {p.stem: p for p in (directory / "additional_chat_templates").glob("*.jinja")}
        templates = {name: p.read_text("utf-8") for name, p in files.items() if p.is_file()}
        if templates:
            config["chat_template"] = templates
        generation_path = directory / "generation_config.json"
        if generation_path.is_file():
            ends = json.loads(generation_path.read_text("utf-8")).get("eos_token_id")
            config["eos_token_ids"] = [ends] if isinstance(ends, int) else ends or []
        config.setdefault("name_or_path", directory.resolve().name)
        text = path.read_text("utf-8")
        return cls(tokenizers.Tokenizer.from_str(text), tokenizers.Tokenizer.from_str(text), config)

    @classmethod
    def from_transformers(cls, tokenizer: Any) -> Tokenizer:
        """Make the same tokenizer as a fast one of transformers, as that is now."""
        import tokenizers

        text = tokenizer.backend_tokenizer.to_str()
        config = dict(tokenizer.special_tokens_map)
        config["name_or_path"] = tokenizer.name_or_path
        config["chat_template"] = tokenizer.chat_template
        config["model_max_length"] = tokenizer.model_max_length
        return cls(tokenizers.Tokenizer.from_str(text), tokenizers.Tokenizer.from_str(text), config)

    @property
    def name(self) -> str:
        """Return the model's name or directory, which tells its family; empty when unknown."""
        return str(self._config.get("name_or_path") or "")

    @property
    def model_max_length(self) -> int | None:
        """Return the most tokens that the tokenizer's config allows; None where it does not say."""
        length = self._config.get("model_max_length")
        return int(length) if length is not None and length < 1 << 40 else None

    @property
    def chat_template(self) -> str | None:
        """Return the tokenizer's own chat template, its default; None where it has none."""
        return self.chat_templates.get("default")

    @property
    def chat_templates(self) -> dict[str, str]:
        """Return the tokenizer's own chat templates by name; one without a name is the default."""
        template = self._config.get("chat_template")
        if isinstance(template, list):
            return {item["name"]: item["template"] for item in template}
        if isinstance(template, dict):
            return dict(template)
        return {} if template is None else {"default": template}

    def special_token(self, name: str) -> str | None:
        """Return the text of bos_token, eos_token, pad_token or unk_token."""
        token = self._config.get(name)
        return token["content"] if isinstance(token, dict) else token

    def _find_ends(self) -> tuple[int, ...]:
        eos = self.special_token("eos_token")
        number = None if eos is None else self._trusting.token_to_id(eos)
        ids = [] if number is None else [number]
        ids += [int(i) for i in self._config.get("eos_token_ids", ())]
        return tuple(dict.fromkeys(i for i in ids if self._trusting.id_to_token(i) is not None))

    def ended_by(self, ids: tuple[int, ...]) -> Tokenizer:
        """Return this tokenizer with other ids that end a message."""
        if ids == self.end_of_turn_ids:
            return self
        other = copy(self)
        other.end_of_turn_ids = ids
        return other

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, added tokens included."""
        return self._trusting.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_token_chars(self) -> int | None:
        """Return how many characters one token may spell; None where that has no limit.

        A tokenizer that spells no bytes may have one token for any word that it does not know.
        """
        if not self._byte_decoder:
            return None
        longest = max(map(len, self._trusting.get_vocab(with_added_tokens=True)))
        return longest if self._trusting.normalizer is None else _MOST_COMPOSED * longest

    def encode(self, text: str, *, trusted: bool = False) -> Encoded:
        """Encode without an automatic BOS. Untrusted text cannot spell a special token.

        Raises InvalidInput (HALF_CHARACTER) for half of a surrogate pair, which no token spells.
        """
        engine = self._trusting if trusted else self._literal
        with _whole_characters((text,)):
            if len(text) > LONG_TEXT:
                # As a batch, which lets other threads work meanwhile.
                (encoding,) = engine.encode_batch([text], add_special_tokens=False)
            else:
                encoding = engine.encode(text, add_special_tokens=False)
        return Encoded(ids=tuple(encoding.ids), offsets=tuple(encoding.offsets))

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a trusted text to continue, after the `prefix_ids` that it does not begin with."""
        ids = self.encode(text, trusted=True).ids
        begins = ids[: len(self.prefix_ids)] == self.prefix_ids
        return [*ids] if begins or not add_special_tokens else [*self.prefix_ids, *ids]

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """Return the ids that transformers puts before each text: none, or the bos_token's."""
        encoding = self._trusting.encode("a", add_special_tokens=True)
        mask = encoding.special_tokens_mask
        return tuple(encoding.ids[: mask.index(0)] if 0 in mask else ())

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token spells, which may be a part of a character."""
        spelling = self._trusting.id_to_token(token_id) or ""
        if token_id not in self._added_ids:
            if self._byte_decoder == "ByteLevel" and _BYTES.keys() >= set(spelling):
                return bytes(_BYTES[character] for character in spelling)
            if self._byte_decoder == "ByteFallback" and (match := _HEX_BYTE.fullmatch(spelling)):
                return bytes([int(match[1], 16)])
        # Some decoders leave out a space where a text begins.
        return self.decode_after(self.encode("a").ids, (token_id,)).encode()

    @cached_property
    def _byte_decoder(self) -> str:
        """Return the decoder that reads tokens as bytes, if there is one."""
        decoder = self._trusting.decoder
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        kinds = {part["type"] for part in (state, *state.get("decoders", ())) if "type" in part}
        return next((kind for kind in ("ByteLevel", "ByteFallback") if kind in kinds), "")

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode trusted texts to ids without offsets, the fastest way; errors as `encode`.

        Long texts are cut before special tokens, with which nothing merges, and all cores encode.
        """
        cut = [self._cut(text) for text in texts]
        flat = [part for parts in cut for part in parts]
        with _whole_characters(texts):
            codes = iter(self._trusting.encode_batch_fast(flat, add_special_tokens=False))
        return [list(chain.from_iterable(next(codes).ids for _ in parts)) for parts in cut]

    def _cut(self, text: str) -> list[str]:
        """Cut the text into pieces of some thousand characters."""
        parts: list[str] = []
        position = 0
        while self._has_plain_specials and len(text) - position > 2 * _PIECE:
            match = self._special.search(text, position + _PIECE)
            if match is None:
                break
            parts.append(text[position : match.start()])
            position = match.start()
        return [*parts, text[position:]]

    @cached_property
    def _has_plain_specials(self) -> bool:
        """Return whether special tokens stand alone, taking no blanks beside them."""
        added = self._trusting.get_added_tokens_decoder().values()
        return not any(t.lstrip or t.rstrip or t.single_word or t.normalized for t in added)

    @cached_property
    def byte_lengths(self) -> NDArray[np.int64] | None:
        """Return how many bytes each id spells, int64 [V]; None unless each id spells bytes.

        Only where the tokenizer is byte-level and changes no text but to NFC.
        """
        description = json.loads(self._trusting.to_str())
        normalizer = (description.get("normalizer") or {"type": "NFC"}).get("type")
        if (description.get("decoder") or {}).get("type") != "ByteLevel" or normalizer != "NFC":
            return None
        added = self._trusting.get_added_tokens_decoder()
        lengths = np.zeros(self.vocab_size, np.int64)
        for text, number in self._trusting.get_vocab(with_added_tokens=True).items():
            # Byte-level vocabularies spell each byte as one character.
            lengths[number] = len(text.encode()) if number in added else len(text)
        return lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids. Special tokens stay, and invalid UTF-8 becomes replacement characters."""
        return self._trusting.decode(list(ids), skip_special_tokens=False)

    def decode_plain(self, ids: Iterable[int]) -> str:
        """Decode ids without the special tokens among them."""
        return self.decode([token for token in ids if not self.is_special(token)])

    def decode_more(self, text: str, ids: Sequence[int] | Ids, more: Sequence[int]) -> str:
        """Return the text of `ids` and `more`, from that of `ids`; it costs as much as `more`."""
        window = [int(i) for i in ids[-_WINDOW:]]
        window_text = self.decode(window)
        whole = self.decode([*window, *more])
        if (
            not window_text
            or window_text.endswith(_REPLACEMENT)
            or not whole.startswith(window_text)
        ):
            return self.decode([*(int(i) for i in ids), *more])
        return text + whole[len(window_text) :]

    def decode_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Return what `ids` spell after the tokens `before` them; some decoders look back."""
        text_before = self.decode(before)
        whole = self.decode([*before, *ids])
        if (
            not text_before
            or text_before.endswith(_REPLACEMENT)
            or not whole.startswith(text_before)
        ):
            return self.decode(ids)
        return whole[len(text_before) :]

    def single_token(self, text: str) -> int | None:
        """Return the id of `text` when it is one token that nothing can split, else None."""
        ids = self.encode(text, trusted=True).ids
        return ids[0] if len(ids) == 1 and self.decode(ids) == text else None

    def spells_special(self, text: str) -> bool:
        """Return whether the text contains the spelling of a special token."""
        return self._special.search(text) is not None

    def special_spans(self, text: str) -> tuple[tuple[int, int], ...]:
        """Return where the text spells special tokens, as half-open ranges of characters."""
        return tuple(match.span() for match in self._special.finditer(text))

    def added_texts(self, text: str) -> tuple[str, ...]:
        """Return the added tokens that the text spells, in order: special ones and others."""
        return tuple(self._added.findall(text))

    def is_special(self, token_id: int) -> bool:
        """Return whether the id is a special token's."""
        return token_id in self._special_ids


class RunningText:
    """Decodes a stream of tokens to whole characters; each token costs the same.

    "世" in three tokens: add([228]) == "", add([184]) == "", add([150]) == "世".
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The tokens decoded last, for decoders that look back, and those still to be decoded.
        self._emitted: list[int] = []
        self._waiting: list[int] = []

    def add(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens add; empty while bytes of a character are missing."""
        self._waiting.extend(token_ids)
        if not self._waiting or not self._ends_whole():
            return ""
        emitted = self._tokenizer.decode(self._emitted)
        text = self._tokenizer.decode(self._emitted + self._waiting)
        if text.endswith(_REPLACEMENT):
            return ""
        if not text.startswith(emitted):  # the new bytes changed a character that is out
            emitted, text = "", self._tokenizer.decode(self._waiting)
        self._emitted, self._waiting = self._waiting, []
        return text[len(emitted) :]

    def rest(self) -> str:
        """Return the text of the tokens that still wait, broken characters as replacements."""
        emitted = self._tokenizer.decode(self._emitted)
        text = self._tokenizer.decode(self._emitted + self._waiting)
        if not text.startswith(emitted):
            emitted, text = "", self._tokenizer.decode(self._waiting)
        self._emitted, self._waiting = self._waiting, []
        return text[len(emitted) :]

    def _ends_whole(self) -> bool:
        """Return whether the last character is complete, judged by the last tokens alone."""
        last = -_MAX_TOKENS_PER_CHARACTER
        recent = (self._emitted[last:] + self._waiting[last:])[last:]
        return any(
            not self._tokenizer.decode(recent[start:]).endswith(_REPLACEMENT)
            for start in range(len(recent))
        )
