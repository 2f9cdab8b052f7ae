from __future__ import annotations

import numpy as np
import pydantic_core
import pytest
from dialoop.chat import ChatHistory, ContentPart, History, Message, ToolCall
from dialoop.errors import InvalidHistory, InvalidInput, InvalidSequence
from dialoop.sequences import (
    Along,
    Column,
    ForkCause,
    PolicyVersion,
    Segment,
    Sequence,
    Source,
    sequence_of,
)
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
from dialoop.v1 import chat_pb2, trajectory_pb2
from dialoop.wire.messages import CHAT_HISTORY, HISTORY, MESSAGE
from dialoop.wire.records import GROUP, TASK, TRAJECTORY
from dialoop.wire.records import SAMPLING as SAMPLING_CODEC
from dialoop.wire.sequences import column_to_proto, sequence_from_proto, sequence_to_proto
from dialoop_services.rest.schema import decode, models
from hypothesis import given
from hypothesis import strategies as st

TEXT = st.text(max_size=8)
VERSION = PolicyVersion(lineage="main", number=3)
PARTS = st.builds(
    ContentPart,
    type=st.sampled_from(["text", "image"]),
    text=st.none() | TEXT,
    data=st.none() | st.binary(max_size=4),
    size=st.none() | st.integers(0, 2**40),
)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["user", "assistant", "tool"]),
    content=TEXT | st.lists(PARTS, max_size=2).map(tuple),
    is_complete=st.booleans(),
    tool_calls=st.lists(
        st.builds(ToolCall, name=TEXT, arguments_json=TEXT, id=TEXT), max_size=2
    ).map(tuple),
    tool_responses=st.lists(TEXT, max_size=2).map(tuple),
)
HISTORIES = st.lists(MESSAGES, max_size=3).map(lambda messages: History(tuple(messages)))
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.none() | st.sampled_from([0.0, 0.5, 1.0]),
    top_p=st.none() | st.sampled_from([0.5, 1.0]),
    top_k=st.none() | st.integers(1, 50),
    max_new_tokens=st.none() | st.integers(1, 4096),
    stop=st.lists(TEXT, max_size=2).map(tuple),
    seed=st.none() | st.integers(0, 2**40),
)
TURNS = st.builds(
    Turn,
    message_start=st.integers(0, 9),
    num_messages=st.integers(0, 9),
    rewards=st.lists(
        st.builds(
            Reward,
            name=TEXT,
            value=st.sampled_from([0.0, 1.0, -0.5]),
            weight=st.sampled_from([0.0, 1.0, 0.25]),
            success=st.none() | st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
    stop_reason=st.sampled_from(StopReason),
    num_tool_calls=st.integers(0, 3),
)


@st.composite
def sequences(draw):
    pieces, count = [], 0
    for source in draw(st.lists(st.sampled_from(Source), max_size=4)):
        ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3))
        fields = {"source": source, "turn": draw(st.integers(0, 3))}
        fields["message_index"] = draw(st.none() | st.integers(0, 5))
        if source is Source.MODEL:
            fields["policy_version"] = PolicyVersion(lineage="m", number=draw(st.integers(0, 9)))
            count += len(ids)
        pieces.append((ids, fields))
    logprobs = draw(st.just([]) | st.just([-0.5] * count))
    return sequence_of(pieces, logprobs=logprobs)


@st.composite
def groups(draw):
    task = Task(
        task_id="t",
        environment="e",
        split="train",
        key="k",
        epoch=draw(st.integers(0, 9)),
        purpose=draw(st.sampled_from(Purpose)),
        sampling=draw(SAMPLING),
    )
    trajectory = Trajectory(
        trajectory_id="a",
        group_id="t#1",
        task_key="k",
        seed=draw(st.integers(0, 2**40)),
        environment="e",
        environment_version="1",
        history=draw(HISTORIES.filter(len)),
        turns=tuple(draw(st.lists(TURNS, max_size=2))),
        sequences=tuple(draw(st.lists(sequences(), max_size=2))),
        failures=tuple(
            Failure(owner=owner, reason="R", message="m")
            for owner in draw(st.lists(st.sampled_from(Owner), max_size=2))
        ),
        sampling=draw(SAMPLING),
        terminated=draw(st.booleans()),
        done_reason=draw(st.sampled_from(DoneReason)),
        labels=draw(st.dictionaries(TEXT, TEXT, max_size=2)),
    )
    return Group(group_id="t#1", task=task, trajectories=(trajectory,))


@given(groups())
def test_a_group_survives_the_wire(group):
    sent = GROUP.to_proto(group).SerializeToString()
    assert GROUP.from_proto(trajectory_pb2.Group.FromString(sent)) == group


@given(prompt=st.none() | HISTORIES, response=st.none() | HISTORIES)
def test_absent_and_empty_histories_stay_apart(prompt, response):
    chat = ChatHistory(prompt=prompt, response=response)
    assert CHAT_HISTORY.from_proto(CHAT_HISTORY.to_proto(chat)) == chat


