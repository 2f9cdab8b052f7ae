"""The queue's values have one class each: the messages here, the client's classes for callers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import dialoop
import dialoop_services
from dialoop.v1 import replay_service_pb2 as pb

CLIENT, SERVICES = (Path(package.__path__[0]) for package in (dialoop, dialoop_services))
REPLAY = SERVICES / "replay"


def classes_of(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text("utf-8"))
    yield from (node.name for node in tree.body if isinstance(node, ast.ClassDef))


def test_the_service_has_no_second_class_of_a_message() -> None:
    messages = {*pb.DESCRIPTOR.message_types_by_name, *pb.DESCRIPTOR.enum_types_by_name}
    own = {name for path in REPLAY.rglob("*.py") for name in classes_of(path)}
    assert own
    assert not own & messages


def test_no_class_of_the_queue_is_defined_elsewhere() -> None:
    files = [CLIENT / "clients" / "replay.py", *REPLAY.rglob("*.py")]
    own = [name for path in files for name in classes_of(path) if not name.startswith("_")]
    assert len(own) == len(set(own))
    elsewhere = {
        name
        for folder in (CLIENT, SERVICES)
        for path in folder.rglob("*.py")
        if path not in files and "v1" not in path.parts
        for name in classes_of(path)
    }
    assert not set(own) & elsewhere
