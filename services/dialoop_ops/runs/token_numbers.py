"""What engine and trainer know of each token of a trajectory, as columns of equal length.

`token_page(row)` reads them from a line of trajectories.jsonl, and the trainer's log-probs from the
lines of debug_table.jsonl that it is handed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dialoop.errors import NotFound
from dialoop.sequences import Source

from dialoop_ops.runs.summaries import TRAINED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dialoop.tokens.tokenizer import Tokenizer

    from dialoop_ops.runs.display import Row

MAX_TOKENS = 4000
"""Most tokens of one page."""

_COLUMNS = (
    *("sources", "turns", "messages", "versions", "logprobs", "trainer_logprobs", "ref_logprobs"),
    *("advantages", "trained"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPage:
    """Tokens `start` to `start + len(ids)` of `num_tokens` of one sequence; a column per number.

    texts: None without a tokenizer. sources: PROMPT, TEMPLATE, MODEL, ENVIRONMENT or TOOL. turns,
    messages: None where a token belongs to none. Only sampled tokens have versions, log-probs (in
    nats) and advantages. trainer_logprobs: of the policy that the train step began with, None
    where debug_table.jsonl has none of them.
    """

    sequence: int
    num_sequences: int
    fork_cause: str
    start: int
    num_tokens: int
    ids: list[int]
    texts: list[str] | None
    special: list[bool]
    sources: list[str]
    turns: list[int | None]
    messages: list[int | None]
    versions: list[str | None]
    logprobs: list[float | None]
    trainer_logprobs: list[float | None]
    ref_logprobs: list[float | None]
    advantages: list[float | None]
    trained: list[bool]


def token_page(
    row: Row,
    *,
    sequence: int = 0,
    start: int = 0,
    limit: int | None = MAX_TOKENS,
    tokenizer: Tokenizer | None = None,
    debug_rows: Iterable[Row] = (),
) -> TokenPage:
    """Return tokens of one sequence of a row; NotFound where it has no such sequence or token.

    limit: None for all from `start` on, else at most MAX_TOKENS.
    """
    sequences = row["sequences"]
    if not 0 <= sequence < len(sequences):
        raise NotFound(
            f"Trajectory {row['trajectory_id']} has {len(sequences)} sequences, and no number "
            f"{sequence}.",
            remedy="Count from 0.",
        )
    own = sequences[sequence]
    ids: list[int] = own["token_ids"]
    if not 0 <= start <= len(ids):
        raise NotFound(
            f"Sequence {sequence} has {len(ids)} tokens, and no number {start}.",
            remedy="Count from 0.",
        )
    chosen = slice(start, None if limit is None else start + min(limit, MAX_TOKENS))
    read = _policy_logprobs(ids, debug_rows)
    columns = list(zip(*_columns(row, own, read), strict=True)) or [()] * len(_COLUMNS)
    values: Any = {n: list(c[chosen]) for n, c in zip(_COLUMNS, columns, strict=True)}
    shown = ids[chosen]
    return TokenPage(
        sequence=sequence,
        num_sequences=len(sequences),
        fork_cause=own.get("fork_cause", "NONE"),
        start=start,
        num_tokens=len(ids),
        ids=shown,
        texts=None if tokenizer is None else token_texts(tokenizer, shown),
        special=[tokenizer is not None and tokenizer.is_special(i) for i in shown],
        **values,
    )


def _columns(
    row: Row, sequence: Mapping[str, Any], policy_logprobs: Mapping[int, float] | None
) -> Iterator[tuple[Any, ...]]:
    """Yield what is known of each token, in the order of TokenPage's columns."""
    logprobs = iter(sequence.get("inference_logprobs") or ())
    refs = iter(sequence.get("ref_logprobs") or ())
    advantages = iter(sequence.get("token_advantages") or ())
    for segment in sequence["segments"]:
        is_sampled = segment["source"] == Source.MODEL.name
        version = f"{segment.get('lineage')}-{segment.get('policy_version')}"
        place = (segment["source"], segment.get("turn"), segment.get("message_index"))
        for position in range(segment["start"], segment["start"] + segment["length"]):
            if not is_sampled:
                yield (*place, None, None, None, None, None, False)
                continue
            advantage = next(advantages, sequence.get("advantage"))
            trained = row["outcome"] == TRAINED and advantage is not None
            policy = None
            if policy_logprobs is not None:
                policy = policy_logprobs.get(position)
                trained = trained and policy is not None
            numbers = (next(logprobs, None), policy, next(refs, None), advantage)
            yield (*place, version, *numbers, trained)


def _policy_logprobs(ids: Sequence[int], rows: Iterable[Row]) -> dict[int, float] | None:
    """Return the trainer's log-prob by position, from the newest row that is of these tokens."""
    newest = None
    for row in rows:
        positions = row.get("response_positions", ())
        tokens = [ids[p] for p in positions if p < len(ids)]
        if row.get("num_tokens", 0) <= len(ids) and tokens == row.get("response_tokens"):
            newest = dict(zip(positions, row["policy_logprobs"], strict=False))
    return newest


def token_texts(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """Return each token's own text; special tokens stay, part of a character is U+FFFD."""
    return [_text_of(tokenizer, token_id) for token_id in ids]


@lru_cache(maxsize=1 << 17)
def _text_of(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id])
