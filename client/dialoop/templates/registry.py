"""Chat templates by name, and which one renders for a tokenizer.

registry = TemplateRegistry()
registry.add_chat_template("zephyr", source, model_family_keywords=["zephyr"])
registry.choose(tokenizer)      # the tokenizer's own, else one of its family, else chatml
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING

from dialoop.errors import AlreadyExists, CapacityExhausted, InvalidConfig, InvalidInput, NotFound
from dialoop.reasons import Reason
from dialoop.templates.chat_template import ChatTemplate, digest_of
from dialoop.templates.declared_parser import TemplateParser
from dialoop.templates.parsing import CHATML, DEEPSEEK, FALCON, LLAMA, QWEN, FunctionParser

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dialoop.templates.confinement import TemplateConfinement
    from dialoop.templates.parsing import Parser, ParserFunction
    from dialoop.tokens.tokenizer import Tokenizer

_PARSERS: Mapping[str, Parser | None] = {
    "chatml": CHATML,
    "deepseek": DEEPSEEK,
    "dialogpt": None,  # it writes no roles and no openings: nothing can read it back
    "falcon": FALCON,
    "llama": LLAMA,
    "qwen": QWEN,
}
# In this order: a deepseek distilled into a qwen speaks deepseek's format.
_FAMILIES = ("deepseek", "qwen", "dialogpt", "falcon", "llama")
_FALLBACK = "chatml"
_ALIASES = {"chatml_format": "chatml"}
"""Older names of the named templates."""
MAX_SOURCE = 1 << 18
"""Longest source of a template, in characters."""
MAX_TEMPLATES = 1000
"""Most templates that one registry takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInfo:
    """A registered template: `invertible` says whether what it renders can be read back."""

    name: str
    digest: str
    version: int
    invertible: bool
    is_default: bool = False
    model_family_keywords: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    template: ChatTemplate
    parser: Parser | None
    keywords: tuple[str, ...]
    version: int


@lru_cache(maxsize=16)
def named_template(name: str) -> ChatTemplate:
    """Return a template that comes with Dialoop; NotFound (TEMPLATE_NOT_FOUND) for other names."""
    if name not in _PARSERS:
        raise _not_found(name, _PARSERS)
    file = resources.files("dialoop.templates") / "named" / f"{name}.jinja"
    return ChatTemplate(file.read_text("utf-8"), name=name, parser=_PARSERS[name])


