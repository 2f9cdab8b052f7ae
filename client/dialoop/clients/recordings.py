"""RecordingClient: recordings of OpenAI-compatible calls, in domain types.

recordings = RecordingClient(channel, rest_url="http://127.0.0.1:8002")
agent = await recordings.create("r-1", task=task)  # for any OpenAI client:
agent.base_url, agent.api_key                      # http://127.0.0.1:8002/recordings/r-1/v1, "..."
...
trajectory = await recordings.close("r-1", rewards=(Reward(name="solved", value=1.0),))
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from dialoop.agents import AgentConnection
from dialoop.chat import History
from dialoop.clients.channel import Channel, rpc_of
from dialoop.clients.inference_messages import sample_from_proto
from dialoop.episode import Sample
from dialoop.trajectory import Failure, Reward, SamplingParams, Task, Trajectory
from dialoop.v1 import inference_service_pb2 as pb
from dialoop.wire.messages import HISTORY
from dialoop.wire.records import FAILURE, REWARD, SAMPLING, TASK, TRAJECTORY


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One call of an agent.

    samples: one for each choice; their sequences hold the tokens after those that the call
    continues. sequence_indices: where the choices stand in the trajectory, once there is one.
    failure: why the call was cut short, if it was; its tokens are in no sequence.
    """

    call_id: str
    prompt: History
    samples: tuple[Sample, ...]
    sampling: SamplingParams
    sequence_indices: tuple[int, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingState:
    """The calls of a recording in the order in which they came."""

    recording_id: str
    calls: tuple[RecordedCall, ...]
    is_closed: bool


# All are safe to repeat: a recording has the caller's id, and closing again changes nothing.
_rpc = partial(rpc_of, pb, "InferenceService", is_retried=True)
CREATE = _rpc("CreateRecording")
GET = _rpc("GetRecording")
CLOSE = _rpc("CloseRecording")


class RecordingClient:
    """Recordings of one inference replica; satisfies `dialoop.agents.Recordings`.

    rest_url: of the replica's REST server, where the calls go.
    """

    def __init__(self, channel: Channel, *, rest_url: str) -> None:
        self._channel = channel
        self._rest_url = rest_url.rstrip("/")

    async def create(
        self,
        recording_id: str = "",
        *,
        group_id: str = "",
        task: Task | None = None,
        sampling: SamplingParams | None = None,
        time_to_live_s: float = 0.0,
    ) -> AgentConnection:
        """Begin a recording, under a new id without one; return what an agent connects with.

        Its key opens this recording alone. `sampling` holds where a call says nothing. Raises
        InvalidInput (BAD_RECORDING_ID), AlreadyExists (RECORDING_EXISTS), CapacityExhausted
        (TOO_MANY_RECORDINGS).
        """
        request = pb.CreateRecordingRequest(
            recording_id=recording_id or uuid.uuid4().hex,
            group_id=group_id,
            task=None if task is None else TASK.to_proto(task),
            sampling=None if sampling is None else SAMPLING.to_proto(sampling),
            time_to_live_s=time_to_live_s,
        )
        answer = await self._channel.call(CREATE, request)
        return AgentConnection(
            base_url=f"{self._rest_url}{answer.base_path}", api_key=answer.key or "none"
        )

    async def get(self, recording_id: str) -> RecordingState:
        """Return the calls so far; NotFound (RECORDING_NOT_FOUND) without the recording."""
        answer = await self._channel.call(GET, pb.GetRecordingRequest(recording_id=recording_id))
        return RecordingState(
            recording_id=answer.recording_id,
            calls=tuple(_call(call) for call in answer.calls),
            is_closed=answer.closed,
        )

    async def close(
        self,
        recording_id: str,
        *,
        rewards: Iterable[Reward] = (),
        failures: Iterable[Failure] = (),
        labels: Mapping[str, str] | None = None,
    ) -> Trajectory:
        """End the recording and take its trajectory; a second close gives the same one.

        Raises NotFound (RECORDING_NOT_FOUND) and PreconditionFailed (RECORDING_EMPTY).
        """
        request = pb.CloseRecordingRequest(
            recording_id=recording_id,
            rewards=[REWARD.to_proto(reward) for reward in rewards],
            failures=[FAILURE.to_proto(failure) for failure in failures],
            labels=dict(labels or {}),
        )
        return TRAJECTORY.from_proto((await self._channel.call(CLOSE, request)).trajectory)


def _call(proto: pb.RecordedCall) -> RecordedCall:
    sampling = SAMPLING.from_proto(proto.sampling)
    return RecordedCall(
        call_id=proto.call_id,
        prompt=HISTORY.from_proto(proto.prompt),
        samples=tuple(sample_from_proto(row, {"sampling": sampling}) for row in proto.samples),
        sampling=sampling,
        sequence_indices=tuple(proto.sequence_indices),
        failure=FAILURE.from_proto(proto.failure) if proto.HasField("failure") else None,
    )
