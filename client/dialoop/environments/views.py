"""Text and tokens mode: the running text or tokens that an environment keeps beside its messages.

As with messages, the next prompt is the previous `full`, followed by what the environment added.
The policy's text or tokens stay as they came; nothing renders or tokenises them again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dialoop.chat import ChatHistory, History
from dialoop.environments.modes import Answered, InputMode, Text, Tokens
from dialoop.errors import InvalidHistory, InvalidInput, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.sequences import ForkCause, PolicyVersion, Sequence, Source, sequence_of
from dialoop.templates.slots import require_shown
from dialoop.tokens.builder import Prompt, TokenBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dialoop.templates.chat_template import ChatTemplate
    from dialoop.tokens.tokenizer import Tokenizer

_CALLER = PolicyVersion(lineage="caller", number=0)
_T = TypeVar("_T", str, tuple[int, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class TextView:
    """The running text; `policy_text` is what the policy sent since the last other message."""

    text: str
    policy_text: str = ""

    @property
    def prompt(self) -> Text:
        """Return the whole text as the next prompt."""
        return Text(prompt=self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensView:
    """The running tokens; `policy_ids` are the policy's since the last other message."""

    sequence: Sequence
    policy_ids: tuple[int, ...] = ()

    @property
    def prompt(self) -> Tokens:
        """Return all tokens as the next prompt."""
        return Tokens(prompt=tuple(self.sequence.token_ids.tolist()))


class TextViewer:
    """Text mode."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, options: Mapping[str, Any]
    ) -> None:
        self._render: Callable[..., str] = partial(template.render, **options)
        self._require_shown: Callable[..., None] = partial(require_shown, template, **options)
        ended = template.ended(tokenizer)
        self._ends = [ended.decode([token]) for token in ended.end_of_turn_ids]

    def open(self, history: History) -> TextView:
        """Render the history with the start of the policy's turn."""
        self._require_shown(history)
        return TextView(text=self._render(history))

    def take_answer(
        self, view: TextView, answered: Answered, history: History
    ) -> tuple[TextView, str, bool]:
        """Add the text unchanged; leave a final end-of-turn marker out of the content."""
        response = text_response(view, answered)
        policy_text = view.policy_text + response
        end = next(filter(policy_text.endswith, self._ends), "")
        content = policy_text.removesuffix(end)
        return replace(view, text=view.text + response, policy_text=policy_text), content, True

    def follow(self, view: TextView, history: History, covered: int) -> TextView:
        """Render only what follows; PROMPT_NOT_PREFIX when the template changes the past."""
        content = history[covered - 1].text
        before = self._render(history[: covered - 1]) + content
        through = self._render(history[:covered], add_generation_prompt=False)
        whole = self._render(history)
        self._require_shown(history, start=covered)
        ended = view.policy_text[len(content) :]
        closing = through.removeprefix(before)
        kept = through.startswith(before) and whole.startswith(through)
        if not kept or not closing.startswith(ended):
            raise _not_prefix()
        return TextView(text=view.text + closing[len(ended) :] + whole[len(through) :])


