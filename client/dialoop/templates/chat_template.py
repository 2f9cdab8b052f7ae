"""Chat templates: a conversation as the text a model was trained to read.

    template = ChatTemplate.of(tokenizer)
    template.render(history)          # with the opening of the assistant's turn
    template.render_blocks(history)   # and where the template's generation blocks lie

`dialoop.templates.masks` makes tokens and masks of a whole conversation,
`dialoop.templates.registry` holds templates by name, and `dialoop.tokens.builder` knows who wrote
which token of a rollout.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import traceback
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, lru_cache, partial
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from dialoop.errors import (
    DialoopError,
    InvalidConfig,
    InvalidInput,
    PreconditionFailed,
    Unsupported,
)
from dialoop.messages import (
    DEFAULT_FORM,
    Message,
    MessageForm,
    ToolDefinition,
    chat_for_template,
    tool_for_template,
    with_call_ids,
)
from dialoop.reasons import Reason
from dialoop.templates.parsing import Parser, TurnParser, parse_tokens, parser_for
from dialoop.templates.probe import TemplateProfile, probe, turn_ends

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from jinja2.parser import Parser as JinjaParser

    from dialoop.tokens.tokenizer import Tokenizer

    Tools = Iterable[ToolDefinition | Mapping[str, Any]]

Span = tuple[int, int]
"""Half-open range of characters."""

SPECIAL_NAMES = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message"}
    | {"with_mask", "with_offsets", "include_eos"}
)
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Noncharacters: no text that is meant for interchange holds them, and no tokenizer's vocabulary.
_MARKS = ("\ufdd0", "\ufdd1", "\ufdd2")
_DICT_ATTRIBUTES = frozenset(dir(dict))
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
"""A tool like any other, to see whether a template shows it."""
_MAX_LOOKED_AT = 64
"""Messages among which the one that a template cannot render is looked for."""
_UNFINISHED = "\ufdd3unfinished "


_MAX_PROFILES = 256
_PROFILES: dict[tuple[Any, ...], TemplateProfile | DialoopError] = {}
"""What templates do, or why they could not be asked; by digest and special tokens."""


class TextRenderer(Protocol):
    """A compiled template: jinja2's own, or one that renders in another process."""

    def render(self, **variables: Any) -> str:
        """Return the text; raise what jinja2 raises, or an error of our own tree."""


@dataclass(slots=True)
class GenerationBlocks:
    """What one rendering's generation blocks are marked with, and how many there were."""

    mark: str
    count: int = 0


