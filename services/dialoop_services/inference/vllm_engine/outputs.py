"""vLLM's outputs as samples, version spans and the chunks of a stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dialoop.sequences import PolicyVersion
from dialoop.trajectory import StopReason

from dialoop_services.inference.engine import (
    Sampled,
    StopTokens,
    TokenChunk,
    TopLogprobs,
    VersionSpan,
    weights_bad,
)

_LABEL = "@"


def sampled_of(completion: Any, stop: StopTokens, *, queue_s: float, num_top: int = 0) -> Sampled:
    """Return a finished completion; Unavailable (WEIGHTS_BAD) when a load aborted it."""
    logprobs, tops = logprobs_of(completion.logprobs, num_top)
    return Sampled(
        token_ids=tuple(completion.token_ids),
        logprobs=tuple(logprobs),
        top_logprobs=tuple(tops),
        versions=spans_of(completion.weight_versions),
        stop_reason=stop_reason_of(completion),
        stop_string=stop_string_of(completion, stop),
        queue_s=queue_s,
    )


def logprobs_of(flat: Any, num_top: int) -> tuple[Sequence[float], list[TopLogprobs]]:
    """Return the sampled tokens' log-probs, and the `num_top` likeliest tokens at each position.

    vLLM's FlatLogprobs has at each position the sampled token, then the likeliest ones.
    """
    if flat is None or not num_top:
        return (flat.logprobs if flat else ()), []
    tops: list[TopLogprobs] = []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        pairs = zip(flat.token_ids[start + 1 : end], flat.logprobs[start + 1 : end], strict=True)
        # A token that could not be sampled has the log-prob -inf.
        tops.append({i: p for i, p in pairs if math.isfinite(p)})
    return [flat.logprobs[start] for start in flat.start_indices], tops


def queued_s(output: Any) -> float:
    """Return the seconds between the core's receipt of the request and its first step."""
    times = output.metrics
    if times is None or not times.scheduled_ts:
        return 0.0
    return max(0.0, float(times.scheduled_ts - times.queued_ts))


def stop_reason_of(completion: Any) -> StopReason:
    """Return why a completion ended; Unavailable (WEIGHTS_BAD) when a load aborted it."""
    reasons = {"stop": StopReason.STOP, "length": StopReason.LENGTH}
    if completion.finish_reason not in reasons:
        raise weights_bad()
    return reasons[completion.finish_reason]


def stop_string_of(completion: Any, stop: StopTokens) -> str:
    """Return the string that ended a completion; empty for the end-of-turn token."""
    reason = completion.stop_reason
    return stop.by_id[reason] if isinstance(reason, int) else reason or ""


def spans_of(spans: Any) -> tuple[VersionSpan, ...]:
    """Return version spans from vLLM's weight versions."""
    return tuple(
        VersionSpan(
            start=span.start, length=span.end - span.start, policy_version=version_of(span.version)
        )
        for span in spans
    )


def chunks_of(
    ids: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[VersionSpan],
    *,
    start: int,
    tops: Sequence[TopLogprobs] = (),
) -> list[TokenChunk]:
    """Return the tokens from `start` on, cut where the version changes."""
    chunks = []
    for span in spans:
        begin, end = max(start, span.start), span.start + span.length
        if begin < end:
            chunks.append(
                TokenChunk(
                    token_ids=tuple(ids[begin:end]),
                    logprobs=tuple(logprobs[begin:end]),
                    policy_version=span.policy_version,
                    top_logprobs=tuple(tops[begin:end]),
                )
            )
    return chunks


def label_of(version: PolicyVersion) -> str:
    """Return a version as vLLM's label."""
    return f"{version.lineage}{_LABEL}{version.number}"


def version_of(label: str) -> PolicyVersion:
    """Return the version of one of vLLM's labels."""
    lineage, _, number = label.rpartition(_LABEL)
    return PolicyVersion(lineage=lineage, number=int(number))