class TemplateRegistry:
    """The named templates and those added to this object; names never change silently.

    confinement: where templates that are added compile, render and read back, because nobody trusts
    them. Their methods then block the calling thread for up to its limit. None means this process.
    """

    def __init__(self, confinement: TemplateConfinement | None = None) -> None:
        self._confinement = confinement
        self._entries: dict[str, _Entry] = {}

    def is_confined(self, name: str) -> bool:
        """Return whether the template of this name blocks its thread while it renders."""
        return self._confinement is not None and _ALIASES.get(name, name) in self._entries

    def add_chat_template(
        self,
        name: str,
        template: str,
        parser: Parser | ParserFunction | None = None,
        model_family_keywords: Iterable[str] = (),
        *,
        replace: bool = False,
    ) -> TemplateInfo:
        """Add a template; the same again changes nothing.

        parser: reads the rendered text back, before any built-in parser. model_family_keywords:
        the template is chosen for tokenizers without one whose name contains any of these, in any
        case.

        Raises InvalidInput (TEMPLATE_INVALID; TEMPLATE_LIMIT where it is confined and too
        expensive), CapacityExhausted (CAPACITY), AlreadyExists (TEMPLATE_CONFLICT) for other
        content under the name unless `replace`, which makes it the name's next version.
        """
        name = _ALIASES.get(name, name)
        _require_name_and_size(name, template)
        reader, keywords = self._reader(parser), tuple(model_family_keywords)
        existing = self._entries.get(name) or _builtin_entry(name)
        if existing is not None:
            old = (existing.template.digest, existing.parser, existing.keywords)
            if (digest_of(template), reader, keywords) == old:
                return self.info(name)
            if not replace:
                raise AlreadyExists(
                    f"The template '{name}' is registered with other content.",
                    reason=Reason.TEMPLATE_CONFLICT,
                    remedy="Choose another name, or register with replace.",
                )
        if len(self._entries) >= MAX_TEMPLATES and name not in self._entries:
            raise CapacityExhausted(
                f"There are {MAX_TEMPLATES} templates already.",
                remedy="Replace one of them, or start the service anew.",
            )
        self._entries[name] = _Entry(
            template=self._compile(name, template, reader),
            parser=reader,
            keywords=keywords,
            version=1 if existing is None else existing.version + 1,
        )
        return self.info(name)

    def require_compilable(self, pattern: str) -> None:
        """Raise InvalidInput (TEMPLATE_INVALID; TEMPLATE_LIMIT) for a pattern of a parser.

        To compile one can take minutes, so it is tried where templates are confined.
        """
        if self._confinement is not None:
            self._confinement.require_compilable(pattern)

    def _reader(self, parser: Parser | ParserFunction | None) -> Parser | None:
        if parser is None or not hasattr(parser, "parse"):
            return None if parser is None else FunctionParser(function=parser)
        if self._confinement is not None and isinstance(parser, TemplateParser):
            return self._confinement.parser(parser)
        return parser

    def _compile(self, name: str, source: str, parser: Parser | None) -> ChatTemplate:
        """Return the template; InvalidInput (TEMPLATE_INVALID, TEMPLATE_LIMIT)."""
        try:
            if self._confinement is None:
                template = ChatTemplate(source, name=name, parser=parser)
            else:
                self._confinement.require_renderable(source)
                renderer = self._confinement.renderer
                template = ChatTemplate(source, name=name, parser=parser, make_renderer=renderer)
        except InvalidConfig as error:
            raise _invalid(error.message) from None
        if not template.has_generation_blocks:
            raise _invalid(
                "The template has no {% generation %}...{% endgeneration %} around what the "
                "assistant writes."
            )
        return template

    def get(self, name: str) -> ChatTemplate:
        """Return the template of this name; raise NotFound (TEMPLATE_NOT_FOUND) without one."""
        return self._entry(name).template

    def info(self, name: str) -> TemplateInfo:
        """Describe a template; raise NotFound (TEMPLATE_NOT_FOUND) where there is none."""
        entry = self._entry(name)
        return TemplateInfo(
            name=entry.template.name,
            digest=entry.template.digest,
            version=entry.version,
            invertible=entry.template.parser is not None,
            model_family_keywords=entry.keywords,
        )

    def list(self) -> tuple[TemplateInfo, ...]:
        """Return all templates, by name."""
        return tuple(self.info(name) for name in sorted(self._entries.keys() | _PARSERS.keys()))

    def choose(
        self,
        tokenizer: Tokenizer | None,
        *,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
    ) -> ChatTemplate:
        """Choose the template that renders and parses, with the tokenizer's special tokens.

        The source given, else the name given, else the tokenizer's own, else one added for its
        family, else the named one of its family, else chatml. A name is one added, or one of the
        tokenizer's own templates, or one that comes with Dialoop.
        """
        own = {} if tokenizer is None else tokenizer.chat_templates
        if chat_template is not None:  # transformers takes a name here too
            template = ChatTemplate(own.get(chat_template, chat_template))
        elif chat_template_name in own and chat_template_name not in self._entries:
            template = ChatTemplate(own[chat_template_name], name=chat_template_name)
        elif chat_template_name:
            template = self.get(chat_template_name)
        elif tokenizer is None:
            raise InvalidInput(
                "There is neither a tokenizer nor the name of a template.",
                reason=Reason.TEMPLATE_MISSING,
                remedy="Give tokenizer, chat_template or chat_template_name.",
            )
        elif own:
            return ChatTemplate.of(tokenizer)
        else:
            template = self.get(self._family(tokenizer.name))
        return template if tokenizer is None else template.with_special_tokens_of(tokenizer)

    def _family(self, tokenizer_name: str) -> str:
        lowered = tokenizer_name.lower()
        for name, entry in self._entries.items():
            if any(keyword.lower() in lowered for keyword in entry.keywords):
                return name
        if "microsoft/dialo" in lowered:
            return "dialogpt"
        return next((family for family in _FAMILIES if family in lowered), _FALLBACK)

    def _entry(self, name: str) -> _Entry:
        name = _ALIASES.get(name, name)
        entry = self._entries.get(name) or _builtin_entry(name)
        if entry is None:
            raise _not_found(name, self._entries.keys() | _PARSERS.keys())
        return entry


def _builtin_entry(name: str) -> _Entry | None:
    if name not in _PARSERS:
        return None
    template = named_template(name)
    return _Entry(template=template, parser=_PARSERS[name], keywords=(), version=1)


DEFAULT_REGISTRY = TemplateRegistry()
"""The templates of this process, where no registry is given."""


def add_chat_template(
    name: str,
    template: str,
    parser: Parser | ParserFunction | None = None,
    model_family_keywords: Iterable[str] = (),
    *,
    replace: bool = False,
) -> TemplateInfo:
    """Add a template for the whole process, as `TemplateRegistry.add_chat_template` does."""
    return DEFAULT_REGISTRY.add_chat_template(
        name, template, parser, model_family_keywords, replace=replace
    )


def _require_name_and_size(name: str, source: str) -> None:
    if not name or "/" in name or len(name) > 128:
        raise _invalid(f"The name '{name[:40]}' is empty, too long or has a slash.")
    if len(source) > MAX_SOURCE:
        raise _invalid(f"The template has more than {MAX_SOURCE} characters.")


def _invalid(message: str) -> InvalidInput:
    return InvalidInput(
        message, reason=Reason.TEMPLATE_INVALID, remedy="Correct it and register it again."
    )


def _not_found(name: str, names: Iterable[str]) -> NotFound:
    return NotFound(
        f"There is no template '{name}'.",
        reason=Reason.TEMPLATE_NOT_FOUND,
        remedy=f"Choose one of: {', '.join(sorted(names))}; or register it.",
    )
