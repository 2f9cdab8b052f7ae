"""From a request's history to prompt ids, and from sampled ids to the answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as AnySequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from dialoop.answers import AnswerForm, grammar_of
from dialoop.chat import ChatHistory, History, ToolDefinition
from dialoop.episode import ContinuedText, Sample
from dialoop.errors import CapacityExhausted, InvalidInput, Unsupported
from dialoop.reasons import Reason
from dialoop.sequences import ForkCause, Segment, Sequence, Source, sequence_of
from dialoop.templates.chat_template import ChatTemplate
from dialoop.templates.confinement import TemplateConfinement
from dialoop.templates.registry import TemplateRegistry
from dialoop.tokens.builder import Prompt, TokenBuilder
from dialoop.tokens.tokenizer import LONG_TEXT, Tokenizer
from dialoop.trajectory import SamplingParams, StopReason

from dialoop_services.inference.answer_ends import watch_for
from dialoop_services.inference.engine import Sampled, StopTokens

_T = TypeVar("_T")
_NUM_FOREIGN_THREADS = 2
_MAX_FOREIGN_CALLS = 32
_SEPARATOR = "\0"
"""Between the texts of tokens; hardly a stop string."""
_THINK = ("<think>", "</think>")
_NUM_LOOKED_AT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A generate request in domain types; exactly one of history, text and token_ids is set."""

    history: History | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    context: Sequence | None = None
    num_context_messages: int = 0
    # Indices of messages that the policy sampled, although the caller may write them otherwise.
    known_sampled: tuple[int, ...] = ()
    turn: int = 0
    template_name: str = ""
    tools: tuple[ToolDefinition | Mapping[str, Any], ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    truncate_prompt: bool = False
    skip_special_tokens: bool = False
    # Put before a text what the tokenizer puts there, mostly a BOS, unless it begins so.
    add_special_tokens: bool = True
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009  (frozen)
    num_samples: int = 1
    # What another replica sampled of the answer.
    partial_answer: Sequence | None = None

    @property
    def num_characters(self) -> int:
        """Return the length of the text that has to be encoded."""
        added = (self.history or ())[self.num_context_messages :]
        return len(self.text or "") + sum(len(message.text) for message in added)

    @property
    def is_long(self) -> bool:
        """Return whether encoding the text takes so long that others should go on meanwhile."""
        return self.num_characters > LONG_TEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPrompt:
    """Text or token ids to continue as they stand: one PROMPT segment.

    `text` is the request's own. It is None where the request gave ids, which may not be valid.
    """

    sequence: Sequence
    text: str | None
    turn: int
    num_truncated_tokens: int = 0
    skip_special_tokens: bool = False


@lru_cache(maxsize=64)
def _form_of(template: ChatTemplate) -> AnswerForm:
    """Return the form of answers as the template writes them, or as its source names the marks."""
    profile, source = template.profile, template.source
    reasoning = profile.reasoning or (_THINK if any(mark in source for mark in _THINK) else None)
    return AnswerForm(reasoning=reasoning, calls=grammar_of(profile.written_call))


class Renderer:
    """Turns messages into tokens and tokens into messages; nothing else in this service does."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        templates: TemplateRegistry | None = None,
    ) -> None:
        self.template = template
        self.templates = templates or TemplateRegistry(TemplateConfinement())
        self.num_forks: Counter[str] = Counter()
        """Prompts that could not continue the tokens given with them, by cause."""
        self._builder = TokenBuilder(tokenizer, template)
        self.tokenizer = self._builder.tokenizer
        self._foreign = ThreadPoolExecutor(_NUM_FOREIGN_THREADS, "foreign-template")
        self._num_foreign_calls = 0
        self._vocabulary = ""
        self._is_part_of_another = lru_cache(maxsize=256)(self._search_vocabulary)

    @classmethod
    def of(cls, model_dir: Path) -> Renderer:
        """Return the renderer of a model directory; InvalidConfig when its tokenizer is missing."""
        tokenizer = Tokenizer.from_directory(model_dir)
        templates = TemplateRegistry(TemplateConfinement())
        return cls(tokenizer, templates.choose(tokenizer), templates)

    def prompt(
        self, request: GenerationRequest, *, room: int = 0, max_model_len: int = 0
    ) -> Prompt | RawPrompt:
        """Return the tokens to continue.

        Where `truncate_prompt` is set, a raw prompt that fills `max_model_len` loses its oldest
        tokens until `room` new ones fit. At least half of the context stays. Otherwise a text that
        so many tokens cannot spell is refused before it is encoded: InvalidInput (CONTEXT_FULL).
        """
        if max_model_len and not request.truncate_prompt:
            self.require_may_fit(request, max_model_len)
        if request.history is not None:
            tools = {"tools": request.tools} if request.tools else {}
            prompt = self.builder(request.template_name).prompt(
                request.history,
                context=request.context,
                num_context_messages=request.num_context_messages,
                known_sampled=request.known_sampled,
                turn=request.turn,
                options=_without_tools(request.template_options) | tools,
            )
            if prompt.fork_cause is not ForkCause.NONE:
                self.num_forks[prompt.fork_cause.name.lower()] += 1
            return prompt
        ids = list(request.token_ids or ())
        if request.text is not None:
            ids = self.tokenizer.encode_prompt(
                request.text, add_special_tokens=request.add_special_tokens
            )
        num_cut = 0
        if request.truncate_prompt and len(ids) >= max_model_len:
            num_cut = len(ids) - max(max_model_len - room, (max_model_len + 1) // 2)
            ids = ids[num_cut:]
        return RawPrompt(
            sequence=_prompt_row(ids, request.turn),
            text=None if num_cut else request.text,
            turn=request.turn,
            num_truncated_tokens=num_cut,
            skip_special_tokens=request.skip_special_tokens,
        )

    def require_may_fit(self, request: GenerationRequest, max_model_len: int) -> None:
        """Raise InvalidInput (CONTEXT_FULL) for more text than so many tokens can spell."""
        num_characters = request.num_characters
        if not self.may_fit(num_characters, max_model_len):
            raise InvalidInput(
                f"{num_characters} characters do not fit the context of {max_model_len} tokens.",
                reason=Reason.CONTEXT_FULL,
                remedy="Send a shorter text, or start the service with a larger context.",
            )

    def may_fit(self, num_characters: int, max_model_len: int) -> bool:
        """Return whether so many tokens can spell a text of that length."""
        most = self.tokenizer.max_token_chars
        return most is None or num_characters <= most * max_model_len

    def template_named(self, name: str) -> ChatTemplate:
        """Return a template by name, or the default one; NotFound (TEMPLATE_NOT_FOUND)."""
        if name in ("", self.template.name):
            return self.template
        return self.templates.choose(self.tokenizer, chat_template_name=name)

    async def run_with(
        self, template_name: str, work: Callable[[], _T], *, is_long: bool = False
    ) -> _T:
        """Return `work()`, which uses the named template; in a thread where it is long.

        A registered template may take its time, so it does so in a thread. CapacityExhausted
        (CAPACITY) where too many calls wait for one.
        """
        is_own = template_name in ("", self.template.name)
        if not is_own and self.templates.is_confined(template_name):
            return await self.run_foreign(work)
        return await asyncio.to_thread(work) if is_long else work()

    async def run_foreign(self, work: Callable[[], _T]) -> _T:
        """Return `work()`, called in one of the threads for templates that nobody trusts.

        Filled by calls with registered templates, drained by two threads; past 32 calls the next
        one is refused.
        """
        if self._num_foreign_calls >= _MAX_FOREIGN_CALLS:
            raise CapacityExhausted(
                "Too many calls wait for registered templates.",
                remedy="Try again later, or put the template into the model's directory.",
            )
        self._num_foreign_calls += 1
        done = asyncio.get_running_loop().run_in_executor(self._foreign, work)
        done.add_done_callback(self._count_foreign_call)
        return await asyncio.shield(done)

    def _count_foreign_call(self, done: asyncio.Future[Any]) -> None:
        self._num_foreign_calls -= 1
        if not done.cancelled():
            done.exception()  # its caller may have gone

    def builder(self, template_name: str = "") -> TokenBuilder:
        """Return the token builder of a named template, or of the default one."""
        if not template_name:
            return self._builder
        return TokenBuilder(self.tokenizer, self.template_named(template_name))

    def render(self, history: History, *, add_generation_prompt: bool) -> tuple[str, Sequence]:
        """Return the conversation as text and as tokens."""
        text = self.template.render(history, add_generation_prompt=add_generation_prompt)
        sequence = self._builder.prompt(history).sequence
        if add_generation_prompt:
            return text, sequence
        full_text = self.tokenizer.decode(sequence.token_ids.tolist())
        opening_ids = self.tokenizer.encode(full_text[len(text) :], trusted=True).ids
        last = sequence.segments[-1]
        num_left = last.length - len(opening_ids)
        ends_in_opening = tuple(sequence.token_ids[-len(opening_ids) :]) == opening_ids
        if not full_text.startswith(text) or not ends_in_opening:
            raise Unsupported(
                "This template's tokens cannot be split before the assistant's turn.",
                reason=Reason.TEMPLATE_UNSUPPORTED,
                remedy="Ask with add_generation_prompt.",
            )
        segments = (*sequence.segments[:-1], *_shorten(last, num_left))
        return text, Sequence(token_ids=sequence.token_ids[: -len(opening_ids)], segments=segments)

    def form(self, *, template_name: str = "", offers_tools: bool = False) -> AnswerForm:
        """Return the form of this policy's answers; calls are read where tools are offered."""
        template = self.template_named(template_name).for_tools(offers_tools or None)
        return replace(_form_of(template), reads_calls=offers_tools)

    def answer_form(
        self, prompt: Prompt | RawPrompt, *, template_name: str = "", offers_tools: bool = False
    ) -> AnswerForm:
        """Return the form of the answers to a prompt, which may have opened their thought.

        What continues a raw prompt is content alone.
        """
        if isinstance(prompt, RawPrompt):
            return AnswerForm()
        form = self.form(template_name=template_name, offers_tools=offers_tools)
        last = prompt.sequence.token_ids[-_NUM_LOOKED_AT:].tolist()
        opening = self.tokenizer.decode(last).rstrip("\n")
        starts = form.reasoning is not None and opening.endswith(form.reasoning[0])
        return replace(form, starts_in_reasoning=starts)

    async def find_stop_tokens(
        self,
        strings: tuple[str, ...],
        form: AnswerForm | None = None,
        tools: AnySequence[ToolDefinition] = (),
        *,
        in_reasoning: bool = False,
        ends_with_call: bool = False,
        template_name: str = "",
    ) -> StopTokens:
        """Return what ends an answer of this form, as `watch_for` says.

        Where that reads the vocabulary first, it does so in a thread.
        """
        marks = (form and form.reasoning) or ()
        if any(mark in string for string in strings for mark in marks):
            in_reasoning = True  # a stop at a thought's own mark is a stop in thoughts
        may_think = form is not None and form.has_thoughts and not in_reasoning
        if form is not None and (ends_with_call or (strings and may_think)):
            watch = partial(
                watch_for,
                _require_no_empty(strings),
                form,
                self.tokenizer,
                tools,
                in_reasoning=in_reasoning,
                ends_with_call=ends_with_call,
            )
            return replace(self.stop_tokens((), template_name=template_name), watch=watch)
        if strings and not self._vocabulary:
            await asyncio.to_thread(self._read_vocabulary)
        return self.stop_tokens(strings, template_name=template_name)

    def stop_tokens(self, strings: Iterable[str], *, template_name: str = "") -> StopTokens:
        """Return what ends a message: the end of turn, single tokens, and longer strings.

        The first call with strings decodes each token of the vocabulary, 0.3 s for 152,000 tokens.
        """
        ends = self.builder(template_name).tokenizer.end_of_turn_ids
        by_id = dict.fromkeys(ends, "")
        spanning: list[str] = []
        for string in _require_no_empty(strings):
            token = self.tokenizer.single_token(string)
            if token is None or self._is_part_of_another(string, token):
                spanning.append(string)
            else:
                by_id.setdefault(token, string)
        return StopTokens(by_id=by_id, strings=tuple(spanning))

    def _search_vocabulary(self, string: str, token: int) -> bool:
        """Return whether another token's text holds `string`, as two newlines hold one.

        A string with the separator counts as part of another, so it is searched in the text.
        """
        own = self.tokenizer.decode([token]).count(string)
        return _SEPARATOR in string or self._read_vocabulary().count(string) > own

    def _read_vocabulary(self) -> str:
        """Return the texts of all tokens, separated."""
        if not self._vocabulary:
            texts = (self.tokenizer.decode([token]) for token in range(self.tokenizer.vocab_size))
            self._vocabulary = _SEPARATOR.join(texts)
        return self._vocabulary

    def sample(
        self, prompt: Prompt | RawPrompt, sampled: Sampled, *, template_name: str = ""
    ) -> Sample:
        """Return the answer as prompt, response and full history, and its tokens."""
        if isinstance(prompt, RawPrompt):
            return self._raw_sample(prompt, sampled)
        answer = self.builder(template_name).answer(
            prompt,
            sampled.token_ids,
            logprobs=sampled.logprobs,
            versions=[(span.length, span.policy_version) for span in sampled.versions],
            is_complete=sampled.stop_reason is StopReason.STOP,
        )
        return Sample(
            history=ChatHistory(prompt=prompt.history).respond(answer.message),
            sequence=answer.appended,
            stop_reason=sampled.stop_reason,
            stop_string=sampled.stop_string,
            top_logprobs=sampled.top_logprobs,
        )

    def _raw_sample(self, prompt: RawPrompt, sampled: Sampled) -> Sample:
        runs = []
        start = 0
        for span in sampled.versions:
            fields = {"source": Source.MODEL, "turn": prompt.turn}
            ids = sampled.token_ids[start : start + span.length]
            runs.append((ids, fields | {"policy_version": span.policy_version}))
            start += span.length
        decode = self.tokenizer.decode
        if prompt.skip_special_tokens:
            decode = self.tokenizer.decode_plain
        response = decode(sampled.token_ids)
        text = prompt.text
        if text is None:
            text = self.tokenizer.decode(prompt.sequence.token_ids.tolist())
        return Sample(
            history=ChatHistory(),
            text=ContinuedText(prompt=text, response=response),
            sequence=prompt.sequence.extended_by(sequence_of(runs, logprobs=sampled.logprobs)),
            stop_reason=sampled.stop_reason,
            stop_string=sampled.stop_string,
            top_logprobs=sampled.top_logprobs,
        )


async def apart(work: Callable[..., _T], *arguments: Any, size: int) -> _T:
    """Return `work(*arguments)`, in a thread where texts of so many bytes take long to encode."""
    if size <= LONG_TEXT:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


def _require_no_empty(strings: Iterable[str]) -> tuple[str, ...]:
    strings = tuple(strings)
    if "" in strings:
        raise InvalidInput(
            "A stop string is empty.",
            reason=Reason.INVALID_SAMPLING,
            remedy="Leave it out: the end-of-turn token always stops.",
        )
    return strings


def _without_tools(options: Mapping[str, Any]) -> dict[str, Any]:
    if "tools" in options:
        raise InvalidInput(
            "`tools` is not a template option.",
            reason=Reason.OPTION_RESERVED,
            remedy="Send the tools in the request's field `tools`.",
        )
    return dict(options)


def _prompt_row(token_ids: AnySequence[int], turn: int) -> Sequence:
    return sequence_of([(token_ids, {"source": Source.PROMPT, "turn": turn})])


def _shorten(segment: Segment, length: int) -> tuple[Segment, ...]:
    return (replace(segment, length=length),) if length > 0 else ()
