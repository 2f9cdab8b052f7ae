"""An answer that goes on after another replica's tokens is one answer, with one end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from dialoop.errors import InvalidInput
from dialoop.sequences import PolicyVersion, Sequence, Source, sequence_of
from dialoop.trajectory import SamplingParams, StopReason
from dialoop_services.inference.engine import Sampled, StopTokens, VersionSpan
from dialoop_services.inference.partial_answer import go_on, require_continuable

MAIN_1, MAIN_2 = (PolicyVersion(lineage="main", number=number) for number in (1, 2))
END = 7
PROMPT = [1, 2, 3]


def decode(ids: Any) -> str:
    return "".join(chr(token) for token in ids)


def row(text: str, *versions: PolicyVersion, end: tuple[int, ...] = ()) -> Sequence:
    """Tokens of a text, a letter each, of one version after the other."""
    ids = [*map(ord, text), *end]
    each = len(ids) // len(versions)
    pieces = [
        (
            ids[i * each : (i + 1) * each if i + 1 < len(versions) else None],
            {"source": Source.MODEL, "policy_version": version},
        )
        for i, version in enumerate(versions)
    ]
    return sequence_of(pieces, logprobs=[-0.1] * len(ids))


class Engine:
    """Answers with letters until a stop token of its own; keeps what it was asked."""

    def __init__(self, text: str, reason: StopReason = StopReason.STOP) -> None:
        self.text, self.reason = text, reason
        self.requests: list[SimpleNamespace] = []

    async def sample(
        self, ids: Any, sampling: SamplingParams, *, stop: StopTokens, num_samples: int = 1
    ) -> tuple[Sampled, ...]:
        self.requests.append(SimpleNamespace(ids=list(ids), room=sampling.max_new_tokens))
        tokens = tuple(map(ord, self.text))
        span = VersionSpan(start=0, length=len(tokens), policy_version=MAIN_2)
        return (
            Sampled(
                token_ids=tokens,
                logprobs=(-0.2,) * len(tokens),
                versions=(span,) if tokens else (),
                stop_reason=self.reason,
            ),
        )


async def answer(engine: Engine, partial_answer: Sequence, *stop: str, room: int = 20) -> Sampled:
    return await go_on(
        partial_answer,
        engine.sample,
        PROMPT,
        SamplingParams(max_new_tokens=room),
        stop=StopTokens(by_id={END: ""}, strings=stop),
        decode=decode,
    )


async def test_tokens_log_probs_and_versions_of_both_replicas_stand_in_one_answer() -> None:
    engine = Engine("lo!")
    sampled = await answer(engine, row("hel", MAIN_1))
    assert decode(sampled.token_ids) == "hello!"
    assert sampled.logprobs == pytest.approx((-0.1,) * 3 + (-0.2,) * 3)
    assert [(s.start, s.length, s.policy_version) for s in sampled.versions] == [
        (0, 3, MAIN_1),
        (3, 3, MAIN_2),
    ]
    assert sampled.stop_reason is StopReason.STOP
    (request,) = engine.requests
    assert request.ids == [*PROMPT, *map(ord, "hel")]
    assert request.room == 17


async def test_neighbouring_spans_of_one_version_are_one() -> None:
    sampled = await answer(Engine("lo"), row("help", MAIN_1, MAIN_2))
    assert [(s.start, s.length) for s in sampled.versions] == [(0, 2), (2, 4)]


async def test_a_stop_string_that_begins_in_the_old_tokens_ends_the_answer() -> None:
    sampled = await answer(Engine("all>and more"), row("x <c", MAIN_1), "<call>")
    assert decode(sampled.token_ids) == "x <call>"
    assert (sampled.stop_reason, sampled.stop_string) == (StopReason.STOP, "<call>")
    assert sum(span.length for span in sampled.versions) == len(sampled.logprobs) == 8


async def test_an_answer_that_had_ended_is_not_sampled_further() -> None:
    engine = Engine("more")
    ended = await answer(engine, row("x<call>yz", MAIN_1), "<call>")
    assert decode(ended.token_ids) == "x<call>"
    stopped = await answer(engine, row("x", MAIN_1, end=(END,)))
    assert (stopped.token_ids, stopped.stop_reason) == ((ord("x"), END), StopReason.STOP)
    full = await answer(engine, row("abcd", MAIN_1), room=4)
    assert (decode(full.token_ids), full.stop_reason) == ("abcd", StopReason.LENGTH)
    assert not engine.requests


async def test_a_context_that_is_full_ends_the_answer_as_its_length_does() -> None:
    sampled = await answer(Engine("", StopReason.CONTEXT_FULL), row("abc", MAIN_1))
    assert (decode(sampled.token_ids), sampled.stop_reason) == ("abc", StopReason.LENGTH)


@pytest.mark.parametrize(
    ("partial_answer", "sampling", "num_samples"),
    [
        (sequence_of([([1], {"source": Source.PROMPT})]), SamplingParams(), 1),
        (
            sequence_of([([1], {"source": Source.MODEL, "policy_version": MAIN_1})]),
            SamplingParams(),
            1,
        ),
        (row("a", MAIN_1), SamplingParams(), 2),
        (row("a", MAIN_1), SamplingParams(top_logprobs=1), 1),
        (row("a", MAIN_1), SamplingParams(seed=3), 1),
        (row("a", MAIN_1), SamplingParams(constraint='{"type": "json_object"}'), 1),
    ],
)
def test_what_cannot_begin_an_answer_is_refused(
    partial_answer: Sequence, sampling: SamplingParams, num_samples: int
) -> None:
    with pytest.raises(InvalidInput) as caught:
        require_continuable(partial_answer, sampling, num_samples=num_samples)
    assert caught.value.reason == "BAD_PARTIAL_ANSWER"
