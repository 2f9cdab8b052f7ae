"""What is wrong with tokens: re-tokenised histories, lost ends of turns, shifted masks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from dialoop.tokens.tokenizer import Tokenizer

from dialoop_ops.audit.records import TRAINED, Dump, Rollout, Span, TokenRecord
from dialoop_ops.audit.report import (
    ERROR,
    AuditFinding,
    Evidence,
    NotCheckable,
    evidence_of,
    finding_of,
)

_FEWEST_STOPS = 20
_FEWEST_LOST = 3
_MOST_STOPS = 10_000
"""Turns from which the usual endings are learnt."""
_LOST_SHARE = 0.01
# An ending is known when it ends this share of the turns, and seldom stands elsewhere.
_KNOWN_SHARE, _KNOWN_PRECISION = 0.05, 0.9
_LONGEST_ENDING = 3
_MAX_SHIFT = 4


class SpanPlace(NamedTuple):
    """A span of a rollout's token row."""

    rollout: Rollout
    sequence: int
    tokens: TokenRecord
    span: Span

    def evidence(self, token: int, detail: str) -> Evidence:
        """Return evidence at a token of the row."""
        fields = {"turn": self.span.turn, "sequence": self.sequence, "token": token}
        return evidence_of(self.rollout, **fields, detail=detail)


def places_of(rollouts: list[Rollout]) -> Iterator[SpanPlace]:
    """Yield every span that the policy wrote."""
    for rollout in rollouts:
        for index, tokens in enumerate(rollout.sequences):
            for span in tokens.spans:
                yield SpanPlace(rollout, index, tokens, span)


def _require_tokens(dump: Dump) -> None:
    if not any(rollout.sequences for rollout in dump.rollouts):
        raise NotCheckable("there are no token ids")


def check_retokenised(dump: Dump) -> list[AuditFinding]:
    """Look for histories whose tokens are not those that were sampled."""
    _require_tokens(dump)
    evidence = [
        evidence_of(
            rollout,
            sequence=index,
            detail=f"{len(tokens.logprobs)} log-probs for {tokens.num_sampled} sampled tokens",
        )
        for rollout in dump.rollouts
        for index, tokens in enumerate(rollout.sequences)
        if len(tokens.logprobs) not in (0, tokens.num_sampled) and tokens.num_sampled
    ]
    evidence += _other_ids_trained(dump.rollouts)
    if dump.tokenizer is not None:
        evidence += _respelled_contexts(dump.rollouts, dump.tokenizer)
    else:
        dump.limits["retokenised_history"] = (
            "there is no tokenizer: prompts were not compared with the rows before them"
        )
    total = sum(len(rollout.sequences) for rollout in dump.rollouts)
    return finding_of(
        "retokenised_history",
        ERROR,
        evidence,
        total=total,
        message="Earlier turns were tokenised again from their text: the tokens that are trained "
        "are not those that were sampled.",
        remedy="Keep the sampled token ids from turn to turn, and never encode an answer's text "
        "again.",
    )


def _other_ids_trained(rollouts: list[Rollout]) -> Iterator[Evidence]:
    """Yield the first token of each trainer's row that differs from what was sampled there."""
    for rollout in rollouts:
        for row in rollout.trainer_rows:
            same = [
                (index, tokens)
                for index, tokens in enumerate(rollout.sequences)
                if row.num_tokens <= len(tokens.ids)
                and set(row.positions) <= set(tokens.positions().tolist())
            ]
            for index, tokens in same[:1]:
                pairs = zip(row.positions, row.tokens, strict=False)
                wrong = next(((p, t) for p, t in pairs if tokens.ids[p] != t), None)
                if wrong is not None:
                    detail = f"sampled id {tokens.ids[wrong[0]]}, the trainer read {wrong[1]}"
                    yield evidence_of(rollout, sequence=index, token=wrong[0], detail=detail)


def _respelled_contexts(rollouts: list[Rollout], tokenizer: Tokenizer) -> Iterator[Evidence]:
    """Yield rows whose prompt has an earlier row's text, and other tokens for it."""
    rows: dict[object, list[tuple[Rollout, int, TokenRecord]]] = defaultdict(list)
    for rollout in rollouts:
        own = len(rollout.sequences) > 1
        for index, tokens in enumerate(rollout.sequences):
            if tokens.spans:
                # Rows of a dump are related by their step; sequences of ours by their trajectory.
                key = rollout.name if own else ("step", rollout.step)
                rows[key].append((rollout, index, tokens))
    for related in rows.values():
        texts = sorted(
            (tokenizer.decode(row[2].ids.tolist()), number) for number, row in enumerate(related)
        )
        earlier: list[tuple[str, int]] = []
        for text, number in texts:
            while earlier and not text.startswith(earlier[-1][0]):
                earlier.pop()
            later = related[number]
            for before, other in earlier:
                token = _first_difference(related[other][2], later[2], len(before), tokenizer)
                if token is not None:
                    detail = "the same text as before, in other tokens"
                    yield evidence_of(later[0], sequence=later[1], token=token, detail=detail)
                    break
            earlier.append((text, number))


