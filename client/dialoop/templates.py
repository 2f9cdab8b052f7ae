"""Chat templates: a conversation as the text a model was trained to read.

    template = ChatTemplate.of(tokenizer)
    template.render(history)          # with the opening of the assistant's turn

Who wrote which token is `dialoop.token_builder`'s part.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dialoop.errors import InvalidConfig, InvalidInput, Unsupported

if TYPE_CHECKING:
    from jinja2.parser import Parser

    from dialoop.chat import History
    from dialoop.tokenizer import Tokenizer


class _GenerationBlock(Extension):
    """Accept `{% generation %}...{% endgeneration %}`, which marks what an assistant wrote."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own contract)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Keep the body and drop the tags: masks come from the segment table."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise InvalidInput(
        f"The chat template refuses this conversation: {message}",
        reason="TEMPLATE_REFUSED",
        remedy="Use the roles and order of messages the model's template knows.",
    )


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class ChatTemplate:
    """A Jinja chat template, rendered as transformers renders it."""

    def __init__(self, source: str, *, special_tokens: dict[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidConfig(
                f"The chat template does not parse: line {error.lineno}: {error.message}.",
                remedy="Mend the template.",
            ) from None
        self._special_tokens = special_tokens or {}
        self.digest = hashlib.sha256(source.encode()).hexdigest()[:16]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The tokenizer's own template; InvalidConfig when it has none."""
        source = tokenizer.chat_template
        if source is None:
            raise InvalidConfig(
                "The tokenizer has no chat template.",
                reason="TEMPLATE_MISSING",
                remedy="Add chat_template to tokenizer_config.json, or chat_template.jinja.",
            )
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        found = {name: tokenizer.special_token(name) for name in names}
        return cls(source, special_tokens={k: v for k, v in found.items() if v is not None})

    def render(
        self, history: History, *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """The conversation as text; with the opening of the assistant's turn by default."""
        for message in history:
            if not isinstance(message.content, str):
                raise Unsupported(
                    f"The {message.role} message has content parts.",
                    reason="PARTS_UNSUPPORTED",
                    remedy="Send content as text: this renderer has no multimodal processor.",
                )
        return self._template.render(
            messages=history.to_chats(),
            add_generation_prompt=add_generation_prompt,
            **({"tools": None} | self._special_tokens | options),
        )
