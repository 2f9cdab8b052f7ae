from dialoop.v1 import scope_pb2 as _scope_pb2
from dialoop.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Instance(_message.Message):
    __slots__ = ("role", "name", "address", "rest_address", "epoch", "serves", "policy_version", "is_ready", "load", "is_admitted")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REST_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    IS_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    address: str
    rest_address: str
    epoch: int
    serves: _containers.RepeatedScalarFieldContainer[str]
    policy_version: _trajectory_pb2.PolicyVersion
    is_ready: bool
    load: float
    is_admitted: bool
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., rest_address: _Optional[str] = ..., epoch: _Optional[int] = ..., serves: _Optional[_Iterable[str]] = ..., policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., is_ready: bool = ..., load: _Optional[float] = ..., is_admitted: bool = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("run", "instance", "lease_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    instance: Instance
    lease_s: float
    def __init__(self, run: _Optional[str] = ..., instance: _Optional[_Union[Instance, _Mapping]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class AnnounceResponse(_message.Message):
    __slots__ = ("epoch", "is_admitted")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    is_admitted: bool
    def __init__(self, epoch: _Optional[int] = ..., is_admitted: bool = ...) -> None: ...

class WithdrawRequest(_message.Message):
    __slots__ = ("run", "role", "name", "epoch")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    run: str
    role: str
    name: str
    epoch: int
    def __init__(self, run: _Optional[str] = ..., role: _Optional[str] = ..., name: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class WithdrawResponse(_message.Message):
    __slots__ = ("was_listed",)
    WAS_LISTED_FIELD_NUMBER: _ClassVar[int]
    was_listed: bool
    def __init__(self, was_listed: bool = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("run", "role", "name", "epoch", "is_admitted")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    run: str
    role: str
    name: str
    epoch: int
    is_admitted: bool
    def __init__(self, run: _Optional[str] = ..., role: _Optional[str] = ..., name: _Optional[str] = ..., epoch: _Optional[int] = ..., is_admitted: bool = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListInstancesRequest(_message.Message):
    __slots__ = ("run", "role")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    run: str
    role: str
    def __init__(self, run: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class ListInstancesResponse(_message.Message):
    __slots__ = ("instances",)
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[Instance]
    def __init__(self, instances: _Optional[_Iterable[_Union[Instance, _Mapping]]] = ...) -> None: ...

class WatchInstancesRequest(_message.Message):
    __slots__ = ("run", "role", "interval_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    role: str
    interval_s: float
    def __init__(self, run: _Optional[str] = ..., role: _Optional[str] = ..., interval_s: _Optional[float] = ...) -> None: ...

class WatchInstancesResponse(_message.Message):
    __slots__ = ("instances",)
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[Instance]
    def __init__(self, instances: _Optional[_Iterable[_Union[Instance, _Mapping]]] = ...) -> None: ...
