"""What may stand between a rpc's request over REST and its message: readers of other forms.

A middleware is asked where a request has a query beside its body, or where its body is refused. It
reads with what it is given, and may change the body before; it may also add to the answer. It says
in the OpenAPI document what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

Read: TypeAlias = Callable[[bytes], Message]
"""Reads a body; raises FieldsRefused where JSON has other fields."""
Complete: TypeAlias = Callable[[Message], Mapping[str, Any]]
"""Changes an answer, and returns what its JSON has besides; of a stream, each of its answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A request with a body; `wants_json`: its answer is one JSON document."""

    rpc: MethodDescriptor
    content: bytes
    query: bytes
    wants_json: bool


class Middleware(Protocol):
    """Stands between bodies and messages."""

    @property
    def description(self) -> str:
        """Return what the OpenAPI document says of it."""

    def read(self, body: Body, read: Read) -> tuple[Message, Complete | None]:
        """Return the message, and what its answers need."""

    def describe(self, rpc: MethodDescriptor, operation: dict[str, Any]) -> None:
        """Add what it reads and answers to a rpc's operation of the OpenAPI document."""
