"""Every request is read from JSON with all its fields, and what is wrong in it is refused."""

from __future__ import annotations

from typing import Any

import pydantic_core
import pytest
from dialoop.v1 import (
    environment_service_pb2,
    inference_service_pb2,
    replay_service_pb2,
    scorer_service_pb2,
    trainer_service_pb2,
    trajectory_pb2,
)
from dialoop_services.rest.routes import routes_of
from dialoop_services.rest.schema import models
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from pydantic import ValidationError

REQUESTS: dict[str, Descriptor] = {
    rpc.input_type.name: rpc.input_type
    for module in (
        environment_service_pb2,
        inference_service_pb2,
        replay_service_pb2,
        scorer_service_pb2,
        trainer_service_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
    for rpc in (route.rpc for route in routes_of(service))
}
_F = FieldDescriptor
_COLUMN = {"name": "token_ids", "shape": [2], "data": [3, 4]}


def whole_body(descriptor: Descriptor, choice: int) -> dict[str, Any]:
    """Return JSON with every field set, but of a oneof only one."""
    if descriptor is trajectory_pb2.Column.DESCRIPTOR:
        return _COLUMN
    left_out = {
        field.name
        for oneof in descriptor.oneofs
        for number, field in enumerate(oneof.fields)
        if number != choice % len(oneof.fields)
    }
    return {f.name: value(f, choice) for f in descriptor.fields if f.name not in left_out}


def value(field: FieldDescriptor, choice: int) -> Any:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return {"key": item(kind.fields_by_name["value"], choice)}
    content = item(field, choice)
    return [content, content] if field.is_repeated else content


def item(field: FieldDescriptor, choice: int) -> Any:
    if field.message_type is not None:
        return whole_body(field.message_type, choice)
    if field.enum_type is not None:
        return field.enum_type.values[-1].name
    if field.type == _F.TYPE_BYTES:
        return "AAEC"
    return {_F.CPPTYPE_STRING: "é", _F.CPPTYPE_BOOL: True, _F.CPPTYPE_FLOAT: 0.5}.get(
        field.cpp_type, 7
    )


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_with_every_field_is_read_and_written_again(name: str):
    descriptor = REQUESTS[name]
    read, encode = models().reader(descriptor), models().encoder(descriptor)
    for choice in range(3):
        fields = whole_body(descriptor, choice)
        message = read(pydantic_core.to_json(fields))
        assert {field.name for field, _ in message.ListFields()} == set(fields)
        assert read(pydantic_core.to_json(encode(message))) == message
    assert read(b"{}") == GetMessageClass(descriptor)()


def wrong_versions(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what is wrong in one place each, at every depth."""
    is_map = fields.keys() == {"key"}
    wrong: list[dict[str, Any]] = [] if is_map else [{**fields, "no_such_field": 1}]
    for name, good in fields.items():
        wrong.append({**fields, name: [[]]})
        if isinstance(good, dict):
            wrong += [{**fields, name: bad} for bad in wrong_versions(good)]
        elif isinstance(good, list) and isinstance(good[0], dict):
            wrong += [{**fields, name: [good[0], bad]} for bad in wrong_versions(good[0])]
        elif not isinstance(good, list):
            wrong.append({**fields, name: 1 if isinstance(good, str) else "7"})
    return wrong


@pytest.mark.parametrize("name", REQUESTS)
def test_what_is_wrong_in_a_request_is_refused(name: str):
    descriptor = REQUESTS[name]
    read = models().reader(descriptor)
    both = {field.name: value(field, 0) for oneof in descriptor.oneofs for field in oneof.fields}
    bodies = wrong_versions(whole_body(descriptor, 0))
    bodies += [whole_body(descriptor, 0) | both] if len(both) > len(descriptor.oneofs) else []
    for fields in bodies:
        with pytest.raises(ValidationError):
            read(pydantic_core.to_json(fields))


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"episode": 1}{}', b"\xff"])
def test_what_is_no_json_object_is_refused(body: bytes):
    with pytest.raises(ValidationError):
        models().reader(environment_service_pb2.StepRequest.DESCRIPTOR)(body)


def test_of_many_wrong_numbers_the_first_one_is_named():
    read = models().reader(trajectory_pb2.Column.DESCRIPTOR)
    with pytest.raises(ValidationError) as refused:
        read(pydantic_core.to_json(_COLUMN | {"data": [3, *(["x"] * 1000)]}))
    assert refused.value.error_count() == 3  # one for each kind of number
    assert all(error["loc"][-1] in (0, 1) for error in refused.value.errors())
