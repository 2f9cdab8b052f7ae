"""InferenceClient: samples and log-probs of the policy, and its weights, in domain types."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dialoop.clients.channel import Rpc
from dialoop.episode import Sample
from dialoop.trajectory import StopReason
from dialoop.v1 import chat_pb2, trajectory_pb2
from dialoop.v1 import inference_service_pb2 as pb
from dialoop.v1 import template_service_pb2 as template_pb
from dialoop.wire import (
    chat_history_from_proto,
    history_to_proto,
    policy_version_from_proto,
    policy_version_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    sequence_from_proto,
    sequence_to_proto,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from dialoop.chat import History
    from dialoop.clients.channel import Channel
    from dialoop.sequences import Floats, PolicyVersion, Sequence
    from dialoop.trajectory import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleChunk:
    """Some tokens of a running generation; `samples` is filled on the last chunk only."""

    token_ids: tuple[int, ...]
    inference_logprobs: tuple[float, ...]
    policy_version: PolicyVersion | None
    text: str
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLogProbs:
    """Log-probs in nats, float32 [L - 1] per row: of the tokens from position 1 on."""

    logprobs: tuple[Floats, ...]
    policy_version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    """What an inference replica serves, and how busy it is."""

    policy_version: PolicyVersion | None
    engine: str
    engine_version: str
    tokenizer_digest: str
    template_digest: str
    max_model_len: int
    ready: bool
    reason: str
    num_sampled_tokens: int
    num_requests_running: int
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsManifest:
    """What is published: version, sha256 (hex) and size of the safetensors bytes.

    `path` names a file under the server's weights root; empty when chunks follow.
    """

    policy_version: PolicyVersion
    sha256: str
    num_bytes: int
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """A load that succeeded, and how long generation stood still for it."""

    policy_version: PolicyVersion
    pause_s: float
    load_s: float


def _rpc(name: str, request: type[Any], answer: type[Any], **options: Any) -> Rpc[Any, Any]:
    return Rpc(f"/dialoop.v1.InferenceService/{name}", request, answer, **options)


# A sample whose answer was lost was never used, so sampling again does no harm.
GENERATE = _rpc(
    "Generate", pb.GenerateRequest, pb.GenerateResponse, is_retried=True, deadline_s=600.0
)
GENERATE_STREAM = _rpc("GenerateStream", pb.GenerateStreamRequest, pb.GenerateStreamResponse)
LOG_PROB = _rpc("LogProb", pb.LogProbRequest, pb.LogProbResponse, is_retried=True, deadline_s=600.0)
GET_POLICY = _rpc("GetPolicy", pb.GetPolicyRequest, pb.GetPolicyResponse, is_retried=True)
LOAD_WEIGHTS = _rpc("LoadWeights", pb.LoadWeightsRequest, pb.LoadWeightsResponse, deadline_s=600.0)
PAUSE = _rpc("Pause", pb.PauseRequest, pb.PauseResponse, is_retried=True)
RESUME = _rpc("Resume", pb.ResumeRequest, pb.ResumeResponse, is_retried=True)
LIST_TEMPLATES: Rpc[Any, Any] = Rpc(
    "/dialoop.v1.TemplateService/ListTemplates",
    template_pb.ListTemplatesRequest,
    template_pb.ListTemplatesResponse,
    is_retried=True,
)
RENDER: Rpc[Any, Any] = Rpc(
    "/dialoop.v1.TemplateService/Render",
    template_pb.RenderRequest,
    template_pb.RenderResponse,
    is_retried=True,
)


class InferenceClient:
    """Asks one inference replica; satisfies `dialoop.episode.Policy`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def generate(
        self,
        history: History,
        *,
        context: Sequence | None = None,
        num_context_messages: int = 0,
        sampling: SamplingParams | None = None,
        turn: int = 0,
        num_samples: int = 1,
    ) -> tuple[Sample, ...]:
        """Answer the prompt `num_samples` times; `context` are the tokens known so far."""
        request = _generate_request(
            history, context, num_context_messages, sampling, turn, num_samples
        )
        return _samples_from_proto(await self._channel.call(GENERATE, request))

    async def generate_stream(
        self,
        history: History,
        *,
        context: Sequence | None = None,
        num_context_messages: int = 0,
        sampling: SamplingParams | None = None,
        turn: int = 0,
    ) -> AsyncIterator[SampleChunk]:
        """Tokens as they are sampled; the last chunk carries the whole sample."""
        request = _generate_request(history, context, num_context_messages, sampling, turn, 1)
        stream = pb.GenerateStreamRequest(request=request)
        async for answer in self._channel.stream(GENERATE_STREAM, stream):
            yield SampleChunk(
                token_ids=tuple(answer.token_ids),
                inference_logprobs=tuple(answer.inference_logprobs),
                policy_version=_version_of(answer),
                text=answer.text,
                samples=_samples_from_proto(answer.completed)
                if answer.HasField("completed")
                else (),
            )

    async def logprobs(self, rows: Iterable[Iterable[int]]) -> PolicyLogProbs:
        """Log-probs of given token ids under the loaded policy."""
        request = pb.LogProbRequest(token_ids=token_ids_to_proto(rows))
        answer = await self._channel.call(LOG_PROB, request)
        return PolicyLogProbs(
            logprobs=logprobs_from_proto(answer.logprobs),
            policy_version=policy_version_from_proto(answer.policy_version),
        )

    async def get_policy(self) -> PolicyStatus:
        """Which policy the replica serves and whether it is ready."""
        answer = await self._channel.call(GET_POLICY, pb.GetPolicyRequest())
        return PolicyStatus(
            policy_version=_version_of(answer),
            engine=answer.engine,
            engine_version=answer.engine_version,
            tokenizer_digest=answer.tokenizer_digest,
            template_digest=answer.template_digest,
            max_model_len=answer.max_model_len,
            ready=answer.ready,
            reason=answer.reason,
            num_sampled_tokens=answer.num_sampled_tokens,
            num_requests_running=answer.num_requests_running,
            num_parameters=answer.num_parameters,
        )

    async def load_weights(
        self,
        manifest: WeightsManifest,
        chunks: AsyncIterable[bytes] | Iterable[bytes] = (),
        *,
        deadline_s: float | None = None,
    ) -> LoadedWeights:
        """Load a published policy: from `manifest.path`, or from chunks when that is empty."""
        requests = _weights_requests(manifest, chunks)
        answer = await self._channel.upload(LOAD_WEIGHTS, requests, deadline_s=deadline_s)
        return LoadedWeights(
            policy_version=policy_version_from_proto(answer.policy_version),
            pause_s=answer.pause_s,
            load_s=answer.load_s,
        )

    async def pause(self) -> None:
        """Stop sampling; requests in flight keep their place."""
        await self._channel.call(PAUSE, pb.PauseRequest())

    async def resume(self) -> None:
        """Go on sampling."""
        await self._channel.call(RESUME, pb.ResumeRequest())

    async def list_templates(self) -> dict[str, str]:
        """The chat templates by name, with their digests."""
        request = template_pb.ListTemplatesRequest()
        answer = await self._channel.call(LIST_TEMPLATES, request)
        return {template.name: template.digest for template in answer.templates}

    async def render(
        self, history: History, *, add_generation_prompt: bool = True
    ) -> tuple[str, Sequence]:
        """The conversation as the policy sees it: text and tokens."""
        request = template_pb.RenderRequest(
            history=history_to_proto(history), add_generation_prompt=add_generation_prompt
        )
        answer = await self._channel.call(RENDER, request)
        return answer.text, sequence_from_proto(answer.sequence)