@given(SAMPLING)
def test_neutral_sampling_stays_absent(sampling):
    assert SAMPLING_CODEC.from_proto(SAMPLING_CODEC.to_proto(sampling)) == sampling
    assert not SAMPLING_CODEC.to_proto(SamplingParams()).ByteSize()


def test_an_absent_is_complete_is_true_and_an_absent_weight_is_1():
    assert MESSAGE.from_proto(chat_pb2.Message(role="user", content="x")).is_complete
    assert not MESSAGE.to_proto(Message(role="user")).HasField("is_complete")


def test_arrays_arrive_in_the_domains_types():
    proto = trajectory_pb2.Sequence(
        columns=[column_to_proto("token_ids", Along.TOKENS, np.array([1, 2], np.int32))],
        segments=[trajectory_pb2.Segment(start=0, length=2, source=1)],
    )
    sequence = sequence_from_proto(proto)
    assert sequence.token_ids.dtype == np.int32
    assert sequence.inference_logprobs.dtype == np.float32
    assert sequence.fork_cause is ForkCause.NONE
    assert sequence.advantage is None


@pytest.mark.parametrize("dtype", ["?", "u1", "u2", "i4", "i8", "f2", "f4", "f8", ">i4", ">f8"])
def test_columns_of_every_type_keep_their_bits(dtype):
    values = np.array([[0, 1], [2, 3], [255, 7]]).astype(dtype)
    segments = (Segment(start=0, length=3, source=Source.PROMPT),)
    sent = Sequence(
        token_ids=np.arange(3, dtype=np.int32),
        segments=segments,
        columns={"mine": Column(values=values, along=Along.TOKENS)},
    )
    proto = sequence_to_proto(sent)
    again = trajectory_pb2.Sequence.FromString(proto.SerializeToString())
    got = sequence_from_proto(again).columns["mine"]
    assert got.values.shape == (3, 2)
    assert got.values.dtype == values.dtype.newbyteorder("<")
    assert np.array_equal(got.values, values)
    encode = models().encoder(proto.DESCRIPTOR)
    body = pydantic_core.to_json(encode(proto))
    model = models().model(proto.DESCRIPTOR)
    assert decode(model.model_validate_json(body), trajectory_pb2.Sequence) == proto
    assert models().reader(proto.DESCRIPTOR)(body) == proto


def test_a_type_that_the_wire_does_not_have_is_refused():
    with pytest.raises(InvalidSequence, match="Column 'mine' has values of type complex128"):
        column_to_proto("mine", Along.TOKENS, np.zeros(3, np.complex128))


def test_versions_stand_once_in_a_table():
    sequence = sequence_of(
        [([i], {"source": Source.MODEL, "policy_version": VERSION}) for i in range(50)],
        logprobs=[-1.0] * 50,
    )
    proto = sequence_to_proto(sequence)
    assert len(proto.policy_versions) == 1
    assert sequence_from_proto(proto) == sequence
    proto.segments[3].policy_version_index = 1
    with pytest.raises(InvalidSequence, match="policy_version_index 1, of 1 versions"):
        sequence_from_proto(proto)


def test_contradictions_are_refused_at_the_edge():
    ids = column_to_proto("token_ids", Along.TOKENS, np.array([1], np.int32))
    with pytest.raises(InvalidSequence):
        sequence_from_proto(trajectory_pb2.Sequence(columns=[ids]))
    with pytest.raises(InvalidInput, match="purpose"):
        TASK.from_proto(trajectory_pb2.Task(task_id="t"))
    with pytest.raises(InvalidInput):
        SAMPLING_CODEC.from_proto(trajectory_pb2.SamplingParams(temperature=-1))
    with pytest.raises(InvalidHistory):
        TRAJECTORY.from_proto(trajectory_pb2.Trajectory())


@pytest.mark.parametrize("role", ["user", "assistant", "judge"])
def test_a_message_of_role_and_text_is_read_as_it_is_made(role: str) -> None:
    message = MESSAGE.from_proto(chat_pb2.Message(role=role, content="7"))
    made = Message(role=role, content="7")
    assert message == made
    assert hash(message) == hash(made)
    assert MESSAGE.to_proto(message) == chat_pb2.Message(role=role, content="7")


def test_a_role_that_is_nearly_a_usual_one_is_refused_when_it_is_read() -> None:
    with pytest.raises(InvalidHistory):
        MESSAGE.from_proto(chat_pb2.Message(role="asistant", content="7"))


def test_a_response_alone_is_read_as_any_chat_history() -> None:
    response = History((Message(role="assistant", content="7"),))
    proto = chat_pb2.ChatHistory(response=HISTORY.to_proto(response))
    assert CHAT_HISTORY.from_proto(proto) == ChatHistory(response=response)
    proto.prompt.SetInParent()
    assert CHAT_HISTORY.from_proto(proto) == ChatHistory(prompt=History(), response=response)
