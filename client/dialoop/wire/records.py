"""Tasks, trajectories and groups to protobuf and back.

A new field needs a row only where `codec` cannot tell what it is by its name alone.
"""

from __future__ import annotations

import numpy as np

from dialoop.chat import History
from dialoop.errors import InvalidHistory
from dialoop.sequences import TokenValues
from dialoop.trajectory import (
    DoneReason,
    Failure,
    Group,
    Owner,
    Purpose,
    Reward,
    SamplingParams,
    StopReason,
    Task,
    Trajectory,
    Turn,
)
from dialoop.v1 import scorer_service_pb2
from dialoop.v1 import trajectory_pb2 as pb
from dialoop.wire.codec import Codec, FieldRow, array, each, enum, many, submessage
from dialoop.wire.messages import HISTORY
from dialoop.wire.sequences import sequence_from_proto, sequence_to_proto


def _history(proto: pb.Trajectory) -> History:
    if not proto.history.messages:
        raise InvalidHistory(
            f"Trajectory {proto.trajectory_id} has no messages.", remedy="Record its history."
        )
    return HISTORY.from_proto(proto.history)


TOKEN_VALUES = Codec(
    TokenValues,
    scorer_service_pb2.TokenValues,
    positions=array(np.int32),
    values=array(np.float32),
)
SAMPLING = Codec(SamplingParams, pb.SamplingParams)
TASK = Codec(Task, pb.Task, purpose=enum(Purpose), sampling=submessage(SAMPLING))
REWARD = Codec(Reward, pb.Reward)
TURN = Codec(Turn, pb.Turn, rewards=many(REWARD), stop_reason=enum(StopReason))
FAILURE = Codec(Failure, pb.Failure, owner=enum(Owner))
TRAJECTORY = Codec(
    Trajectory,
    pb.Trajectory,
    history=FieldRow(
        lambda history: {"history": HISTORY.to_proto(history)}, _history, spreads=True
    ),
    turns=many(TURN),
    sequences=each(sequence_to_proto, sequence_from_proto),
    failures=many(FAILURE),
    sampling=submessage(SAMPLING),
    done_reason=enum(DoneReason),
)
GROUP = Codec(Group, pb.Group, task=submessage(TASK), trajectories=many(TRAJECTORY))