def _first_difference(
    earlier: TokenRecord, later: TokenRecord, num_characters: int, tokenizer: Tokenizer
) -> int | None:
    """Return the first token that differs, if the later prompt holds all of the earlier row."""
    prompt = later.ids[: later.spans[0].start]
    if len(tokenizer.decode(prompt.tolist())) < num_characters:
        return None
    size = min(len(earlier.ids), len(prompt))
    differing = np.flatnonzero(earlier.ids[:size] != prompt[:size])
    return int(differing[0]) if len(differing) else None


def check_end_of_turn(dump: Dump) -> list[AuditFinding]:
    """Look for turns that ended by themselves, and whose last sampled token is not an end."""
    _require_tokens(dump)
    stops = [place for place in places_of(dump.rollouts) if place.span.stops]
    if len(stops) < _FEWEST_STOPS:
        raise NotCheckable(f"only {len(stops)} turns are known to have ended by themselves")
    is_end = _endings(stops, dump)
    lost = [place for place in stops if not is_end(place)]
    if len(lost) < _FEWEST_LOST or len(lost) < _LOST_SHARE * len(stops):
        return []
    evidence = [
        place.evidence(
            place.span.end - 1, f"the turn ends with {_token_text(place.tokens.ids, place, dump)}"
        )
        for place in lost
    ]
    return finding_of(
        "lost_end_of_turn",
        ERROR,
        evidence,
        total=len(stops),
        message="The policy ended these turns itself, and no token that ends a turn is among those "
        "that are trained: it does not learn when to stop.",
        remedy="Keep the end-of-turn token (or the stop text) in the answer and in the mask.",
    )


def _token_text(ids: np.ndarray, place: SpanPlace, dump: Dump) -> str:
    token = int(ids[place.span.end - 1])
    return f"id {token}" if dump.tokenizer is None else repr(dump.tokenizer.decode([token]))