class _GenerationBlock(Extension):
    """Mark what stands in `{% generation %}...{% endgeneration %}`: what an assistant writes."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own contract)

    def parse(self, parser: JinjaParser) -> nodes.Node:
        """Return a call block, so that names set inside stay inside, as with transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark_block"), [], [], body).set_lineno(line)

    @jinja2.pass_context
    def _mark_block(self, context: jinja2.runtime.Context, caller: Callable[[], str]) -> str:
        blocks = context.get("_generation_blocks")
        if not isinstance(blocks, GenerationBlocks):
            return caller()
        blocks.count += 1
        return f"{blocks.mark}{caller()}{blocks.mark}"


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Renders like jinja2's immutable sandbox, but templates with logic about 3 times as fast.

    A template asks for `message.role` and `loop.last` hundreds of times, and jinja2 looks for an
    attribute of the dict first and goes through all its checks for each. None of them applies to a
    key of a plain dict or a public attribute of a loop or a namespace.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute` for a template."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if (kind is LoopContext or kind is Namespace) and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def _raise_exception(message: str) -> None:
    raise InvalidInput(
        f"The chat template refuses this conversation: {message}",
        reason=Reason.TEMPLATE_REFUSED,
        remedy="Use the roles and order of messages the model's template knows.",
    )


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@lru_cache(maxsize=256)
def compile_template(source: str) -> jinja2.Template:
    """Compile a source with the settings and functions that transformers gives to it.

    Raises InvalidConfig (TEMPLATE_INVALID). Compiling and rendering run without limits, so the
    source must be one that the caller trusts.
    """
    environment = TemplateSandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidConfig(
            f"The chat template does not parse: line {error.lineno}: {error.message}.",
            reason=Reason.TEMPLATE_INVALID,
            remedy="Correct the template.",
        ) from None
    except RecursionError:
        raise InvalidConfig(
            "The chat template is nested too deeply.",
            reason=Reason.TEMPLATE_INVALID,
            remedy="Use fewer levels of parentheses and blocks.",
        ) from None


def digest_of(source: str) -> str:
    """Return the digest by which sources are compared."""
    return hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()[:16]


@lru_cache(maxsize=256)
def _read_source(source: str) -> tuple[str, bool]:
    """Return the digest of a source, and whether it has generation blocks."""
    return digest_of(source), _GENERATION.search(source) is not None


class ChatTemplate:
    """A Jinja chat template, rendered as transformers renders it.

    named: sources of further templates of the checkpoint by name; with tools the one named tool_use
    renders.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "",
        parser: Parser | None = None,
        make_renderer: Callable[[str], TextRenderer] = compile_template,
        named: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._make_renderer = make_renderer
        self._template = make_renderer(source)
        self._special_tokens = dict(special_tokens or {})
        self._parser = parser
        self._is_parser_known = parser is not None
        self._understands_parts: dict[str, bool] = {}
        self._profile: TemplateProfile | None = None
        self._shows_tools: bool | None = None
        self.source = source
        self.name = name
        self.digest, self.has_generation_blocks = _read_source(source)
        self._named = dict(named)
        if named:
            self.digest = digest_of(json.dumps([source, sorted(named.items())]))

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        *,
        make_renderer: Callable[[str], TextRenderer] = compile_template,
    ) -> ChatTemplate:
        """Return the tokenizer's own template; raise InvalidConfig where it has none."""
        named = tokenizer.chat_templates
        source = named.pop("default", None)
        if source is None:
            names = ", ".join(sorted(named))
            raise InvalidConfig(
                f"The tokenizer has the chat templates {names}, and none is the default."
                if named
                else "The tokenizer has no chat template.",
                reason=Reason.TEMPLATE_MISSING,
                remedy="Add chat_template to tokenizer_config.json, or chat_template.jinja.",
            )
        template = cls(source, name=tokenizer.name, named=named, make_renderer=make_renderer)
        return template.with_special_tokens_of(tokenizer)

    def for_tools(self, tools: object) -> ChatTemplate:
        """Return what renders with these tools: the template named tool_use, where there is one."""
        return self if tools is None else self._tool_use or self

    @cached_property
    def _tool_use(self) -> ChatTemplate | None:
        source = self._named.get("tool_use")
        if source is None:
            return None
        return ChatTemplate(
            source,
            special_tokens=self._special_tokens,
            name=self.name,
            parser=self._parser,
            make_renderer=self._make_renderer,
        )

    def with_special_tokens_of(self, tokenizer: Tokenizer) -> ChatTemplate:
        """Return this template with the tokenizer's bos_token and so on."""
        tokens = {name: tokenizer.special_token(name) for name in SPECIAL_NAMES}
        return ChatTemplate(
            self.source,
            special_tokens={k: v for k, v in tokens.items() if v is not None},
            name=self.name,
            parser=self._parser,
            make_renderer=self._make_renderer,
            named=self._named,
        )

    @property
    def profile(self) -> TemplateProfile:
        """Return what this template does; the first call asks it."""
        if self._profile is None:
            key = (self.digest, *sorted(self._special_tokens.items()))
            known = _PROFILES.get(key)
            if known is None:
                if len(_PROFILES) >= _MAX_PROFILES:
                    _PROFILES.clear()  # at once, as other threads look here
                try:
                    _PROFILES[key] = known = probe(self)
                except DialoopError as error:  # it takes too long, and would again
                    _PROFILES[key] = known = error
            if isinstance(known, DialoopError):
                raise known.with_traceback(None)
            self._profile = known
        return self._profile

    def ended(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return the tokenizer with the ids that end turns, with tools and without."""
        own = [turn_ends(t.profile, tokenizer).ids for t in (self, self.for_tools(True))]
        return tokenizer.ended_by(tuple(dict.fromkeys(chain.from_iterable(own))))

    @property
    def form(self) -> MessageForm:
        """Return how the template wants to be given messages."""
        return self.profile.form

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Return the texts that the template reads as bos_token, eos_token and so on."""
        return self._special_tokens

    @property
    def parser(self) -> Parser | None:
        """Return what reads the rendered text back: the caller's parser, or a built-in one.

        None when neither is there. Proven means: it read back what this template rendered.
        """
        if not self._is_parser_known:
            render = partial(self.render, add_generation_prompt=False)
            self._parser = parser_for(render, self._special_tokens)
            self._is_parser_known = True
        return self._parser

    def parse(self, text: str, *, keep_default_system: bool = False) -> tuple[Message, ...]:
        """Read a rendered text as messages; PreconditionFailed (NO_PARSER) without a parser.

        keep_default_system: keep the system message that the template writes by itself (Qwen's).
        """
        return self._require_parser(keep_default_system).parse(text, self._special_tokens)

    def parse_tokens(
        self,
        token_ids: Sequence[int],
        tokenizer: Tokenizer,
        *,
        keep_default_system: bool = False,
    ) -> tuple[Message, ...]:
        """Read token ids as messages: only ids of special tokens open and close turns."""
        parser = self._require_parser(keep_default_system)
        return parse_tokens(parser, token_ids, tokenizer, self._special_tokens)

    def _require_parser(self, keep_default_system: bool) -> Parser:
        if keep_default_system and isinstance(self.parser, TurnParser):
            return replace(self.parser, default_system=None)
        if self.parser is None:
            raise PreconditionFailed(
                f"The chat template {self.name} has no parser to read it back.".replace("  ", " "),
                reason=Reason.NO_PARSER,
                remedy="Register the template together with a parser.",
            )
        return self.parser

    def render(
        self,
        history: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Tools | None = None,
        **options: Any,
    ) -> str:
        """Return the conversation as text, by default with the opening of the assistant's turn.

        continue_final_message: leave the last message open, so that the policy continues it.
        options: further variables of the template, such as enable_thinking.
        """
        opens = _opens(add_generation_prompt, continue_final_message)
        template = self.for_tools(tools)
        variables = template._variables(history, tools, options)
        with template._naming_the_culprit(variables, opens):
            if continue_final_message:
                return template._render_unfinished(variables)
            return template._fill(variables, opens)

    def render_blocks(
        self,
        history: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Tools | None = None,
        **options: Any,
    ) -> tuple[str, tuple[Span, ...]]:
        """Return the text, and the spans of the generation blocks that messages filled."""
        if (template := self.for_tools(tools)) is not self:
            return template.render_blocks(
                history,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **options,
            )
        opens = _opens(add_generation_prompt, continue_final_message)
        variables = self._variables(history, tools, options)
        with self._naming_the_culprit(variables, opens):
            if continue_final_message:
                mark = _absent_mark(variables)
                parts = self._render_unfinished(
                    variables | {"_generation_blocks": GenerationBlocks(mark)}
                ).split(mark)
            else:
                parts = self._parts_of_blocks(variables, opens)
        spans = _spans(parts)
        text = "".join(parts)
        if opens and spans and not text[spans[-1][1] :].strip():
            # The last block may belong to the opening, which no message wrote.
            spans = spans[: len(self._parts_of_blocks(variables, opens=False)) // 2]
        return text, spans

    def _parts_of_blocks(self, variables: dict[str, Any], opens: bool) -> list[str]:
        """Cut the text at the ends of its generation blocks, by a mark that is not in it."""
        for mark in _MARKS:
            blocks = GenerationBlocks(mark)
            variables["_generation_blocks"] = blocks
            parts = self._fill(variables, opens).split(mark)
            if len(parts) == 2 * blocks.count + 1:
                return parts
        raise Unsupported(
            "The chat template does not write each generation block exactly once.",
            reason=Reason.MASK_UNAVAILABLE,
            remedy="Ask without a mask, or correct the template.",
        )

    def _variables(
        self, history: Sequence[Message], tools: Tools | None, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        require_variables(options)
        tool_dicts = [tool_for_template(tool) for tool in tools] if tools is not None else None
        self._require_tools_written(history, bool(tool_dicts))
        messages = [self._chat(message) for message in history]
        if any(message.tool_calls for message in history):
            messages = with_call_ids(messages, self.form.call_ids)
        return {"messages": messages, "tools": tool_dicts, **self._special_tokens, **options}

    def _chat(self, message: Message) -> dict[str, Any]:
        is_plain = not message.tool_calls and not message.reasoning
        as_parts = not isinstance(message.content, str) and self._reads_parts(message.role)
        # Most messages look the same in every form, and need no probe.
        return chat_for_template(
            message, DEFAULT_FORM if is_plain else self.form, as_parts=as_parts
        )

    def render_chats(
        self,
        chats: Sequence[Mapping[str, Any]],
        *,
        opens: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return dicts, which the template gets as they are, as text."""
        variables = {"messages": list(chats), "tools": tools, **self._special_tokens}
        return self._fill(variables, opens)

    def _require_tools_written(self, history: Sequence[Message], offers_tools: bool) -> None:
        if offers_tools:
            self.require_tools_shown()
        if any(message.tool_calls for message in history) and "tool_calls" not in self.source:
            raise Unsupported(
                "The conversation has tool calls and the chat template writes none.",
                reason=Reason.TOOLS_UNSUPPORTED,
                remedy="Render with a template that knows tools, such as qwen.",
            )

    def require_tools_shown(self) -> None:
        """Raise Unsupported (TOOLS_UNSUPPORTED) where the template leaves out tools it is given."""
        if self._tool_use is not None:
            self._tool_use.require_tools_shown()
            return
        if self._shows_tools is None:
            self._shows_tools = "tools" in self.source and self._changes_with_tools()
        if not self._shows_tools:
            raise Unsupported(
                "There are tools to show the policy, and the chat template shows none.",
                reason=Reason.TOOLS_UNSUPPORTED,
                remedy="Use a model or a template that knows tools, such as qwen; or describe an "
                "environment's tools in its prompt and set tools_in_prompt = false.",
            )

    def _changes_with_tools(self) -> bool:
        """Return whether a tool changes what is rendered; True where nothing can be rendered."""
        changes = []
        for roles in (("user",), ("system", "user")):
            messages = [{"role": role, "content": "hi"} for role in roles]
            shared = {"messages": messages, **self._special_tokens}
            with contextlib.suppress(DialoopError):
                texts = [self._fill(shared | {"tools": tools}, True) for tools in (None, [_TOOL])]
                changes.append(texts[0] != texts[1])
        return any(changes) or not changes

    def _reads_parts(self, role: str) -> bool:
        """Return whether the template writes the text of a role's content parts, not a list."""
        if role not in self._understands_parts:
            asked: dict[str, Any] = {"role": "user", "content": "hi"}
            parts = [{"type": "text", "text": text} for text in ("9081", "7263")]
            shown = []
            with contextlib.suppress(DialoopError):
                for content in ("90817263", parts):
                    said: dict[str, Any] = {"role": role, "content": content}
                    chats = {"user": [said], "system": [said, asked]}.get(role, [asked, said])
                    shown.append(self.render_chats(chats, opens=False).split())
            # Blanks apart: some templates write each part in a line.
            self._understands_parts[role] = len(shown) == 2 and len(set(map("".join, shown))) == 1
        return self._understands_parts[role]

    def _fill(self, variables: Mapping[str, Any], opens: bool) -> str:
        try:
            return self._template.render(add_generation_prompt=opens, **variables)
        except DialoopError:
            raise  # the template's own raise_exception, or what another process reports
        except _FAILURES as error:
            raise cannot_render(words_of(error)) from error

    @contextlib.contextmanager
    def _naming_the_culprit(self, variables: Mapping[str, Any], opens: bool) -> Iterator[None]:
        try:
            yield
        except CannotRender as error:
            raise cannot_render(error.words, self._culprit(variables, opens)) from error

    def _culprit(self, variables: Mapping[str, Any], opens: bool) -> str:
        """Return the first field without which the template renders; "" if there is none."""
        messages = variables["messages"]

        def renders(field: str, but: int = -1) -> bool:
            """Return whether it renders where no message but this one has the field."""
            shown = [
                message if index == but else _without(message, field)
                for index, message in enumerate(messages)
            ]
            try:
                self._template.render(
                    add_generation_prompt=opens, **(dict(variables) | {"messages": shown})
                )
            except (DialoopError, *_FAILURES):
                return False
            return True

        optional = (field for message in messages for field in message)
        fields = dict.fromkeys(field for field in optional if field not in ("role", "content"))
        for field in (*fields, "content"):
            holders = [index for index, message in enumerate(messages) if field in message]
            if holders and renders(field):
                for index in holders[:_MAX_LOOKED_AT]:
                    if not renders(field, but=index):
                        return f"messages[{index}].{field}"
        return ""

    def _render_unfinished(self, variables: dict[str, Any]) -> str:
        """Return the text up to the end of the last message's content."""
        messages = variables["messages"]
        if not messages:
            raise InvalidInput(
                "There is no final message to continue.", reason=Reason.PROMPT_MISSING
            )
        last = dict(messages[-1])
        if not isinstance(last["content"], str):
            last["content"] = "".join(part["text"] for part in last["content"])
        last["content"] = (last["content"] or "") + _UNFINISHED
        text = self._fill(variables | {"messages": [*messages[:-1], last]}, opens=False)
        position = text.rfind(_UNFINISHED.strip())
        if position < 0:
            raise InvalidInput(
                "The chat template does not write the final message's content.",
                reason=Reason.TEMPLATE_REFUSED,
                remedy="Continue a message whose content the template shows.",
            )
        if text.startswith(_UNFINISHED, position):
            return text[:position]
        return text[:position].rstrip()  # the template trims contents


def ended_as_written(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with the ids that end turns in its own template, if it has one."""
    try:
        return ChatTemplate.of(tokenizer).ended(tokenizer)
    except InvalidConfig:
        return tokenizer


def _without(message: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return a message without a field; it has a content in any case."""
    fewer = {key: value for key, value in message.items() if key != field}
    return {"content": "hi", **fewer}


class CannotRender(InvalidInput):
    """What a template raised while it rendered; `words` are the exception's, and where it was."""

    words: str = ""


def cannot_render(words: str, culprit: str = "") -> CannotRender:
    """Return the error of a template that raised an exception at a message, or one's field."""
    error = CannotRender(
        f"The chat template cannot render {culprit or 'this conversation'}: {words}.",
        reason=Reason.TEMPLATE_REFUSED,
        remedy="Give the roles, fields and options that the template reads.",
    )
    error.words = words
    return error


def words_of(error: Exception) -> str:
    """Return what a template's exception says, and in which line of the template."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == "<template>"
    ]
    said = str(error).strip().rstrip(".") or "it fails without a word"
    return f"line {lines[-1]} of the template: {said}" if lines else said


def require_variables(options: Mapping[str, Any]) -> None:
    """Raise InvalidInput (OPTION_RESERVED) where one is an argument of rendering itself."""
    reserved = sorted(_RESERVED & options.keys())
    if reserved:
        raise InvalidInput(
            f"{reserved[0]} is an argument of rendering, not a template option.",
            reason=Reason.OPTION_RESERVED,
            remedy="Pass it as that argument.",
        )


def _opens(add_generation_prompt: bool | None, continue_final_message: bool) -> bool:
    if add_generation_prompt and continue_final_message:
        raise InvalidInput(
            "add_generation_prompt and continue_final_message are both set.",
            reason=Reason.BAD_OPTIONS,
            remedy="Open a new turn, or continue the last one.",
        )
    return not continue_final_message if add_generation_prompt is None else add_generation_prompt


def _absent_mark(variables: Mapping[str, Any]) -> str:
    contents = json.dumps([variables["messages"], variables["tools"]], ensure_ascii=False)
    for mark in _MARKS:
        if mark not in contents:
            return mark
    raise InvalidInput(
        "The conversation holds the noncharacters U+FDD0, U+FDD1 and U+FDD2.",
        reason=Reason.MASK_UNAVAILABLE,
        remedy="Leave them out: they are not meant for interchange.",
    )


def _spans(parts: list[str]) -> tuple[Span, ...]:
    """Return the odd parts' ranges in the joined text; an unclosed last one is an open turn's."""
    spans: list[Span] = []
    position = 0
    for index, part in enumerate(parts):
        if index % 2:
            spans.append((position, position + len(part)))
        position += len(part)
    return tuple(spans)
