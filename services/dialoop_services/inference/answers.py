"""Answers of the inference service as protobuf messages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dialoop.v1 import inference_service_pb2 as pb
from dialoop.wire.messages import CHAT_HISTORY, TEXT
from dialoop.wire.records import SAMPLING
from dialoop.wire.sequences import POLICY_VERSION, sequence_to_proto

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from dialoop.episode import Sample
    from dialoop.tokens.tokenizer import RunningText

    from dialoop_services.inference.engine import TokenChunk


def generated_to_proto(samples: Sequence[Sample]) -> pb.GenerateResponse:
    """Encode all samples of one request, which share its prompt and sampling."""
    first = samples[0]
    return pb.GenerateResponse(
        samples=map(sample_to_proto, samples),
        tokenizer_digest=first.tokenizer_digest,
        template_digest=first.template_digest,
        sampling=SAMPLING.to_proto(first.sampling),
        queue_s=first.queue_s,
        generate_s=first.generate_s,
        update_mode=int(first.update_mode),  # type: ignore[arg-type]  # enums are ints
        num_truncated_tokens=first.num_truncated_tokens,
        warnings=first.warnings,
        distribution=int(first.sampling.distribution),  # type: ignore[arg-type]  # enums are ints
    )


def sample_to_proto(sample: Sample) -> pb.Sample:
    """Encode one answer: a history, or text where the request gave text or token ids."""
    proto = pb.Sample(
        sequence=sequence_to_proto(sample.sequence),
        stop_reason=int(sample.stop_reason),  # type: ignore[arg-type]  # enums are ints
        stop_string=sample.stop_string,
        prompt_id=sample.prompt_id,
        sample_index=sample.sample_index,
        top_logprobs=_top_to_proto(sample.top_logprobs),
        model_digest=sample.model_digest,
    )
    if sample.text is None:
        proto.history.CopyFrom(CHAT_HISTORY.to_proto(sample.history))
    else:
        proto.text.CopyFrom(TEXT.to_proto(sample.text))  # type: ignore[arg-type]  # same fields
    return proto


async def gather_chunks(
    chunks: asyncio.Queue[TokenChunk | None], num_tokens: int
) -> AsyncIterator[TokenChunk]:
    """Yield what comes before None, in chunks of `num_tokens` or more, each of one version.

    The end of a version and of the answer give less. What was sampled is given out also where the
    answer fails, so that another replica can go on after it.
    """
    gathered: TokenChunk | None = None
    while (chunk := await chunks.get()) is not None:
        if gathered is not None and gathered.policy_version != chunk.policy_version:
            yield gathered
            gathered = None
        if gathered is not None:
            chunk = replace(
                gathered,
                token_ids=gathered.token_ids + chunk.token_ids,
                logprobs=gathered.logprobs + chunk.logprobs,
                top_logprobs=(*gathered.top_logprobs, *chunk.top_logprobs),
            )
        gathered = chunk
        if len(chunk.token_ids) >= num_tokens:
            yield chunk
            gathered = None
    if gathered is not None:
        yield gathered


def chunk_to_proto(
    chunk: TokenChunk, text: RunningText, shown: Iterable[int]
) -> pb.GenerateStreamResponse:
    """Encode tokens of a stream, and the text that the `shown` ones add in whole characters."""
    return pb.GenerateStreamResponse(
        token_ids=chunk.token_ids,
        inference_logprobs=chunk.logprobs,
        policy_version=POLICY_VERSION.to_proto(chunk.policy_version),
        text=text.add(shown),
        top_logprobs=_top_to_proto(chunk.top_logprobs),
    )


def _top_to_proto(rows: Iterable[Mapping[int, float]]) -> list[pb.TopLogprobs]:
    return [pb.TopLogprobs(token_ids=row, logprobs=row.values()) for row in rows]
