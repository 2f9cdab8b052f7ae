"""How a conversation becomes tokens, one turn at a time.

    builder = TokenBuilder(tokenizer, template)
    prompt = builder.prompt(history)                     # opening: everything is rendered
    answer = builder.answer(prompt, ids, logprobs=logprobs, versions=versions)
    # Of a longer history only the tail is rendered:
    prompt = builder.prompt(longer, context=answer.appended, num_context_messages=2)

The next prompt's ids are always the previous full ids followed by the ids of the added messages.
Where the template does not allow that, a new sequence starts and says why. It keeps the ids up to
where the texts part, as context.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dialoop.answers import GRAMMARS, AnswerForm, grammar_of, read_text
from dialoop.chat import History, Message, ToolCall
from dialoop.errors import InvalidInput, InvalidSequence, Unsupported
from dialoop.reasons import Reason
from dialoop.sequences import ForkCause, PolicyVersion, Sequence, Source, sequence_of
from dialoop.templates.probe import KEPT, turn_ends
from dialoop.templates.slots import Place, Slot, require_plain_tools, require_shown
from dialoop.templates.turns import assistant_turns, hidden_fields, plain_turn
from dialoop.tokens.continuation import Past, continuation, continuation_of_turns
from dialoop.tokens.encoding import tokens_of
from dialoop.tokens.special_tokens import (
    mark_literal_contents,
    only_in_contents,
    pieces_with_literals,
    spells_special,
)
from dialoop.tokens.text_spans import Piece, Render, after, cut, uncut

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping
    from collections.abc import Sequence as AnySequence

    from dialoop.sequences import Ids
    from dialoop.templates.chat_template import ChatTemplate
    from dialoop.templates.turns import AssistantTurn
    from dialoop.tokens.tokenizer import Tokenizer

DEMONSTRATION = PolicyVersion(lineage="demonstration", number=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What to feed the engine, and what of it is new.

    sequence: all tokens (its ids are the engine's prompt). appended: the new ones, which continue
    the given context when `fork_cause` is NONE, else the whole new sequence.
    """

    history: History
    sequence: Sequence
    appended: Sequence
    turn: int

    @property
    def fork_cause(self) -> ForkCause:
        """Return why the tokens do not continue the context's; NONE where they do.

        (`sequence.fork_cause` says why the sequence was started, at this turn or before.)
        """
        return self.appended.fork_cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The message that was sampled, and the new tokens including those of the prompt's tail."""

    message: Message
    appended: Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversation:
    """A conversation, its text, and the function that renders it."""

    history: History
    text: str
    render: Render


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """A conversation up to a message of the assistant, its text, and what of it that wrote."""

    history: History
    text: str
    turn: AssistantTurn
    places: tuple[Place, ...]
    tokenizer: Tokenizer
    options: dict[str, Any]

    @classmethod
    def of(cls, builder: TokenBuilder, history: History, options: dict[str, Any]) -> _Shown:
        """Render the conversation; Unsupported where a part of the last message is not shown."""
        template = builder.template.for_tools(options.get("tools"))
        tokenizer = builder.tokenizer
        _require_no_special_keys(history[-1], tokenizer)
        if template.profile["reasoning"].verdict == KEPT:
            divided = _divide_thought(history[-1], template.form.thought)
            history = history[:-1].append(divided)
        text = template.render(history, add_generation_prompt=False, **options)
        turn = plain_turn(template, tokenizer, history, text, options)
        if turn is None:
            turns = assistant_turns(
                template,
                tokenizer,
                history,
                text,
                only=len(history) - 1,
                add_generation_prompt=False,
                **options,
            )
            turn = next(iter(turns), None)
        hidden = hidden_fields(history[-1], frozenset() if turn is None else turn.fields)
        divided = _divide_thought(history[-1], template.form.thought)
        if hidden and divided.reasoning:
            opened = cls._after_opening(builder, history[:-1].append(divided), options)
            if opened is not None:
                return opened
        if turn is None or hidden:
            raise Unsupported(
                f"The chat template leaves out {' and '.join(hidden) or 'all'} of message "
                f"{len(history) - 1}, which is to be taught.",
                reason=Reason.TEMPLATE_HIDES_ANSWERS,
                remedy="Leave that out of the demonstration, or use a template that shows it.",
            )
        return cls(
            history=history,
            text=text,
            turn=turn,
            places=turn.places,
            tokenizer=tokenizer,
            options=options,
        )

    @classmethod
    def _after_opening(
        cls, builder: TokenBuilder, history: History, options: dict[str, Any]
    ) -> _Shown | None:
        """Return the last message with its thought behind an opening that begins one.

        So the policy writes it, whatever the template shows of the thought later (R1's: nothing).
        """
        message, (start, end) = history[-1], builder.template.form.thought
        opened = builder.template.render(history[:-1], **options)
        if not start or not opened.rstrip().endswith(start):
            return None
        bare = cls.of(builder, history[:-1].append(replace(message, reasoning="")), options)
        if bare.text[: bare.turn.start] != builder.template.profile.opened_thought.sub("", opened):
            return None
        slot = Slot(index=len(history) - 1, field="reasoning", text=message.reasoning)
        thought_end = len(opened) + len(message.reasoning)
        thought = Place(slot=slot, start=len(opened), end=thought_end, is_first=True)
        text = f"{opened}{message.reasoning}\n{end}\n\n{bare.text[bare.turn.start :]}"
        shift = len(text) - len(bare.text)
        moved = (
            replace(place, start=place.start + shift, end=place.end + shift)
            for place in bare.places
            if place.start >= bare.turn.start
        )
        turn = replace(
            bare.turn,
            start=len(opened),
            end=bare.turn.end + shift,
            closed=bare.turn.closed + shift,
        )
        return replace(bare, history=history, text=text, turn=turn, places=(thought, *moved))

    def stopped_at(self, stop: tuple[str, ...]) -> int | None:
        """Return where the sampler would have stopped at the end of what is shown, if it would.

        Blanks that the template writes behind the message are not its own.
        """
        turn = self.turn
        ours = (place.end for place in self.places if turn.start <= place.start < turn.end)
        own = max(ours, default=turn.end)
        ends = (turn.end,) if self.text[own : turn.end].strip() else (turn.end, own)
        return next((end for end in ends if self.text[turn.start : end].endswith(stop)), None)

    def pieces(self, start: int, end: int, source: Source) -> list[Piece]:
        """Cut a range of the text; what messages spell like a special token stays text."""
        pieces: list[Piece] = []
        for place in self.places:
            if place.end <= start or place.start >= end:
                continue
            text = self.text[place.start : place.end]
            if self.tokenizer.spells_special(text):
                pieces.append(Piece(text=self.text[start : place.start], source=source))
                pieces.append(Piece(text=text, source=source, is_literal=True))
                start = place.end
        return [*pieces, Piece(text=self.text[start:end], source=source)]


