"""How a conversation becomes tokens, one turn at a time.

    builder = TokenBuilder(tokenizer, template)
    prompt = builder.prompt(history)                     # opening: everything is rendered
    answer = builder.answer(prompt, ids, logprobs, versions)
    prompt = builder.prompt(longer, context=..., num_context_messages=2)   # only the tail

Law: the next prompt's ids are the previous full ids followed by the ids of the added messages.
Where the template will not have that, a new sequence starts and says why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dialoop.chat import History, Message
from dialoop.errors import InvalidInput, Unsupported
from dialoop.sequences import ForkCause, PolicyVersion, Sequence, Source, sequence_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as AnySequence

    from dialoop.templates import ChatTemplate
    from dialoop.tokenizer import Encoded, Tokenizer

DEMONSTRATION = PolicyVersion(lineage="demonstration", number=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What to feed the engine, and what of it is new.

    sequence: all tokens (its ids are the engine's prompt). appended: the new ones, which continue
    the given context when fork_cause is NONE, else the whole new sequence.
    """

    history: History
    sequence: Sequence
    appended: Sequence
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The message that was sampled, and the new tokens including those of the prompt's tail."""

    message: Message
    appended: Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A stretch of rendered text and whose it is."""

    text: str
    source: Source
    message_index: int | None = None


class TokenBuilder:
    """Turns conversations into sequences, turn by turn, and never tokenises sampled text again."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template

    def prompt(
        self,
        history: History,
        *,
        context: Sequence | None = None,
        num_context_messages: int = 0,
        turn: int = 0,
    ) -> Prompt:
        """Tokens of `history` up to and with the opening of the assistant's turn.

        `context` holds the tokens of the first `num_context_messages` messages, of which the last
        is the policy's own; only what follows is rendered and tokenised.
        """
        if context is None:
            opening = self._tokens(self._pieces(history, 0, "", Source.PROMPT), turn)
            return Prompt(history=history, sequence=opening, appended=opening, turn=turn)
        if num_context_messages <= 0:
            raise InvalidInput(
                f"num_context_messages is {num_context_messages}.",
                reason="BAD_CONTEXT",
                remedy="Say how many of the prompt's messages the context's tokens cover.",
            )
        tail = self._tail(history, context, num_context_messages)
        if isinstance(tail, ForkCause):
            whole = self._tokens(self._pieces(history, 0, "", Source.PROMPT), turn)
            whole = replace(whole, fork_cause=tail)
            return Prompt(history=history, sequence=whole, appended=whole, turn=turn)
        added = self._tokens(tail, turn)
        return Prompt(
            history=history, sequence=context.extended_by(added), appended=added, turn=turn
        )

    def answer(
        self,
        prompt: Prompt,
        token_ids: AnySequence[int],
        *,
        logprobs: AnySequence[float] = (),
        versions: Iterable[tuple[int, PolicyVersion]],
        is_complete: bool = True,
    ) -> Answer:
        """The assistant's message and its tokens; `versions` are (length, version) runs."""
        message = Message(
            role="assistant", content=self._content(token_ids), is_complete=is_complete
        )
        pieces: list[tuple[AnySequence[int], dict[str, Any]]] = []
        position = 0
        for length, version in versions:
            run = token_ids[position : position + length]
            fields = {
                "source": Source.MODEL,
                "turn": prompt.turn,
                "message_index": len(prompt.history),
                "char_start": len(self.tokenizer.decode(token_ids[:position])),
                "char_length": len(self.tokenizer.decode(run)),
                "policy_version": version,
            }
            pieces.append((run, fields))
            position += length
        sampled = sequence_of(pieces, logprobs=logprobs)
        return Answer(message=message, appended=prompt.appended.extended_by(sampled))

    def demonstration(self, history: History, *, stop: Iterable[str] = ()) -> Sequence:
        """A whole conversation as if its assistant messages had been sampled (no log-probs).

        A message that ends with one of `stop` ends there, as the sampler would end it; others end
        with the end-of-turn token.
        """
        sequence: Sequence | None = None
        covered = 0
        for index, message in enumerate(history):
            if message.role != "assistant":
                continue
            prompt = self.prompt(
                history[:index],
                context=sequence,
                num_context_messages=covered,
                turn=0 if sequence is None else sequence.segments[-1].turn + 1,
            )
            if prompt.sequence.fork_cause is not ForkCause.NONE:
                raise Unsupported(
                    "The chat template renders earlier messages otherwise once later ones follow.",
                    reason="TEMPLATE_REWRITES_PAST",
                    remedy="Demonstrate one assistant message at a time.",
                )
            ids = self.tokenizer.encode(message.text).ids
            if not message.text.endswith(tuple(stop)):
                ids += self.tokenizer.end_of_turn_ids[:1]
            appended = self.answer(prompt, ids, versions=[(len(ids), DEMONSTRATION)]).appended
            sequence = appended if sequence is None else sequence.extended_by(appended)
            covered = index + 1
        if sequence is None:
            raise InvalidInput(
                "The demonstration has no assistant message.", remedy="Show what to say."
            )
        return sequence

    def _content(self, token_ids: AnySequence[int]) -> str:
        """The text of sampled ids; only a final end-of-turn token is left out."""
        ends = len(token_ids) > 0 and token_ids[-1] in self.tokenizer.end_of_turn_ids
        return self.tokenizer.decode(token_ids[:-1] if ends else token_ids)

    def _tail(
        self, history: History, context: Sequence, covered: int
    ) -> tuple[_Piece, ...] | ForkCause:
        """What to append to the context, or why that is impossible."""
        last = context.segments[-1] if context.segments else None
        if last is None or last.source is not Source.MODEL or covered > len(history):
            return ForkCause.HISTORY_REWRITTEN
        sampled = [
            int(i)
            for s in context.segments
            if s.source is Source.MODEL and s.message_index == covered - 1
            for i in context.token_ids[s.start : s.end]
        ]
        content = self._content(sampled)
        if last.message_index != covered - 1 or history[covered - 1].text != content:
            return ForkCause.HISTORY_REWRITTEN
        before = self.template.render(history[: covered - 1])
        if not self._spells(context.token_ids[: len(context) - len(sampled)].tolist(), before):
            return ForkCause.HISTORY_REWRITTEN
        through = self.template.render(history[:covered], add_generation_prompt=False)
        if not through.startswith(before + content):
            return ForkCause.TEMPLATE_REWRITES_PAST
        closing = through[len(before) + len(content) :]
        end_text = self.tokenizer.decode(sampled)[len(content) :]
        if not closing.startswith(end_text):
            return ForkCause.TEMPLATE_REWRITES_PAST
        if not self.template.render(history).startswith(through):
            return ForkCause.TEMPLATE_REWRITES_PAST
        glue = _Piece(text=closing[len(end_text) :], source=Source.TEMPLATE)
        return (glue, *self._pieces(history, covered, through, None))

    def _spells(self, token_ids: AnySequence[int], text: str) -> bool:
        """Whether the ids spell the text, as far as this tokenizer can tell."""
        if self.tokenizer.decode(token_ids) == text:
            return True
        # A tokenizer that loses text on the way there and back cannot tell.
        return self.tokenizer.decode(self.tokenizer.encode(text, trusted=True).ids) != text

    def _pieces(
        self, history: History, start: int, prefix: str, source: Source | None
    ) -> tuple[_Piece, ...]:
        """The rendered text after `prefix`, cut at the contents of messages from `start` on.

        Contents are found by rendering with unique marks in their place, never by searching; a
        template that changes contents on the way gives one uncut piece.
        """
        text = self.template.render(history)[len(prefix) :]
        added = list(enumerate(history))[start:]
        marks = {index: f"\ue000{index}\ue001" for index, message in added if message.text}
        marked_history = History(
            tuple(
                replace(message, content=marks[index]) if index in marks else message
                for index, message in enumerate(history)
            )
        )
        pieces: list[_Piece] = []
        rest = self.template.render(marked_history)[len(prefix) :]
        for index, mark in marks.items():
            if rest.count(mark) != 1:
                return (_Piece(text=text, source=source or _source_of(history[start])),)
            glue, rest = rest.split(mark)
            pieces.append(_Piece(text=glue, source=Source.TEMPLATE))
            message = history[index]
            owner = source or _source_of(message)
            pieces.append(_Piece(text=message.text, source=owner, message_index=index))
        pieces.append(_Piece(text=rest, source=Source.TEMPLATE))
        if "".join(piece.text for piece in pieces) != text:
            return (_Piece(text=text, source=source or _source_of(history[start])),)
        return tuple(pieces)

    def _tokens(self, pieces: tuple[_Piece, ...], turn: int) -> Sequence:
        """Tokenise pieces as one text, or one by one where a content spells a special token."""
        pieces = tuple(piece for piece in pieces if piece.text)
        contents = (p.text for p in pieces if p.message_index is not None)
        if any(self.tokenizer.spells_special(content) for content in contents):
            return sequence_of(
                (
                    self.tokenizer.encode(p.text, trusted=p.message_index is None).ids,
                    _fields(p, turn, 0, len(p.text)),
                )
                for p in pieces
            )
        encoded = self.tokenizer.encode("".join(p.text for p in pieces), trusted=True)
        return sequence_of(_cut(encoded, pieces, turn))


def _source_of(message: Message) -> Source:
    return Source.TOOL if message.role == "tool" else Source.ENVIRONMENT


def _fields(piece: _Piece, turn: int, char_start: int, char_length: int) -> dict[str, Any]:
    owned = piece.message_index is not None
    return {
        "source": piece.source,
        "turn": turn,
        "message_index": piece.message_index,
        "char_start": char_start if owned else 0,
        "char_length": char_length if owned else 0,
    }


def _cut(
    encoded: Encoded, pieces: tuple[_Piece, ...], turn: int
) -> Iterable[tuple[list[int], dict[str, Any]]]:
    """Give each token to the piece its first character lies in."""
    position, index = 0, 0
    for piece in pieces:
        end = position + len(piece.text)
        ids: list[int] = []
        first = index
        while index < len(encoded.ids) and encoded.offsets[index][0] < end:
            ids.append(encoded.ids[index])
            index += 1
        if ids:
            start = encoded.offsets[first][0] - position
            length = encoded.offsets[index - 1][1] - position - start
            yield ids, _fields(piece, turn, start, length)
        position = end