def token_ids_to_proto(rows: Iterable[Iterable[int]]) -> list[chat_pb2.TokenIds]:
    """Rows of token ids."""
    return [chat_pb2.TokenIds(values=[int(token) for token in row]) for row in rows]


def logprobs_from_proto(rows: Iterable[chat_pb2.LogProbValues]) -> tuple[Floats, ...]:
    """Rows of log-probs, float32, from position 1 on."""
    return tuple(np.array(row.values, dtype=np.float32) for row in rows)


def _generate_request(
    history: History,
    context: Sequence | None,
    num_context_messages: int,
    sampling: SamplingParams | None,
    turn: int,
    num_samples: int,
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        history=chat_pb2.ChatHistory(prompt=history_to_proto(history)),
        context=None if context is None else sequence_to_proto(context),
        num_context_messages=num_context_messages,
        sampling=trajectory_pb2.SamplingParams()
        if sampling is None
        else sampling_to_proto(sampling),
        turn=turn,
        num_samples=num_samples,
    )


def _samples_from_proto(answer: pb.GenerateResponse) -> tuple[Sample, ...]:
    sampling = sampling_from_proto(answer.sampling)
    return tuple(
        Sample(
            history=chat_history_from_proto(sample.history),
            sequence=sequence_from_proto(sample.sequence),
            stop_reason=StopReason(sample.stop_reason),
            stop_string=sample.stop_string,
            sampling=sampling,
            tokenizer_digest=answer.tokenizer_digest,
            template_digest=answer.template_digest,
            generate_s=answer.generate_s,
        )
        for sample in answer.samples
    )


def _version_of(answer: pb.GetPolicyResponse | pb.GenerateStreamResponse) -> PolicyVersion | None:
    if not answer.HasField("policy_version"):
        return None
    return policy_version_from_proto(answer.policy_version)


async def _weights_requests(
    manifest: WeightsManifest, chunks: AsyncIterable[bytes] | Iterable[bytes]
) -> AsyncIterator[pb.LoadWeightsRequest]:
    yield pb.LoadWeightsRequest(
        manifest=pb.WeightsManifest(
            policy_version=policy_version_to_proto(manifest.policy_version),
            sha256=manifest.sha256,
            num_bytes=manifest.num_bytes,
            path=manifest.path,
        )
    )
    if isinstance(chunks, AsyncIterable):
        async for chunk in chunks:
            yield pb.LoadWeightsRequest(chunk=chunk)
    else:
        for chunk in chunks:
            yield pb.LoadWeightsRequest(chunk=chunk)