def _require_no_special_keys(message: Message, tokenizer: Tokenizer) -> None:
    """Raise Unsupported where a name of an argument spells a special token."""
    for call in message.tool_calls:
        if tokenizer.spells_special(call.arguments_json):
            named = re.findall(r'"((?:[^"\\]|\\.)*)"\s*:', call.arguments_json)
            if any(map(tokenizer.spells_special, named)):
                raise Unsupported(
                    f"The name of an argument of {call.name} spells a special token.",
                    reason=Reason.SPECIAL_TOKEN_SPELLED,
                    remedy="Give the argument another name.",
                )


def _divide_thought(message: Message, thought: tuple[str, str]) -> Message:
    """Return the message with the thought apart that its content begins with."""
    start, end = thought
    content = message.text.lstrip()
    if message.reasoning or not (start and content.startswith(start) and end in content):
        return message
    reasoning, _, rest = content.removeprefix(start).partition(end)
    return replace(message, reasoning=reasoning.strip("\n"), content=rest.lstrip("\n"))


class TokenBuilder:
    """Turns conversations into sequences, turn by turn, and never tokenises sampled text again."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        # With tools another template of the checkpoint may render, and end turns otherwise.
        self._ends = [turn_ends(t.profile, tokenizer) for t in (template, template.for_tools(True))]
        self.ends = self._ends[0]
        self.tokenizer = template.ended(tokenizer)
        self.template = template
        self._decoded = _DecodedCache(tokenizer)
        # gpt-oss, Mistral and Gemma 4 show no tool's answer after a call in a content.
        profile = template.for_tools(True).profile
        calls = "" if profile.takes_written_calls else grammar_of(profile.written_call)
        self._parts = AnswerForm(reasoning=profile.reasoning, calls=calls) if calls else None

    def prompt(
        self,
        history: History,
        *,
        context: Sequence | None = None,
        num_context_messages: int = 0,
        turn: int = 0,
        options: Mapping[str, Any] | None = None,
        known_sampled: Iterable[int] = (),
    ) -> Prompt:
        """Return the tokens of `history` and of the opening of the assistant's turn.

        `context` holds the tokens of the first `num_context_messages` messages, of which the last
        is the policy's own; only what follows is tokenised. The messages need not be the
        same objects; they must render to the text that the tokens spell.

        options: the template's, such as `tools`. known_sampled: indices of messages that the caller
        knows to be the sampled ones (by the id of a call, say), although JSON or spaces in them
        may be spelled differently now: the sampled tokens stand for them.

        Raise InvalidInput (TEMPLATE_DROPS_FIELD) where the template leaves a text out. That may be
        one that a context covers and nobody changed: a policy writes what its template does not
        show, and its tokens stand, or a fork says why they do not.
        """
        options = options or {}
        known = frozenset(known_sampled)
        covered = num_context_messages if context is not None else 0
        parts = History(tuple(map(self._in_parts, history[:covered]))).extend(history[covered:])
        made = self._prompt(parts, context, num_context_messages, turn, options, known)
        is_covered = made.fork_cause is not ForkCause.HISTORY_REWRITTEN
        require_shown(self.template, parts, start=covered if is_covered else 0, **options)
        return replace(made, history=history)

    def _prompt(
        self,
        history: History,
        context: Sequence | None,
        num_context_messages: int,
        turn: int,
        options: Mapping[str, Any],
        known_sampled: frozenset[int] = frozenset(),
    ) -> Prompt:
        require_plain_tools(options.get("tools") or (), self.tokenizer)
        render: Render = partial(self.template.render, **options)
        whole = _Conversation(history=history, text=render(history), render=render)
        if context is None:
            sequence = self._tokens(self._cut(whole, 0, "", whole.text, Source.PROMPT), turn)
            return Prompt(history=history, sequence=sequence, appended=sequence, turn=turn)
        if num_context_messages <= 0:
            raise InvalidInput(
                f"num_context_messages is {num_context_messages}.",
                reason=Reason.BAD_CONTEXT,
                remedy="Say how many of the prompt's messages the context's tokens cover.",
            )
        past = self._past(history, context, num_context_messages, known_sampled)
        if past is None:
            return self._fork(whole, context, ForkCause.HISTORY_REWRITTEN, turn)
        follows = continuation(past, whole.text, render, normal=self._normal)
        if isinstance(follows, ForkCause) and self._parts is not None:
            follows = self._follows_turns(past, whole, context, options)
        if isinstance(follows, ForkCause):
            return self._fork(whole, context, follows, turn)
        pieces = self._cut(whole, num_context_messages, past.ending, follows, None)
        added = self._tokens(pieces, turn, follows=context)
        sequence = context.extended_by(added)
        self._decoded.extend(context.token_ids, added.token_ids)
        return Prompt(history=history, sequence=sequence, appended=added, turn=turn)

    def answer(
        self,
        prompt: Prompt,
        token_ids: AnySequence[int],
        *,
        logprobs: AnySequence[float] = (),
        versions: Iterable[tuple[int, PolicyVersion]],
        is_complete: bool = True,
    ) -> Answer:
        """Return the assistant's message and its tokens; `versions` are (length, version) runs.

        The content is the whole text of the sampled tokens, without a final end-of-turn token.
        """
        before = prompt.sequence.token_ids[-_LOOK_BACK:].tolist()
        content, ending = self._content(before, token_ids)
        pieces: list[tuple[AnySequence[int], dict[str, Any]]] = []
        position, char_start = 0, 0
        for length, version in versions:
            end = position + length
            char_end = self._num_chars(before, token_ids[:end], content + ending, len(content))
            fields = {
                "source": Source.MODEL,
                "turn": prompt.turn,
                "message_index": len(prompt.history),
                "char_start": char_start,
                "char_length": char_end - char_start,
                "policy_version": version,
            }
            pieces.append((token_ids[position:end], fields))
            position, char_start = end, char_end
        if position != len(token_ids):
            raise InvalidSequence(
                f"The versions cover {position} tokens and {len(token_ids)} were sampled.",
                reason=Reason.RAGGED,
                remedy="Give the version of every sampled token.",
            )
        sampled = sequence_of(pieces, logprobs=logprobs)
        self._decoded.extend(prompt.sequence.token_ids, sampled.token_ids)
        message = Message(role="assistant", content=content, is_complete=is_complete)
        return Answer(message=message, appended=prompt.appended.extended_by(sampled))

    def demonstration(self, history: History, **options: Any) -> Sequence:
        """Return a conversation's tokens as if its assistant messages were sampled (no log-probs).

        Raise Unsupported (TEMPLATE_REWRITES_PAST) where that takes several sequences.
        """
        sequences = self.demonstrations(history, **options)
        if len(sequences) > 1:
            raise Unsupported(
                "The chat template renders earlier messages otherwise once later ones follow.",
                reason=Reason.TEMPLATE_REWRITES_PAST,
                remedy="Demonstrate one assistant message at a time.",
            )
        return sequences[0]

    def demonstrations(
        self,
        history: History,
        *,
        stop: Iterable[str] = (),
        options: Mapping[str, Any] | None = None,
        untaught: Container[int] = (),
    ) -> tuple[Sequence, ...]:
        """Return a conversation's tokens as if its assistant messages were sampled (no log-probs).

        What the template writes of a message is taught: thought, content, calls, their marks and
        the end of its turn. What it adds by itself is context. A message that ends with one of
        `stop` ends there, as the sampler would end it. Where a later message changes what the
        template shows of an earlier one, a new sequence begins, as in a rollout.

        options: the template's. untaught: indices of the assistant's messages that are context.
        Raise Unsupported (MASK_UNAVAILABLE, TEMPLATE_HIDES_ANSWERS).
        """
        sequences: list[Sequence] = []
        covered = 0
        for index, message in enumerate(history):
            if message.role != "assistant" or index in untaught:
                continue
            context = sequences[-1] if sequences else None
            shown = _Shown.of(self, history[: index + 1], dict(options or {}))
            prompt, start = self._demonstrated_prompt(shown, context, covered)
            ids = self._demonstrated_ids(shown, prompt, start, tuple(stop))
            answer = self.answer(
                prompt,
                ids,
                versions=[(len(ids), DEMONSTRATION)],
                is_complete=message.is_complete,
            )
            if context is not None and prompt.fork_cause is ForkCause.NONE:
                sequences[-1] = context.extended_by(answer.appended)
            else:
                first = answer.appended
                forks = context is not None
                cause = ForkCause.TEMPLATE_REWRITES_PAST if forks else ForkCause.NONE
                sequences.append(replace(first, fork_cause=cause))
            covered = index + 1
        if not sequences:
            raise InvalidInput("The demonstration has no assistant message.", remedy="Add one.")
        return tuple(sequences)

    def _demonstrated_prompt(
        self, shown: _Shown, context: Sequence | None, covered: int
    ) -> tuple[Prompt, int]:
        """Return the prompt of the last message, and where what is taught begins.

        The policy is asked before an empty thought that the template adds, so that is taught too.
        """
        before = shown.history[:-1]
        turn = 0 if context is None else context.segments[-1].turn + 1
        # What was taught of an earlier message may be left out of a later sequence.
        require_shown(self.template, before, start=covered, **shown.options)
        prompt = self._prompt(before, context, covered, turn, shown.options)
        opened = self.template.render(before, **shown.options)
        if shown.text.startswith(opened):
            return prompt, len(opened)
        # The opening begins a thought that this message does not have.
        start = shown.turn.start
        whole = self._tokens(shown.pieces(0, start, Source.PROMPT), turn)
        whole = replace(whole, fork_cause=ForkCause.TEMPLATE_REWRITES_PAST)
        return Prompt(history=before, sequence=whole, appended=whole, turn=turn), start

    def _demonstrated_ids(
        self, shown: _Shown, prompt: Prompt, start: int, stop: tuple[str, ...]
    ) -> tuple[int, ...]:
        """Return the tokens of the last message, from `start` on, and of the end of its turn."""
        turn, message = shown.turn, shown.history[-1]
        end = shown.stopped_at(stop)
        pieces = shown.pieces(start, end or turn.end, Source.PROMPT)  # for their ids alone
        added = self._tokens(pieces, prompt.turn, follows=prompt.sequence)
        ids = tuple(added.token_ids.tolist())
        if end is not None or not message.is_complete:
            return ids
        written = self.tokenizer.single_token(shown.text[turn.end : turn.closed])
        ends = self._ends[bool(shown.options.get("tools"))]
        end = written if written is not None else ends.of(message)
        return ids if end is None else (*ids, end)

    def forget(self) -> None:
        """Drop the cache of decoded texts; nothing else changes."""
        self._decoded = _DecodedCache(self.tokenizer)

    def _content(self, before: AnySequence[int], token_ids: AnySequence[int]) -> tuple[str, str]:
        """Return the text of sampled ids, and of a final end-of-turn token."""
        ends = len(token_ids) > 0 and token_ids[-1] in self.tokenizer.end_of_turn_ids
        content = self.tokenizer.decode_after(before, token_ids[:-1] if ends else token_ids)
        whole = self.tokenizer.decode_after(before, token_ids) if ends else content
        return content, whole[len(content) :]

    def _num_chars(
        self, before: AnySequence[int], ids: AnySequence[int], text: str, most: int
    ) -> int:
        """Return how many characters of the content these first ids spell wholly."""
        decoded = self.tokenizer.decode_after(before, ids)
        pairs = enumerate(zip(decoded, text, strict=False))
        shared = next((n for n, (ours, theirs) in pairs if ours != theirs), len(decoded))
        return min(most, shared)

    def _past(
        self, history: History, context: Sequence, covered: int, known_sampled: frozenset[int]
    ) -> Past | None:
        """Return what the context covers; None if that cannot begin `history`."""
        runs = _sampled_runs(context)
        ends = context.segments[-1].end if runs else 0
        if not runs or runs[-1][1:] != (ends, covered - 1):
            return None
        if any(i >= len(history) or history[i].role != "assistant" for _, _, i in runs):
            return None
        contents: dict[int, str] = {}
        ending = ""
        for start, end, index in runs:
            if index == covered - 1 or index in known_sampled:
                before = context.token_ids[max(0, start - _LOOK_BACK) : start].tolist()
                sampled = context.token_ids[start:end].tolist()
                contents[index], ending = self._content(before, sampled)
        return Past(
            history=history,
            text=self._decoded.of(context.token_ids),
            last=covered - 1,
            content=contents[covered - 1],
            ending=ending,
            known_sampled={
                index: text for index, text in contents.items() if index in known_sampled
            },
        )

    def _in_parts(self, message: Message) -> Message:
        """Return an answer with thought and calls apart, if the template needs that."""
        is_bare = not message.tool_calls and not message.reasoning
        if self._parts is None or message.role != "assistant" or not is_bare:
            return message
        read = read_text(message.text, self._parts)
        calls = tuple(
            ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
            for call in read.calls
            if not call.problem
        )
        # gpt-oss's template takes a thought or a content beside a call, and shows neither later.
        is_both = bool(calls and read.reasoning) and GRAMMARS[self._parts.calls].has_channels
        content = "" if is_both else read.content
        return replace(message, content=content, reasoning=read.reasoning, tool_calls=calls)

    def _follows_turns(
        self, past: Past, whole: _Conversation, context: Sequence, options: Mapping[str, Any]
    ) -> str | ForkCause:
        """Return what follows the context, whose answers stand for what the template writes."""
        sampled: dict[int, tuple[str, str]] = {}
        for start, end, index in _sampled_runs(context):
            before = context.token_ids[max(0, start - _LOOK_BACK) : start].tolist()
            sampled[index] = self._content(before, context.token_ids[start:end].tolist())
            written = Message(role="assistant", content=sampled[index][0])
            is_same = self._in_parts(written) == replace(past.history[index], is_complete=True)
            if not is_same and index not in past.known_sampled:
                return ForkCause.HISTORY_REWRITTEN
        try:
            turns = assistant_turns(
                self.template, self.tokenizer, past.history, whole.text, **options
            )
        except Unsupported:
            return ForkCause.HISTORY_REWRITTEN
        return continuation_of_turns(past, whole.text, turns, sampled)

    def _fork(self, whole: _Conversation, context: Sequence, cause: ForkCause, turn: int) -> Prompt:
        """Start a new sequence, which keeps the context's tokens up to where the texts part."""
        kept, num_chars = self._keep_shared(whole, context, cause)
        pieces = after(self._cut(whole, 0, "", whole.text, Source.PROMPT), num_chars)
        added = self._tokens(pieces, turn, follows=kept)
        sequence = replace(kept.extended_by(added), fork_cause=cause)
        return Prompt(history=whole.history, sequence=sequence, appended=sequence, turn=turn)

    def _keep_shared(
        self, whole: _Conversation, context: Sequence, cause: ForkCause
    ) -> tuple[Sequence, int]:
        """Return the tokens to keep, up to an edge of sampled ones, and their text's length."""
        text, num_chars, position, num_kept = "", 0, 0, 0
        is_other = cause is ForkCause.HISTORY_REWRITTEN
        if is_other and spells_special(whole.history, self.tokenizer):
            return context.as_context(0), 0  # equal text need not be equal tokens
        ids = context.token_ids.tolist()
        for edge in (edge for run in _sampled_runs(context) for edge in run[:2]):
            text = self.tokenizer.decode_more(text, ids[:position], ids[position:edge])
            if not whole.text.startswith(text):
                break
            num_chars, num_kept, position = len(text), edge, edge
        return context.as_context(num_kept), num_chars

    def _normal(self, text: str) -> str:
        """Return a text as this tokenizer gives it back."""
        return self.tokenizer.decode(self.tokenizer.encode(text, trusted=True).ids)

    def _cut(
        self, whole: _Conversation, start: int, ending: str, text: str, source: Source | None
    ) -> tuple[Piece, ...]:
        """Cut the text from message `start` on; `ending` stands before it (start > 0)."""
        history, new = whole.history, whole.history[start:]
        pieces = cut(ending + text, history, start, whole.render, source=source)
        if spells_special(new, self.tokenizer):
            if pieces is None or not only_in_contents(new, self.tokenizer):
                owner = uncut(text, history, start, source=source)[0].source
                pieces = pieces_with_literals(
                    whole.text, history, whole.render, self.tokenizer, owner
                )
                return tuple(after(pieces, len(whole.text) - len(text)))
            pieces = mark_literal_contents(pieces, self.tokenizer)
        if pieces is None:  # as where what follows a call may not follow a content
            pieces = cut(whole.text, history, 0, whole.render, source=source)
            ending = whole.text.removesuffix(text)
        if pieces is None:
            return uncut(text, history, start, source=source)
        return tuple(after(pieces, len(ending)))

    def _tokens(
        self, pieces: Iterable[Piece], turn: int, *, follows: Sequence | None = None
    ) -> Sequence:
        before = None if follows is None or not len(follows) else int(follows.token_ids[-1])
        return tokens_of(pieces, self.tokenizer, turn=turn, before=before)


_LOOK_BACK = 8
"""Tokens before new ones that a decoder may look at."""


def _sampled_runs(sequence: Sequence) -> list[tuple[int, int, int]]:
    """Return (start, end, message index) of the tokens sampled for each message, in order."""
    runs: list[tuple[int, int, int]] = []
    for segment in sequence.segments:
        if segment.source is not Source.MODEL or segment.message_index is None:
            continue
        if runs and runs[-1][1:] == (segment.start, segment.message_index):
            runs[-1] = (runs[-1][0], segment.end, segment.message_index)
        else:
            runs.append((segment.start, segment.end, segment.message_index))
    return runs


class _DecodedCache:
    """Decodes rows of ids and remembers the newest texts, up to `max_chars` in all.

    It caches a pure function: a row that it lacks is decoded anew, with the same result.
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

    def extend(self, ids: Ids, more: Ids) -> None:
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
