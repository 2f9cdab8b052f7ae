"""The codec: what needs no row, what is refused when it is made, and that there is no other."""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from dialoop.chat import Message
from dialoop.errors import InvalidInput
from dialoop.trajectory import Purpose, Reward
from dialoop.v1 import chat_pb2, trajectory_pb2
from dialoop.wire import messages, records, templates
from dialoop.wire.codec import Codec, FieldRow, enum, many, submessage, wire_name
from dialoop_extras.services import runs_wire

ROOT = Path(__file__).parents[3]
CODECS = [
    codec
    for module in (messages, records, templates, runs_wire)
    for codec in vars(module).values()
    if isinstance(codec, Codec)
]
# What a message has and its dataclass has not under that name: the two sides of a oneof, runs of
# versions, what is derived when it is sent.
APART = {
    "Message": {"parts"},
    "ToolDefinition": {"given_json"},
    "TextSegment": {"inference_logprobs", "policy_runs"},
    "TextHistory": {"text", "query_token_ids", "response_token_ids", "response_mask"},
    "TrialStep": {
        "prompt_token_ids",
        "action_token_ids",
        "inference_logprobs",
        "policy_runs",
    },
}


@dataclass(frozen=True, kw_only=True)
class Version:
    lineage: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    temperature: float | None = None
    top_k: int | None = 7
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    task_id: str
    purpose: Purpose
    sampling: Settings | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    trajectory_id: str
    labels: dict[str, str] = field(default_factory=dict)


VERSION = Codec(Version, trajectory_pb2.PolicyVersion)
SETTINGS = Codec(Settings, trajectory_pb2.SamplingParams)


def test_numbers_texts_lists_and_maps_need_no_row():
    for codec, value in (
        (VERSION, Version(lineage="main", number=3)),
        (Codec(Settings, trajectory_pb2.SamplingParams), Settings(temperature=0.5, stop=("a",))),
        (Codec(Record, trajectory_pb2.Trajectory), Record(trajectory_id="t", labels={"a": "b"})),
    ):
        assert codec.from_proto(codec.to_proto(value)) == value


def test_what_did_not_arrive_has_the_default_and_what_did_has_not():
    codec = Codec(Settings, trajectory_pb2.SamplingParams)
    assert codec.from_proto(trajectory_pb2.SamplingParams()) == Settings()
    assert codec.from_proto(trajectory_pb2.SamplingParams(top_k=0)).top_k == 0
    assert not codec.to_proto(Settings(top_k=None)).HasField("top_k")


def test_what_a_row_writes_as_none_is_not_sent():
    row = FieldRow(lambda top_k: None if top_k == 7 else top_k, int)
    codec = Codec(Settings, trajectory_pb2.SamplingParams, top_k=row)
    assert not codec.to_proto(Settings()).ByteSize()
    assert codec.to_proto(Settings(top_k=8, stop=("a", "b"))).top_k == 8
    plain = messages.MESSAGE.to_proto(Message(role="user", content="a"))
    assert [field.name for field, _ in plain.ListFields()] == ["role", "content"]


def test_a_nested_message_and_an_enum_have_rows():
    codec = Codec(Plan, trajectory_pb2.Task, purpose=enum(Purpose), sampling=submessage(SETTINGS))
    for settings in (None, Settings(temperature=0.5)):
        value = Plan(task_id="a", purpose=Purpose.TRAINING, sampling=settings)
        assert codec.from_proto(codec.to_proto(value)) == value
    for number in (0, 99):
        proto = trajectory_pb2.Task(purpose=number)
        with pytest.raises(InvalidInput, match=rf"purpose is unspecified or unknown \({number}\)"):
            codec.from_proto(proto)


@pytest.mark.parametrize(
    ("domain", "rows", "text"),
    [
        (Plan, {"purpose": enum(Purpose)}, "sampling is a message or an enum"),
        (Plan, {"sampling": submessage(SETTINGS)}, "purpose is a message or an enum"),
        (Version, {"nunber": wire_name("number")}, "nunber"),
        (Record, {}, "trajectory_id"),
    ],
)
def test_a_table_that_does_not_fit_is_noticed_when_it_is_made(domain, rows, text):
    message = trajectory_pb2.PolicyVersion if domain is Record else trajectory_pb2.Task
    if domain is Version:
        message = trajectory_pb2.PolicyVersion
    with pytest.raises((TypeError, KeyError), match=text):
        Codec(domain, message, **rows)


def test_a_list_of_messages_becomes_a_tuple():
    @dataclass(frozen=True)
    class Talk:
        messages: tuple[Message, ...] = ()

    codec = Codec(Talk, chat_pb2.History, messages=many(messages.MESSAGE))
    for talk in (Talk(), Talk((Message(role="user"), Message(role="tool", content="x")))):
        assert codec.from_proto(codec.to_proto(talk)) == talk


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.domain.__name__)
def test_no_field_of_a_message_is_forgotten(codec):
    name = codec.message.DESCRIPTOR.name
    fields = {each.name for each in dataclasses.fields(codec.domain)} | APART.get(name, set())
    assert set(codec.message.DESCRIPTOR.fields_by_name) <= fields


def test_nobody_else_writes_a_message_that_has_a_codec():
    names = {codec.message.DESCRIPTOR.name for codec in CODECS}
    places = set()
    for folder in ("client/dialoop", "services/dialoop_services"):
        for path in (ROOT / folder).rglob("*.py"):
            where = path.relative_to(ROOT).as_posix()
            if not where.startswith(("client/dialoop/v1/", "client/dialoop/wire/")):
                places |= {f"{where}: {name}" for name in _messages_written(path) & names}
    assert not places, "convert it with dialoop.wire"


def _messages_written(path):
    """Return the messages that a module makes from fields."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return {
        call.func.attr
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and getattr(call.func.value, "id", "").endswith(("pb", "pb2"))
        and call.keywords
    }


def test_half_a_character_is_refused_where_it_is_said_and_where_it_is_sent() -> None:
    """Nobody could be sent it: UTF-8 has no such bytes."""
    for fields in ({"content": "a\ud800"}, {"content": "", "reasoning": "\udfffa"}):
        with pytest.raises(InvalidInput, match="half a character") as caught:
            Message(role="user", **fields)
        assert caught.value.reason == "HALF_CHARACTER"
    reward = Reward(name="mine", value=1.0, feedback="cut \ud800")
    with pytest.raises(InvalidInput, match="A text of a Reward has half a character") as caught:
        records.REWARD.to_proto(reward)
    assert caught.value.reason == "HALF_CHARACTER"
