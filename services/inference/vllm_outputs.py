"""What vLLM answers, in our words: samples, version spans, and the pieces of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dialoop.sequences import PolicyVersion
from dialoop.trajectory import StopReason

from services.inference.engine import Piece, Sampled, StopTokens, VersionSpan, weights_bad

_LABEL = "@"


def sampled_of(completion: Any, stop: StopTokens) -> Sampled:
    return Sampled(
        token_ids=tuple(completion.token_ids),
        logprobs=tuple(completion.logprobs.logprobs),
        versions=spans_of(completion.weight_versions),
        stop_reason=stop_reason_of(completion),
        stop_string=stop_string_of(completion, stop),
    )


def stop_reason_of(completion: Any) -> StopReason:
    reasons = {"stop": StopReason.STOP, "length": StopReason.LENGTH}
    if completion.finish_reason not in reasons:
        raise weights_bad()
    return reasons[completion.finish_reason]


def stop_string_of(completion: Any, stop: StopTokens) -> str:
    reason = completion.stop_reason
    return stop.by_id[reason] if isinstance(reason, int) else reason or ""


def spans_of(spans: Any) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(
            start=span.start, length=span.end - span.start, policy_version=version_of(span.version)
        )
        for span in spans
    )


def pieces_of(
    ids: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[VersionSpan],
    *,
    start: int,
) -> list[Piece]:
    """The tokens from `start` on, cut where the version changes."""
    pieces = []
    for span in spans:
        begin, end = max(start, span.start), span.start + span.length
        if begin < end:
            pieces.append(
                Piece(
                    token_ids=tuple(ids[begin:end]),
                    logprobs=tuple(logprobs[begin:end]),
                    policy_version=span.policy_version,
                )
            )
    return pieces


def label_of(version: PolicyVersion) -> str:
    return f"{version.lineage}{_LABEL}{version.number}"


def version_of(label: str) -> PolicyVersion:
    lineage, _, number = label.rpartition(_LABEL)
    return PolicyVersion(lineage=lineage, number=int(number))
