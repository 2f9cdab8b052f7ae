from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class Scope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCOPE_UNSPECIFIED: _ClassVar[Scope]
    SCOPE_ENV: _ClassVar[Scope]
    SCOPE_ROLLOUT: _ClassVar[Scope]
    SCOPE_QUEUE_APPEND: _ClassVar[Scope]
    SCOPE_QUEUE_LEASE: _ClassVar[Scope]
    SCOPE_WEIGHTS: _ClassVar[Scope]
    SCOPE_ADMIN: _ClassVar[Scope]
SCOPE_UNSPECIFIED: Scope
SCOPE_ENV: Scope
SCOPE_ROLLOUT: Scope
SCOPE_QUEUE_APPEND: Scope
SCOPE_QUEUE_LEASE: Scope
SCOPE_WEIGHTS: Scope
SCOPE_ADMIN: Scope
SCOPE_FIELD_NUMBER: _ClassVar[int]
scope: _descriptor.FieldDescriptor
