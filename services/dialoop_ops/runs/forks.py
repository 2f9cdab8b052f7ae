"""How the sequences of a trajectory hang together: where each one leaves an earlier one, and why.

A conversation is one sequence as long as every prompt continues the tokens before it. Where a
prompt differs (the template dropped earlier thinking, the environment rewrote a message), the turn
begins a new sequence. `fork_tree(row)` finds the place from the tokens of a line of
trajectories.jsonl.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dialoop.tokens.tokenizer import Tokenizer

_MAX_SHOWN = 200
"""Most tokens that are shown of either side behind a fork."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFork:
    """One sequence in the tree.

    parent: the earlier sequence with which it shares most tokens at its start; None for the first.
    num_shared: how many. turns: those that it has sampled, counted from 0. before, after: the
    parent's tokens behind the fork and this sequence's prompt there, each cut to 200 tokens, as
    text or, without a tokenizer, as ids in brackets; empty where there are none.
    """

    sequence: int
    parent: int | None
    cause: str
    num_tokens: int
    num_shared: int
    turns: tuple[int, ...]
    before: str
    after: str


def fork_tree(row: Mapping[str, Any], *, tokenizer: Tokenizer | None = None) -> list[SequenceFork]:
    """Return a trajectory's sequences in order, each with its place in the tree."""
    sequences = row["sequences"]
    return [_branch(sequences, number, tokenizer) for number in range(len(sequences))]


def _branch(
    sequences: Sequence[Mapping[str, Any]], number: int, tokenizer: Tokenizer | None
) -> SequenceFork:
    own = sequences[number]
    ids: list[int] = own["token_ids"]
    shared = [_num_shared(earlier["token_ids"], ids) for earlier in sequences[:number]]
    # Of equals the latest, since a turn continues what came just before it.
    parent = max(range(number), key=lambda i: (shared[i], i)) if number else None
    num_shared = 0 if parent is None else shared[parent]
    before = [] if parent is None else sequences[parent]["token_ids"][num_shared:]
    after = [] if parent is None else ids[num_shared : _first_sampled(own)]
    return SequenceFork(
        sequence=number,
        parent=parent,
        cause=own.get("fork_cause", "NONE"),
        num_tokens=len(ids),
        num_shared=num_shared,
        turns=_turns_of(own),
        before=_text_of(before, tokenizer),
        after=_text_of(after, tokenizer),
    )


def _num_shared(earlier: Sequence[int], own: Sequence[int]) -> int:
    pairs = zip(earlier, own, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _first_sampled(sequence: Mapping[str, Any]) -> int:
    """Return where the prompt of the sequence's first own turn ends."""
    starts = [s["start"] for s in sequence["segments"] if s["source"] == "MODEL"]
    return min(starts, default=len(sequence["token_ids"]))


def _turns_of(sequence: Mapping[str, Any]) -> tuple[int, ...]:
    turns = {s.get("turn") for s in sequence["segments"] if s["source"] == "MODEL"}
    return tuple(sorted(turn for turn in turns if turn is not None))


def _text_of(ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    if not ids:
        return ""
    shown, rest = ids[:_MAX_SHOWN], len(ids) - _MAX_SHOWN
    text = str(list(shown)) if tokenizer is None else tokenizer.decode(shown)
    return f"{text} … {rest} more tokens" if rest > 0 else text
