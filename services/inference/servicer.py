"""InferenceService and TemplateService: decode, call, encode."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidHistory, InvalidInput
from dialoop.tokenizer import RunningText
from dialoop.trajectory import SamplingParams
from dialoop.v1 import chat_pb2, template_service_pb2, template_service_pb2_grpc, trajectory_pb2
from dialoop.v1 import inference_service_pb2 as pb
from dialoop.v1 import inference_service_pb2_grpc as rpc
from dialoop.wire import (
    chat_history_from_proto,
    chat_history_to_proto,
    history_from_proto,
    policy_version_from_proto,
    policy_version_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    sequence_from_proto,
    sequence_to_proto,
)

from services.inference.publications import Manifest
from services.inference.rendering import Ask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc
    from dialoop.episode import Sample

    from services.inference.engine import Piece, Scored
    from services.inference.rendering import Renderer
    from services.inference.replica import Replica

    Context = grpc.aio.ServicerContext[Any, Any]

_MAX_SAMPLES = 1024


class InferenceServicer(rpc.InferenceServiceServicer):
    """Samples, log-probs and weights of one replica."""

    def __init__(
        self, replica: Replica, renderer: Renderer, *, num_parameters: int, max_new_tokens: int
    ) -> None:
        self._replica = replica
        self._renderer = renderer
        self._num_parameters = num_parameters
        self._max_new_tokens = max_new_tokens

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        return await self._generate(request)

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        # Filled by the engine's callback, drained here; at most one message's tokens wait in it.
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        generating = asyncio.ensure_future(self._generate(request.request, pieces))
        generating.add_done_callback(lambda _: pieces.put_nowait(None))
        text = RunningText(self._renderer.tokenizer)
        try:
            while (piece := await pieces.get()) is not None:
                yield _piece_response(piece, text)
            yield pb.GenerateStreamResponse(completed=await generating)
        finally:
            generating.cancel()  # a caller who leaves frees the engine's slot

    async def LogProb(self, request: pb.LogProbRequest, context: Context) -> pb.LogProbResponse:
        rows = [list(row.values) for row in request.token_ids]
        scored = await self._replica.logprobs(rows)
        return pb.LogProbResponse(
            logprobs=[_logprobs(one) for one in scored],
            policy_version=policy_version_to_proto(
                scored[0].policy_version if scored else self._replica.engine.policy_version
            ),
        )

    async def GetPolicy(
        self, request: pb.GetPolicyRequest, context: Context
    ) -> pb.GetPolicyResponse:
        replica, engine = self._replica, self._replica.engine
        return pb.GetPolicyResponse(
            policy_version=policy_version_to_proto(engine.policy_version),
            engine=engine.name,
            engine_version=engine.version,
            tokenizer_digest=self._renderer.tokenizer.digest,
            template_digest=self._renderer.template.digest,
            max_model_len=engine.max_model_len,
            ready=not replica.fault,
            reason=replica.fault,
            num_sampled_tokens=replica.num_sampled_tokens,
            num_requests_running=replica.num_requests_running,
            num_parameters=self._num_parameters,
        )

    async def LoadWeights(
        self, request_iterator: AsyncIterator[pb.LoadWeightsRequest], context: Context
    ) -> pb.LoadWeightsResponse:
        manifest = _manifest(await anext(aiter(request_iterator), None))
        chunks = _chunks(request_iterator)
        if manifest.path and await anext(chunks, None) is not None:
            raise _mismatch("The manifest names a path and chunks came too.")
        times = await self._replica.load(manifest, chunks)
        return pb.LoadWeightsResponse(
            policy_version=policy_version_to_proto(manifest.policy_version),
            pause_s=times.pause_s,
            load_s=times.load_s,
        )

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        await self._replica.pause()
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        await self._replica.resume()
        return pb.ResumeResponse()

    async def _generate(
        self, request: pb.GenerateRequest, pieces: asyncio.Queue[Piece | None] | None = None
    ) -> pb.GenerateResponse:
        started = time.perf_counter()
        sampling = self._sampling(request)
        prompt = self._renderer.prompt(_ask(request))
        sampled = await self._replica.sample(
            prompt.sequence.token_ids.tolist(),
            sampling,
            stop=self._renderer.stop_tokens(sampling.stop),
            num_samples=_num_samples(request),
            on_tokens=None if pieces is None else pieces.put_nowait,
        )
        return pb.GenerateResponse(
            samples=[_sample(self._renderer.sample(prompt, one)) for one in sampled],
            tokenizer_digest=self._renderer.tokenizer.digest,
            template_digest=self._renderer.template.digest,
            sampling=sampling_to_proto(sampling),
            queue_s=max(one.queue_s for one in sampled),
            generate_s=time.perf_counter() - started,
        )

    def _sampling(self, request: pb.GenerateRequest) -> SamplingParams:
        """What is asked, with the limits and temperature that hold when nothing is said."""
        asked = sampling_from_proto(request.sampling)
        return replace(
            asked,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            max_new_tokens=asked.max_new_tokens or self._max_new_tokens,
        )


class TemplateServicer(template_service_pb2_grpc.TemplateServiceServicer):
    """The replica's chat template."""

    def __init__(self, renderer: Renderer, name: str) -> None:
        self._renderer = renderer
        self._name = name

    async def ListTemplates(
        self, request: template_service_pb2.ListTemplatesRequest, context: Context
    ) -> template_service_pb2.ListTemplatesResponse:
        info = template_service_pb2.TemplateInfo(
            name=self._name, digest=self._renderer.template.digest
        )
        return template_service_pb2.ListTemplatesResponse(templates=[info])

    async def Render(
        self, request: template_service_pb2.RenderRequest, context: Context
    ) -> template_service_pb2.RenderResponse:
        history = history_from_proto(request.history)
        opens = request.add_generation_prompt if request.HasField("add_generation_prompt") else True
        text, sequence = self._renderer.rendered(history, add_generation_prompt=opens)
        return template_service_pb2.RenderResponse(text=text, sequence=sequence_to_proto(sequence))


