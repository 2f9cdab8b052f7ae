"""The rpcs of recordings, as a base class of InferenceServicer: decode, call, encode."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from dialoop.trajectory import SamplingParams
from dialoop.v1 import inference_service_pb2 as pb
from dialoop.wire.messages import HISTORY
from dialoop.wire.records import FAILURE, REWARD, SAMPLING, TASK, TRAJECTORY

from dialoop_services.inference.answers import sample_to_proto
from dialoop_services.inference.recordings.store import CallState, RecordingSpec, RecordingStore
from dialoop_services.inference.recordings.trajectory import Closing, close

if TYPE_CHECKING:
    import grpc

    from dialoop_services.inference.recordings.store import CallRecord, Recording
    from dialoop_services.inference.rendering import Renderer

    Context = grpc.aio.ServicerContext[Any, Any]


class RecordingRpcs:
    """Serves CreateRecording, GetRecording and CloseRecording."""

    def __init__(self, store: RecordingStore, renderer: Renderer) -> None:
        self._store = store
        self._digests = (renderer.tokenizer.digest, renderer.template.digest)

    async def CreateRecording(  # noqa: N802 - gRPC's names
        self, request: pb.CreateRecordingRequest, context: Context
    ) -> pb.CreateRecordingResponse:
        """Create a recording under the caller's id, or a new one."""
        recording_id = request.recording_id or uuid.uuid4().hex
        has_sampling = request.HasField("sampling")
        recording = self._store.create(
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

    async def GetRecording(  # noqa: N802
        self, request: pb.GetRecordingRequest, context: Context
    ) -> pb.GetRecordingResponse:
        """Return the calls so far."""
        recording = self._store.find(request.recording_id)
        return pb.GetRecordingResponse(
            recording_id=request.recording_id,
            calls=[
                _call(call, recording)
                for call in recording.calls
                if call.state is not CallState.REFUSED
            ],
            closed=recording.is_closed,
        )

    async def CloseRecording(  # noqa: N802
        self, request: pb.CloseRecordingRequest, context: Context
    ) -> pb.CloseRecordingResponse:
        """Close the recording and return its trajectory."""
        tokenizer_digest, template_digest = self._digests
        closing = Closing(
            rewards=tuple(REWARD.from_proto(reward) for reward in request.rewards),
            failures=tuple(FAILURE.from_proto(failure) for failure in request.failures),
            labels=dict(request.labels),
            tokenizer_digest=tokenizer_digest,
            template_digest=template_digest,
        )
        trajectory = close(self._store.find(request.recording_id), closing)
        return pb.CloseRecordingResponse(trajectory=TRAJECTORY.to_proto(trajectory))


def _call(call: CallRecord, recording: Recording) -> pb.RecordedCall:
    return pb.RecordedCall(
        call_id=call.call_id,
        prompt=HISTORY.to_proto(call.prompt.prompt.history),
        samples=[sample_to_proto(choice.sample) for choice in call.choices],
        sampling=SAMPLING.to_proto(call.sampling),
        sequence_indices=recording.sequence_indices.get(call.call_id, ()),
        failure=None if call.failure is None else FAILURE.to_proto(call.failure),
    )