def _endings(stops: list[SpanPlace], dump: Dump) -> Callable[[SpanPlace], bool]:
    """Return what decides whether a turn's last tokens end a turn."""
    tokenizer, texts = dump.tokenizer, dump.claims.stop
    ends: Counter[tuple[int, ...]] = Counter()
    everywhere: Counter[tuple[int, ...]] = Counter()
    sample = stops[:: 1 + len(stops) // _MOST_STOPS]
    for place in sample:
        ids = place.tokens.ids[place.span.start : place.span.end].tolist()
        for size in range(1, _LONGEST_ENDING + 1):
            ends[tuple(ids[-size:])] += len(ids) >= size
            everywhere.update(tuple(ids[i : i + size]) for i in range(len(ids) - size + 1))
    usual = {
        ending
        for ending, count in ends.items()
        if count >= _KNOWN_SHARE * len(sample) and count >= _KNOWN_PRECISION * everywhere[ending]
    }

    def is_end(place: SpanPlace) -> bool:
        ids = place.tokens.ids[place.span.start : place.span.end].tolist()
        if any(tuple(ids[-size:]) in usual for size in range(1, _LONGEST_ENDING + 1)):
            return True
        if tokenizer is None:
            return False
        if tokenizer.is_special(ids[-1]) or ids[-1] in tokenizer.end_of_turn_ids:
            return True
        tail = tokenizer.decode(ids[-32:])
        return any(tail.endswith(text) for text in texts)

    return is_end


def check_masks(dump: Dump) -> list[AuditFinding]:
    """Look for masks that train nothing, or other tokens than those that were sampled."""
    _require_tokens(dump)
    rollouts = [rollout for rollout in dump.rollouts if rollout.sequences]
    evidence = [
        evidence_of(rollout, detail="it was trained, and its mask has no sampled token")
        for rollout in rollouts
        if rollout.fate == TRAINED
        and not (rollout.is_cut_off and dump.kind == "trl")
        and not any(tokens.num_sampled for tokens in rollout.sequences)
    ]
    evidence += [
        evidence_of(rollout, token=token, detail=detail)
        for rollout in rollouts
        for detail, token in rollout.structural
    ]
    evidence += _ends_elsewhere(rollouts, dump)
    evidence += _other_positions_trained(rollouts)
    evidence += _shifted_logprobs(rollouts)
    if dump.tokenizer is not None:
        evidence += _shifted_from_messages(rollouts, dump.tokenizer)
    else:
        dump.limits["wrong_mask"] = "there is no tokenizer: masks were not compared with texts"
    return finding_of(
        "wrong_mask",
        ERROR,
        evidence,
        total=len(rollouts),
        message="The mask does not cover exactly what the policy sampled.",
        remedy="Derive the mask and the log-probs from the sampled tokens themselves, and test "
        "that the masked tokens decode to the answer.",
    )


def _ends_elsewhere(rollouts: list[Rollout], dump: Dump) -> list[Evidence]:
    """Return spans that end some tokens after, or two or more before, the end of their turn.

    A single token before it is left out by those who drop the end itself: lost_end_of_turn.
    """
    stops = [place for place in places_of(rollouts) if place.span.stops]
    ends = _end_ids(stops, dump)
    evidence = []
    for place in stops:
        ids, end = place.tokens.ids, place.span.end
        if not ends or ids[end - 1] in ends:
            continue
        for shift in (-1, -2, -3, -4, 2, 3, 4):
            at = end - 1 + shift
            is_inside = place.span.start <= at if shift < 0 else at < len(ids)
            if is_inside and ids[at] in ends:
                way = "after" if shift < 0 else "before"
                detail = f"the mask ends {abs(shift)} tokens {way} the end of the turn"
                evidence.append(place.evidence(end - 1, detail))
                break
    # Texts that quote an end are rare; a shifted mask is not.
    return evidence if len(evidence) >= max(_FEWEST_LOST, _LOST_SHARE * len(stops)) else []


def _end_ids(stops: list[SpanPlace], dump: Dump) -> set[int]:
    """Return the ids that end turns: the tokenizer's, and else the usual last one."""
    if dump.tokenizer is not None and dump.tokenizer.end_of_turn_ids:
        return set(dump.tokenizer.end_of_turn_ids)
    last = Counter(int(place.tokens.ids[place.span.end - 1]) for place in stops)
    return {token for token, count in last.most_common(1) if count > len(stops) / 2}


def _other_positions_trained(rollouts: list[Rollout]) -> Iterator[Evidence]:
    for rollout in rollouts:
        sampled = [set(tokens.positions().tolist()) for tokens in rollout.sequences]
        for row in rollout.trainer_rows:
            if any(set(row.positions) <= own for own in sampled):
                continue
            closest = max(sampled, key=lambda own: len(own & set(row.positions)), default=set())
            wrong = min(set(row.positions) - closest)
            detail = "the trainer trained a token that the policy did not sample"
            yield evidence_of(rollout, token=wrong, detail=detail)


def _shifted_from_messages(rollouts: list[Rollout], tokenizer: Tokenizer) -> Iterator[Evidence]:
    """Yield spans that spell a turn's message only when they are moved."""

    def text_of(ids: np.ndarray) -> str:
        return tokenizer.decode(ids.tolist())

    for place in places_of(rollouts):
        span, ids, content = place.span, place.tokens.ids, place.span.content
        if not content or text_of(ids[span.start : span.end]).startswith(content):
            continue
        for shift in (shift for k in range(1, _MAX_SHIFT + 1) for shift in (-k, k)):
            start = span.start + shift
            # The moved span begins as the message does, and the span itself does not.
            if start >= 0 and _begins(ids[start : span.end + _MAX_SHIFT], content, tokenizer):
                detail = (
                    f"the mask begins {abs(shift)} tokens too {'late' if shift < 0 else 'soon'}"
                )
                yield place.evidence(span.start, detail)
                break


def _begins(ids: np.ndarray, content: str, tokenizer: Tokenizer) -> bool:
    return tokenizer.decode(ids.tolist()).startswith(content)


def _shifted_logprobs(rollouts: list[Rollout]) -> list[Evidence]:
    """Return evidence that log-probs stand one token beside theirs, by the trainer's numbers."""
    same, moved, first = [], {-1: [], 1: []}, None  # type: ignore[var-annotated]
    for rollout in rollouts:
        for index, tokens in enumerate(rollout.sequences):
            theirs, ours = tokens.trainer_logprobs, tokens.logprobs
            if not tokens.has_logprobs() or len(theirs) != len(ours) or len(ours) < 3:
                continue
            first = first or evidence_of(
                rollout, sequence=index, token=int(tokens.positions()[0]), detail=""
            )
            inner = slice(1, -1)
            same.append(np.stack([ours[inner], theirs[inner]]))
            moved[-1].append(np.stack([ours[inner], theirs[:-2]]))
            moved[1].append(np.stack([ours[inner], theirs[2:]]))
    if first is None:
        return []
    own = _correlation(same)
    for shift, pairs in moved.items():
        beside = _correlation(pairs)
        if beside > 0.9 and beside > own + 0.3:
            text = f"log-probs agree with the trainer's {'before' if shift < 0 else 'after'} them: "
            detail = f"{text}correlation {beside:.2f}, and {own:.2f} at their own tokens"
            return [replace(first, detail=detail)]
    return []


def _correlation(pairs: list[np.ndarray]) -> float:
    values = np.concatenate(pairs, axis=1).astype(np.float64)
    values = values[:, np.isfinite(values).all(axis=0)]
    if values.shape[1] < 20 or (values.std(axis=1) == 0).any():
        return 0.0
    return float(np.corrcoef(values)[0, 1])