def _ask(request: pb.GenerateRequest) -> Ask:
    has_context = request.HasField("context")
    history = chat_history_from_proto(request.history).require_prompt()
    if not len(history):
        raise InvalidHistory(
            "The prompt has no messages.", reason="PROMPT_MISSING", remedy="Send history.prompt."
        )
    return Ask(
        history=history,
        context=sequence_from_proto(request.context) if has_context else None,
        num_context_messages=request.num_context_messages,
        turn=request.turn,
    )


def _num_samples(request: pb.GenerateRequest) -> int:
    if not 0 <= request.num_samples <= _MAX_SAMPLES:
        raise InvalidInput(
            f"num_samples is {request.num_samples}.",
            reason="INVALID_SAMPLING",
            remedy=f"Ask for 1 to {_MAX_SAMPLES} samples.",
        )
    return request.num_samples or 1


def _sample(sample: Sample) -> pb.Sample:
    return pb.Sample(
        history=chat_history_to_proto(sample.history),
        sequence=sequence_to_proto(sample.sequence),
        stop_reason=trajectory_pb2.StopReason.Name(int(sample.stop_reason)),
        stop_string=sample.stop_string,
    )


def _piece_response(piece: Piece, text: RunningText) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(
        token_ids=piece.token_ids,
        inference_logprobs=piece.logprobs,
        policy_version=policy_version_to_proto(piece.policy_version),
        text=text.add(piece.token_ids),
    )


def _logprobs(scored: Scored) -> chat_pb2.LogProbValues:
    return chat_pb2.LogProbValues(values=scored.logprobs.tolist(), start=1)


async def _chunks(requests: AsyncIterator[pb.LoadWeightsRequest]) -> AsyncIterator[bytes]:
    async for request in requests:
        if request.WhichOneof("content") != "chunk":
            raise _mismatch("Something other than a chunk followed the manifest.")
        yield request.chunk


def _manifest(request: pb.LoadWeightsRequest | None) -> Manifest:
    if request is None or request.WhichOneof("content") != "manifest":
        raise _mismatch("The stream does not begin with a manifest.")
    proto = request.manifest
    if not proto.policy_version.lineage or proto.num_bytes <= 0:
        raise _mismatch("The manifest lacks a policy version or num_bytes.")
    return Manifest(
        policy_version=policy_version_from_proto(proto.policy_version),
        sha256=proto.sha256,
        num_bytes=proto.num_bytes,
        path=proto.path,
    )


def _mismatch(message: str) -> InvalidInput:
    return InvalidInput(
        message,
        reason="MANIFEST_MISMATCH",
        remedy="Send a manifest, then the chunks it describes, or none when it names a path.",
    )
