"""Serve InferenceService and TemplateService from an engine."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dialoop.clients.inference_messages import (
    generated_to_proto,
    sample_to_proto,
    top_logprobs_to_proto,
)
from dialoop.tokens.tokenizer import RunningText
from dialoop.trajectory import SamplingParams
from dialoop.v1 import chat_pb2
from dialoop.v1 import inference_service_pb2 as pb
from dialoop.v1 import inference_service_pb2_grpc as rpc
from dialoop.wire.messages import HISTORY, logprobs_to_proto
from dialoop.wire.records import FAILURE, REWARD, SAMPLING, TASK, TRAJECTORY
from dialoop.wire.sequences import POLICY_VERSION, sequence_to_proto

from dialoop_services.inference.generate import generate, routing_of
from dialoop_services.inference.recordings.store import (
    CallState,
    RecordingLimits,
    RecordingSpec,
    RecordingStore,
)
from dialoop_services.inference.recordings.trajectory import Closing, close
from dialoop_services.inference.rendering import GenerationRequest, Renderer, apart
from dialoop_services.inference.replica.device_lease import DRAIN_S
from dialoop_services.inference.requests import (
    contents_of,
    full_of,
    generation_request_of,
    manifest_of,
    rows_field,
)
from dialoop_services.runtime.calls import announce_start

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    import grpc
    from dialoop.episode import Sample
    from dialoop.sequences import Sequence

    from dialoop_services.inference.engine import TokenChunk
    from dialoop_services.inference.replica.replica import Replica

    Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(rpc.InferenceServiceServicer):
    """Samples, log-probs and weights of one replica."""

    def __init__(
        self,
        replica: Replica,
        renderer: Renderer,
        *,
        num_parameters: int,
        max_new_tokens: int,
        store: RecordingStore | None = None,
    ) -> None:
        self._recordings = store or RecordingStore(RecordingLimits())
        self._replica = replica
        self._renderer = renderer
        self._num_parameters = num_parameters
        self._max_new_tokens = max_new_tokens

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        await announce_start(context)
        return await self._generate(request)

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        await announce_start(context)
        # Filled by the engine's callback, drained here; at most one message's tokens wait in it.
        chunks: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
        gathered = _gather_chunks(chunks, request.chunk_tokens)
        generating = asyncio.ensure_future(self._generate(request.request, chunks))
        generating.add_done_callback(lambda _: chunks.put_nowait(None))
        text = RunningText(self._renderer.tokenizer)
        skips = request.request.skip_special_tokens and not request.request.HasField("history")
        try:
            async for chunk in gathered:
                yield _chunk_to_proto(chunk, text, self._visible_ids(chunk, skips_special=skips))
            yield pb.GenerateStreamResponse(completed=await generating)
        finally:
            generating.cancel()  # free the engine's slot when the caller leaves

    async def LogProb(self, request: pb.LogProbRequest, context: Context) -> pb.LogProbResponse:
        await announce_start(context)
        rows, sequences = await apart(self._rows, request, size=request.ByteSize())
        scored = await self._replica.logprobs(rows, adapter=request.adapter)
        return pb.LogProbResponse(
            logprobs=logprobs_to_proto(row.logprobs for row in scored),
            policy_version=POLICY_VERSION.to_proto(scored[0].policy_version),
            sequences=[sequence_to_proto(sequence) for sequence in sequences],
            distribution=chat_pb2.DISTRIBUTION_RAW,
            model_digest=self._replica.model_digest(request.adapter, scored[0].policy_version),
        )

    async def GetPolicy(
        self, request: pb.GetPolicyRequest, context: Context
    ) -> pb.GetPolicyResponse:
        replica, engine = self._replica, self._replica.engine
        return pb.GetPolicyResponse(
            policy_version=POLICY_VERSION.to_proto(engine.policy_version),
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
            adapters=[
                pb.AdapterInfo(name=name, policy_version=POLICY_VERSION.to_proto(version))
                for name, version in sorted(replica.adapters.items())
            ],
            data_planes=replica.data_planes,
            model_digest=replica.model_digest(),
        )

    async def LoadWeights(
        self, request_iterator: AsyncIterator[pb.LoadWeightsRequest], context: Context
    ) -> pb.LoadWeightsResponse:
        manifest = manifest_of(await anext(aiter(request_iterator), None))
        times = await self._replica.load(manifest, contents_of(request_iterator))
        return pb.LoadWeightsResponse(
            policy_version=POLICY_VERSION.to_proto(manifest.policy_version),
            pause_s=times.pause_s,
            load_s=times.load_s,
        )

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterResponse:
        unloaded = await self._replica.unload_adapter(request.adapter)
        return pb.UnloadAdapterResponse(unloaded=unloaded)

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        await self._replica.pause()
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        await self._replica.resume()
        return pb.ResumeResponse()

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepResponse:
        await self._replica.sleep(drain_s=request.drain_s or DRAIN_S)
        return pb.SleepResponse()

    async def Wake(self, request: pb.WakeRequest, context: Context) -> pb.WakeResponse:
        await self._replica.wake()
        return pb.WakeResponse()

    async def CreateRecording(
        self, request: pb.CreateRecordingRequest, context: Context
    ) -> pb.CreateRecordingResponse:
        recording_id = request.recording_id or uuid.uuid4().hex
        has_sampling = request.HasField("sampling")
        recording = self._recordings.create(
            RecordingSpec(
                recording_id=recording_id,
                group_id=request.group_id,
                task=TASK.from_proto(request.task) if request.HasField("task") else None,
                sampling=(
                    SAMPLING.from_proto(request.sampling) if has_sampling else SamplingParams()
                ),
                time_to_live_s=request.time_to_live_s,
            )
        )
        return pb.CreateRecordingResponse(
            base_path=f"/recordings/{recording_id}/v1",
            recording_id=recording_id,
            time_to_live_s=recording.time_to_live_s,
            key=recording.key,
        )

    async def GetRecording(
        self, request: pb.GetRecordingRequest, context: Context
    ) -> pb.GetRecordingResponse:
        recording = self._recordings.find(request.recording_id)
        return pb.GetRecordingResponse(
            recording_id=request.recording_id,
            calls=[
                pb.RecordedCall(
                    call_id=call.call_id,
                    prompt=HISTORY.to_proto(call.prompt.prompt.history),
                    samples=[sample_to_proto(choice.sample) for choice in call.choices],
                    sampling=SAMPLING.to_proto(call.sampling),
                    sequence_indices=recording.sequence_indices.get(call.call_id, ()),
                    failure=None if call.failure is None else FAILURE.to_proto(call.failure),
                )
                for call in recording.calls
                if call.state is not CallState.REFUSED
            ],
            closed=recording.is_closed,
        )

    async def CloseRecording(
        self, request: pb.CloseRecordingRequest, context: Context
    ) -> pb.CloseRecordingResponse:
        closing = Closing(
            rewards=tuple(REWARD.from_proto(reward) for reward in request.rewards),
            failures=tuple(FAILURE.from_proto(failure) for failure in request.failures),
            labels=dict(request.labels),
            tokenizer_digest=self._renderer.tokenizer.digest,
            template_digest=self._renderer.template.digest,
        )
        trajectory = close(self._recordings.find(request.recording_id), closing)
        return pb.CloseRecordingResponse(trajectory=TRAJECTORY.to_proto(trajectory))

    async def _generate(
        self, request: pb.GenerateRequest, chunks: asyncio.Queue[TokenChunk | None] | None = None
    ) -> pb.GenerateResponse:
        samples = await generate(
            generation_request_of(request, max_new_tokens=self._max_new_tokens),
            partial(
                self._replica.sample,
                adapter=request.adapter,
                on_tokens=None if chunks is None else chunks.put_nowait,
            ),
            renderer=self._renderer,
            max_model_len=self._replica.engine.max_model_len,
            routing=routing_of(self._replica.engine),
        )
        return generated_to_proto(
            [replace(s, model_digest=self._model_digest_of(s, request.adapter)) for s in samples]
        )

    def _model_digest_of(self, sample: Sample, adapter: str) -> str:
        versions = (segment.policy_version for segment in reversed(sample.sequence.segments))
        return self._replica.model_digest(adapter, next(filter(None, versions), None))

    def _visible_ids(self, chunk: TokenChunk, *, skips_special: bool) -> Iterable[int]:
        """Return the tokens of a chunk that the text shows."""
        is_special = self._renderer.tokenizer.is_special
        return [i for i in chunk.token_ids if not (skips_special and is_special(i))]

    def _rows(self, request: pb.LogProbRequest) -> tuple[list[list[int]], list[Sequence]]:
        """Return the ids to score, and the sequences that were made from texts or histories."""
        field, longest = rows_field(request), self._replica.engine.max_model_len
        if field == "token_ids":
            return [list(row.values) for row in request.token_ids], []
        if field == "texts":
            sequences = [
                self._renderer.prompt(GenerationRequest(text=text), max_model_len=longest).sequence
                for text in request.texts
            ]
        else:
            histories = [full_of(history) for history in request.histories]
            for history in histories:
                self._renderer.require_may_fit(GenerationRequest(history=history), longest)
            sequences = [
                self._renderer.render(history, add_generation_prompt=False)[1]
                for history in histories
            ]
        return [sequence.token_ids.tolist() for sequence in sequences], sequences


async def _gather_chunks(
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


def _chunk_to_proto(
    chunk: TokenChunk, text: RunningText, shown: Iterable[int]
) -> pb.GenerateStreamResponse:
    """Encode tokens of a stream, and the text that the `shown` ones add in whole characters."""
    return pb.GenerateStreamResponse(
        token_ids=chunk.token_ids,
        inference_logprobs=chunk.logprobs,
        policy_version=POLICY_VERSION.to_proto(chunk.policy_version),
        text=text.add(shown),
        top_logprobs=top_logprobs_to_proto(chunk.top_logprobs),
    )