class TokensViewer:
    """Tokens mode."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, options: Mapping[str, Any]
    ) -> None:
        self._builder = TokenBuilder(tokenizer, template)
        self._tokenizer = self._builder.tokenizer
        self._options = options

    def open(self, history: History) -> TokensView:
        """Return the ids of the opening."""
        return TokensView(sequence=self._builder.prompt(history, options=self._options).sequence)

    def take_answer(
        self, view: TokensView, answered: Answered, history: History
    ) -> tuple[TokensView, str, bool]:
        """Add the ids unchanged; decode the content without a final end-of-turn token."""
        if not isinstance(answered, Tokens):
            raise _wrong_view(answered, InputMode.TOKENS)
        now = tuple(view.sequence.token_ids.tolist())
        response = _response(now, answered.prompt, answered.response, answered.full)
        self._require_known(response)
        policy_ids = view.policy_ids + response
        turns = [s.turn for s in view.sequence.segments if s.source is Source.MODEL]
        prompt = Prompt(
            history=history,
            sequence=view.sequence,
            appended=sequence_of(()),
            turn=max(turns, default=-1) + 1,
        )
        added = self._builder.answer(prompt, response, versions=[(len(response), _CALLER)])
        sequence = view.sequence.extended_by(added.appended)
        ends = bool(policy_ids) and policy_ids[-1] in self._tokenizer.end_of_turn_ids
        content = self._tokenizer.decode(policy_ids[:-1] if ends else policy_ids)
        return TokensView(sequence=sequence, policy_ids=policy_ids), content, ends

    def follow(self, view: TokensView, history: History, covered: int) -> TokensView:
        """Tokenise only what follows; PROMPT_NOT_PREFIX when the template changes the past."""
        prompt = self._builder.prompt(
            history,
            context=view.sequence,
            num_context_messages=covered,
            options=self._options,
        )
        if prompt.sequence.fork_cause is not ForkCause.NONE:
            raise _not_prefix()
        return TokensView(sequence=prompt.sequence)

    def _require_known(self, ids: tuple[int, ...]) -> None:
        size = self._tokenizer.vocab_size
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:
            raise InvalidInput(
                f"Token id {wrong} is outside this tokenizer's vocabulary of {size}.",
                reason=Reason.TOKEN_OUT_OF_RANGE,
                remedy="Send ids from the environment's own tokenizer.",
            )


def viewer_of(
    mode: InputMode,
    tokenizer: Tokenizer,
    template_kwargs: Mapping[str, Any],
    chat_template: str | None = None,
) -> TextViewer | TokensViewer | None:
    """Return the viewer of a mode; None for messages, which need none."""
    if mode is InputMode.HISTORY:
        return None
    from dialoop.templates.chat_template import ChatTemplate

    template = (
        ChatTemplate.of(tokenizer)
        if chat_template is None
        else ChatTemplate(chat_template).with_special_tokens_of(tokenizer)
    )
    kind = TextViewer if mode is InputMode.TEXT else TokensViewer
    return kind(tokenizer, template, template_kwargs)


def text_response(view: TextView, answered: Answered) -> str:
    """Return what the policy added to the text; InvalidHistory for messages or token ids."""
    if not isinstance(answered, Text):
        raise _wrong_view(answered, InputMode.TEXT)
    return _response(view.text, answered.prompt, answered.response, answered.full)


def _response(now: _T, prompt: _T | None, response: _T | None, full: _T | None) -> _T:
    """Return the policy's part; raise unless what was sent begins with the episode's prompt."""
    if full is None and response is None:
        raise InvalidHistory(
            "`full` and `response` are both missing.",
            reason=Reason.FULL_MISSING,
            remedy="Send `response`, or `prompt` and `full`.",
        )
    before = now if full is None else full[: len(now)]
    if before != now or prompt not in (None, now):
        raise PreconditionFailed(
            "`prompt` or `full` does not begin with the prompt of this episode.",
            reason=Reason.HISTORY_REWRITTEN,
            remedy="Send the prompt unchanged, or `response` alone; GetSession shows the prompt.",
        )
    part = full[len(now) :] if full is not None else response
    if response not in (None, part):
        raise InvalidHistory(
            "`response` is not what follows the prompt in `full`.",
            reason=Reason.FULL_NOT_PROMPT_AND_RESPONSE,
            remedy="Send `response` alone.",
        )
    if not part:
        raise InvalidHistory(
            "The response is empty.",
            reason=Reason.RESPONSE_MISSING,
            remedy="Send what the policy sampled.",
        )
    return part


def _wrong_view(answered: Answered, mode: InputMode) -> InvalidHistory:
    sent = {ChatHistory: "history", Text: "text", Tokens: "tokens"}[type(answered)]
    return InvalidHistory(
        f"The environment reads {mode.name.lower()}, but the request has {sent}.",
        reason=Reason.WRONG_MODE,
        remedy=f"Send the field `{mode.name.lower()}`.",
    )


def _not_prefix() -> PreconditionFailed:
    return PreconditionFailed(
        "The chat template renders earlier messages differently when later ones follow.",
        reason=Reason.PROMPT_NOT_PREFIX,
        remedy="Use history mode, or a template that does not change earlier messages.",
    )
