"""Generate and log-prob messages of the inference service, to and from domain types."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dialoop.chat import ChatHistory, Messages, ToolDefinition, as_history
from dialoop.episode import ContinuedText, Sample, UpdateMode
from dialoop.sequences import Sequence
from dialoop.trajectory import SamplingParams, StopReason
from dialoop.v1 import inference_service_pb2 as pb
from dialoop.v1 import trajectory_pb2
from dialoop.wire.messages import (
    CHAT_HISTORY,
    HISTORY,
    TEXT,
    token_ids_to_proto,
    tool_to_proto,
)
from dialoop.wire.records import SAMPLING
from dialoop.wire.sequences import sequence_from_proto, sequence_to_proto


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to generate from; exactly one of history, text and token_ids is set."""

    history: Messages | None = None
    text: str | None = None
    token_ids: Iterable[int] | None = None
    context: Sequence | None = None
    num_context_messages: int = 0
    sampling: SamplingParams | None = None
    turn: int = 0
    num_samples: int = 1
    adapter: str = ""
    template_name: str = ""
    tools: Iterable[ToolDefinition | Mapping[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    truncate_prompt: bool = False
    skip_special_tokens: bool = False
    add_special_tokens: bool = True
    partial_answer: Sequence | None = None

    def to_proto(self) -> pb.GenerateRequest:
        """Return the request; the service names missing fields."""
        context = self.context
        if context is not None:  # the service continues the tokens, and needs no numbers of theirs
            context = replace(context, inference_logprobs=np.empty(0, np.float32), columns={})
        request = pb.GenerateRequest(
            context=None if context is None else sequence_to_proto(context),
            num_context_messages=self.num_context_messages,
            sampling=trajectory_pb2.SamplingParams()
            if self.sampling is None
            else SAMPLING.to_proto(self.sampling),
            turn=self.turn,
            num_samples=self.num_samples,
            adapter=self.adapter,
            template_name=self.template_name,
            tools=[tool_to_proto(tool) for tool in self.tools],
            template_options_json=json.dumps(dict(self.template_options))
            if self.template_options
            else "",
            truncate_prompt=self.truncate_prompt,
            skip_special_tokens=self.skip_special_tokens,
        )
        if not self.add_special_tokens:
            request.add_special_tokens = False
        if self.history is not None:
            request.history.prompt.CopyFrom(HISTORY.to_proto(as_history(self.history)))
        if self.text is not None:
            request.text = self.text
        if self.token_ids is not None:
            request.token_ids.CopyFrom(token_ids_to_proto([self.token_ids])[0])
        if self.partial_answer is not None:
            request.partial_answer.CopyFrom(sequence_to_proto(self.partial_answer))
        return request


def samples_from_proto(answer: pb.GenerateResponse) -> tuple[Sample, ...]:
    """Return the samples, each with what the answer says of all."""
    shared: dict[str, Any] = {
        "sampling": SAMPLING.from_proto(answer.sampling),
        "tokenizer_digest": answer.tokenizer_digest,
        "template_digest": answer.template_digest,
        "generate_s": answer.generate_s,
        "queue_s": answer.queue_s,
        "update_mode": UpdateMode(answer.update_mode or UpdateMode.RECOMPUTE),
        "num_truncated_tokens": answer.num_truncated_tokens,
        "warnings": tuple(answer.warnings),
    }
    return tuple(sample_from_proto(sample, shared) for sample in answer.samples)


def sample_from_proto(sample: pb.Sample, shared: Mapping[str, Any]) -> Sample:
    """Return one sample; `shared` holds the fields that it does not carry itself."""
    has_text = sample.HasField("text")
    return Sample(
        history=ChatHistory() if has_text else CHAT_HISTORY.from_proto(sample.history),
        text=ContinuedText(prompt=sample.text.prompt, response=sample.text.response)
        if has_text
        else None,
        sequence=sequence_from_proto(sample.sequence),
        stop_reason=StopReason(sample.stop_reason),
        stop_string=sample.stop_string,
        prompt_id=sample.prompt_id,
        sample_index=sample.sample_index,
        top_logprobs=top_logprobs_from_proto(sample.top_logprobs),
        model_digest=sample.model_digest,
        **shared,
    )


def top_logprobs_from_proto(rows: Iterable[pb.TopLogprobs]) -> tuple[dict[int, float], ...]:
    """Return each position's likeliest tokens with their log-probs."""
    return tuple(dict(zip(row.token_ids, row.logprobs, strict=True)) for row in rows)


def generated_to_proto(samples: AnySequence[Sample]) -> pb.GenerateResponse:
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
        top_logprobs=top_logprobs_to_proto(sample.top_logprobs),
        model_digest=sample.model_digest,
    )
    if sample.text is None:
        proto.history.CopyFrom(CHAT_HISTORY.to_proto(sample.history))
    else:
        proto.text.CopyFrom(TEXT.to_proto(sample.text))  # type: ignore[arg-type]  # same fields
    return proto


def top_logprobs_to_proto(rows: Iterable[Mapping[int, float]]) -> list[pb.TopLogprobs]:
    """Encode each position's likeliest tokens with their log-probs."""
    return [pb.TopLogprobs(token_ids=row, logprobs=row.values()) for row in rows]
