"""A model directory's tokenizer, through the light `tokenizers` library (no torch)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    import tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Token ids and, for each, the half-open range of characters it spells."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]


class Tokenizer:
    """Text to ids and back. Ids of special tokens come only from text that we trust."""

    def __init__(
        self, trusting: tokenizers.Tokenizer, literal: tokenizers.Tokenizer, config: dict[str, Any]
    ) -> None:
        literal.encode_special_tokens = True
        self._trusting = trusting
        self._literal = literal
        self._config = config
        added = trusting.get_added_tokens_decoder()
        self._special_texts = tuple(t.content for t in added.values() if t.special)
        self._special_ids = frozenset(i for i, t in added.items() if t.special)
        self.digest = hashlib.sha256(trusting.to_str().encode()).hexdigest()[:16]

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json and tokenizer_config.json; InvalidConfig when they are missing."""
        import tokenizers

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InvalidConfig(
                f"The model directory {directory} has no tokenizer.json.",
                reason="TOKENIZER_MISSING",
                remedy="Save the tokenizer there with tokenizer.save_pretrained(directory).",
            )
        config_path = directory / "tokenizer_config.json"
        config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
        template_path = directory / "chat_template.jinja"
        if template_path.is_file():
            config["chat_template"] = template_path.read_text("utf-8")
        text = path.read_text("utf-8")
        return cls(tokenizers.Tokenizer.from_str(text), tokenizers.Tokenizer.from_str(text), config)

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's own chat template, when it has one."""
        template = self._config.get("chat_template")
        if isinstance(template, list):
            template = {item["name"]: item["template"] for item in template}.get("default")
        return template

    def special_token(self, name: str) -> str | None:
        """The text of bos_token, eos_token, pad_token or unk_token."""
        token = self._config.get(name)
        return token["content"] if isinstance(token, dict) else token

    @property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """Ids that end a message: the tokenizer's eos_token."""
        eos = self.special_token("eos_token")
        number = None if eos is None else self._trusting.token_to_id(eos)
        return () if number is None else (number,)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._trusting.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, trusted: bool = False) -> Encoded:
        """Ids without an automatic BOS. Untrusted text cannot spell a special token."""
        engine = self._trusting if trusted else self._literal
        encoding = engine.encode(text, add_special_tokens=False)
        return Encoded(ids=tuple(encoding.ids), offsets=tuple(encoding.offsets))

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens kept; invalid UTF-8 becomes replacement characters."""
        return self._trusting.decode(list(ids), skip_special_tokens=False)

    def single_token(self, text: str) -> int | None:
        """The id of `text` when it is one token that nothing can split, else None."""
        ids = self.encode(text, trusted=True).ids
        return ids[0] if len(ids) == 1 and self.decode(ids) == text else None

    def spells_special(self, text: str) -> bool:
        """Whether the text contains the spelling of a special token."""
        return any(special in text for special in self._special_texts)

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a special token's."""
        return token_id in self._special_ids
