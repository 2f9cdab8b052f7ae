"""Text and tokens mode: what an environment keeps besides its messages.

The law is that of messages: the next prompt is the previous full, followed by what the environment
added. What the policy sent is kept as it came and never rendered or tokenised again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from dialoop.chat import ChatHistory, History
from dialoop.environments.modes import Answered, InputMode, Text, Tokens
from dialoop.errors import InvalidHistory, InvalidInput, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.sequences import ForkCause, PolicyVersion, Sequence, Source, sequence_of
from dialoop.tokens.builder import Prompt, TokenBuilder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop.templates.chat_template import ChatTemplate
    from dialoop.tokens.tokenizer import Tokenizer

_CALLER = PolicyVersion(lineage="caller", number=0)
_T = TypeVar("_T", str, tuple[int, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class TextView:
    """The running text, and what the policy has said since anybody else spoke."""

    text: str
    said: str = ""

    @property
    def prompt(self) -> Text:
        """All of it."""
        return Text(prompt=self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensView:
    """The running tokens with their segments."""

    sequence: Sequence
    said: tuple[int, ...] = ()

    @property
    def prompt(self) -> Tokens:
        """All of them."""
        return Tokens(prompt=tuple(self.sequence.token_ids.tolist()))


View = TextView | TokensView


class Viewer(Protocol):
    """Keeps one kind of view in step with the messages."""

    def opened(self, history: History) -> View:
        """The opening, ready for the policy to go on."""
        ...

    def answered(self, view: Any, answered: Answered, history: History) -> tuple[View, str, bool]:
        """The view with the policy's part, its running message's content, and whether it ended.

        `history` is what stands before that message.
        """
        ...

    def followed(self, view: Any, history: History, covered: int) -> View:
        """The view with the messages after the first `covered`, the last of them the policy's."""
        ...


class TextViewer:
    """Text mode."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._template = template
        self._end = tokenizer.special_token("eos_token") or ""

    def opened(self, history: History) -> TextView:
        """Rendered with the opening of the policy's turn."""
        return TextView(text=self._template.render(history))

    def answered(
        self, view: TextView, answered: Answered, history: History
    ) -> tuple[TextView, str, bool]:
        """Text as it came; only a final end-of-turn marker is left out of the content."""
        if not isinstance(answered, Text):
            raise _wrong_view(answered, InputMode.TEXT)
        response = _response(view.text, answered.prompt, answered.response, answered.full)
        said = view.said + response
        content = said.removesuffix(self._end) if self._end else said
        return replace(view, text=view.text + response, said=said), content, True

    def followed(self, view: TextView, history: History, covered: int) -> TextView:
        """Only what follows is rendered; PROMPT_NOT_PREFIX where the template rewrites the past."""
        content = history[covered - 1].text
        before = self._template.render(history[: covered - 1]) + content
        through = self._template.render(history[:covered], add_generation_prompt=False)
        whole = self._template.render(history)
        ended = view.said[len(content) :]
        closing = through.removeprefix(before)
        kept = through.startswith(before) and whole.startswith(through)
        if not kept or not closing.startswith(ended):
            raise _not_prefix()
        return TextView(text=view.text + closing[len(ended) :] + whole[len(through) :])


class TokensViewer:
    """Tokens mode."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._builder = TokenBuilder(tokenizer, template)

    def opened(self, history: History) -> TokensView:
        """The ids of the opening."""
        return TokensView(sequence=self._builder.prompt(history).sequence)

    def answered(
        self, view: TokensView, answered: Answered, history: History
    ) -> tuple[TokensView, str, bool]:
        """Ids as they came; the content is what they spell, without a final end-of-turn token."""
        if not isinstance(answered, Tokens):
            raise _wrong_view(answered, InputMode.TOKENS)
        now = tuple(view.sequence.token_ids.tolist())
        response = _response(now, answered.prompt, answered.response, answered.full)
        self._require_known(response)
        said = view.said + response
        turns = [s.turn for s in view.sequence.segments if s.source is Source.MODEL]
        prompt = Prompt(
            history=history,
            sequence=view.sequence,
            appended=sequence_of(()),
            turn=max(turns, default=-1) + 1,
        )
        added = self._builder.answer(prompt, response, versions=[(len(response), _CALLER)])
        sequence = view.sequence.extended_by(added.appended)
        ends = bool(said) and said[-1] in self._tokenizer.end_of_turn_ids
        content = self._tokenizer.decode(said[:-1] if ends else said)
        return TokensView(sequence=sequence, said=said), content, ends

    def followed(self, view: TokensView, history: History, covered: int) -> TokensView:
        """Only what follows is tokenised; PROMPT_NOT_PREFIX where the template forks."""
        prompt = self._builder.prompt(history, context=view.sequence, num_context_messages=covered)
        if prompt.sequence.fork_cause is not ForkCause.NONE:
            raise _not_prefix()
        return TokensView(sequence=prompt.sequence)

    def _require_known(self, ids: tuple[int, ...]) -> None:
        size = self._tokenizer.vocab_size
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:
            raise InvalidInput(
                f"Token id {wrong} is not one of the {size} of this tokenizer.",
                reason=Reason.TOKEN_OUT_OF_RANGE,
                remedy="Send ids of the environment's own tokenizer.",
            )


class _WithOptions:
    """A template with options that are given each time."""

    def __init__(self, template: ChatTemplate, options: Mapping[str, Any]) -> None:
        self._template = template
        self._options = dict(options)
        self.digest = template.digest

    def render(
        self, history: History, *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        return self._template.render(
            history, add_generation_prompt=add_generation_prompt, **{**self._options, **options}
        )


def viewer_of(
    mode: InputMode, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any]
) -> Viewer | None:
    """The viewer of a mode; None for messages, which need none."""
    if mode is InputMode.HISTORY:
        return None
    from dialoop.templates.chat_template import ChatTemplate

    template = ChatTemplate.of(tokenizer)
    if template_kwargs:
        template = cast(ChatTemplate, _WithOptions(template, template_kwargs))
    kind = TextViewer if mode is InputMode.TEXT else TokensViewer
    return kind(tokenizer, template)


def _response(now: _T, prompt: _T | None, response: _T | None, full: _T | None) -> _T:
    """The policy's part, when what was sent begins with what the episode stands at."""
    if full is None and response is None:
        raise InvalidHistory(
            "full is missing.",
            reason=Reason.FULL_MISSING,
            remedy="Send response, or prompt and full.",
        )
    before = full[: len(now)] if full is not None else prompt
    if before is not None and before != now:
        raise PreconditionFailed(
            "What was sent does not begin with the prompt of this episode.",
            reason=Reason.HISTORY_REWRITTEN,
            remedy="Send the prompt unchanged, or response alone.",
        )
    found = full[len(now) :] if full is not None else response
    if not found:
        raise InvalidHistory(
            "The response is empty.",
            reason=Reason.RESPONSE_MISSING,
            remedy="Send what was sampled.",
        )
    return found


def _wrong_view(answered: Answered, mode: InputMode) -> InvalidHistory:
    sent = {ChatHistory: "history", Text: "text", Tokens: "tokens"}[type(answered)]
    return InvalidHistory(
        f"The environment reads {mode.name.lower()} and was sent {sent}.",
        reason=Reason.WRONG_MODE,
        remedy=f"Send the field `{mode.name.lower()}`.",
    )


def _not_prefix() -> PreconditionFailed:
    return PreconditionFailed(
        "The chat template renders earlier messages otherwise once later ones follow.",
        reason=Reason.PROMPT_NOT_PREFIX,
        remedy="Use history mode, or a template that keeps the past as it is.",
    )
