from dialoop.v1 import environment_service_pb2 as _environment_service_pb2
from dialoop.v1 import inference_service_pb2 as _inference_service_pb2
from dialoop.v1 import scope_pb2 as _scope_pb2
from dialoop.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EmptyReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EMPTY_REASON_UNSPECIFIED: _ClassVar[EmptyReason]
    EMPTY_REASON_NOT_EMPTY: _ClassVar[EmptyReason]
    EMPTY_REASON_NO_TASKS: _ClassVar[EmptyReason]
    EMPTY_REASON_NO_CREDITS: _ClassVar[EmptyReason]
    EMPTY_REASON_NO_GROUPS: _ClassVar[EmptyReason]
    EMPTY_REASON_TOO_FEW: _ClassVar[EmptyReason]
    EMPTY_REASON_NO_POLICY: _ClassVar[EmptyReason]

class AppendStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    APPEND_STATUS_UNSPECIFIED: _ClassVar[AppendStatus]
    APPEND_STATUS_APPENDED: _ClassVar[AppendStatus]
    APPEND_STATUS_DUPLICATE: _ClassVar[AppendStatus]
    APPEND_STATUS_REJECTED: _ClassVar[AppendStatus]

class Selection(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SELECTION_UNSPECIFIED: _ClassVar[Selection]
    SELECTION_FIFO: _ClassVar[Selection]
    SELECTION_UNIFORM: _ClassVar[Selection]
    SELECTION_PRIORITY: _ClassVar[Selection]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_CONSUMED: _ClassVar[Outcome]
    OUTCOME_DROPPED: _ClassVar[Outcome]
EMPTY_REASON_UNSPECIFIED: EmptyReason
EMPTY_REASON_NOT_EMPTY: EmptyReason
EMPTY_REASON_NO_TASKS: EmptyReason
EMPTY_REASON_NO_CREDITS: EmptyReason
EMPTY_REASON_NO_GROUPS: EmptyReason
EMPTY_REASON_TOO_FEW: EmptyReason
EMPTY_REASON_NO_POLICY: EmptyReason
APPEND_STATUS_UNSPECIFIED: AppendStatus
APPEND_STATUS_APPENDED: AppendStatus
APPEND_STATUS_DUPLICATE: AppendStatus
APPEND_STATUS_REJECTED: AppendStatus
SELECTION_UNSPECIFIED: Selection
SELECTION_FIFO: Selection
SELECTION_UNIFORM: Selection
SELECTION_PRIORITY: Selection
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_CONSUMED: Outcome
OUTCOME_DROPPED: Outcome

class OfferTasksRequest(_message.Message):
    __slots__ = ("run", "tasks", "expected_cursor", "next_cursor")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CURSOR_FIELD_NUMBER: _ClassVar[int]
    NEXT_CURSOR_FIELD_NUMBER: _ClassVar[int]
    run: str
    tasks: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Task]
    expected_cursor: str
    next_cursor: str
    def __init__(self, run: _Optional[str] = ..., tasks: _Optional[_Iterable[_Union[_trajectory_pb2.Task, _Mapping]]] = ..., expected_cursor: _Optional[str] = ..., next_cursor: _Optional[str] = ...) -> None: ...

class OfferTasksResponse(_message.Message):
    __slots__ = ("num_new", "num_known", "cursor")
    NUM_NEW_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    num_new: int
    num_known: int
    cursor: str
    def __init__(self, num_new: _Optional[int] = ..., num_known: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class LeaseTasksRequest(_message.Message):
    __slots__ = ("run", "worker", "max_tasks", "lease_s", "wait_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MAX_TASKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    worker: str
    max_tasks: int
    lease_s: float
    wait_s: float
    def __init__(self, run: _Optional[str] = ..., worker: _Optional[str] = ..., max_tasks: _Optional[int] = ..., lease_s: _Optional[float] = ..., wait_s: _Optional[float] = ...) -> None: ...

class TaskLease(_message.Message):
    __slots__ = ("lease_id", "task", "attempt", "expires_in_s", "members", "recorded_members")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RECORDED_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    task: _trajectory_pb2.Task
    attempt: int
    expires_in_s: float
    members: _containers.RepeatedScalarFieldContainer[int]
    recorded_members: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_id: _Optional[str] = ..., task: _Optional[_Union[_trajectory_pb2.Task, _Mapping]] = ..., attempt: _Optional[int] = ..., expires_in_s: _Optional[float] = ..., members: _Optional[_Iterable[int]] = ..., recorded_members: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaseTasksResponse(_message.Message):
    __slots__ = ("leases", "empty_reason", "credits", "cursor")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    EMPTY_REASON_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[TaskLease]
    empty_reason: EmptyReason
    credits: int
    cursor: str
    def __init__(self, leases: _Optional[_Iterable[_Union[TaskLease, _Mapping]]] = ..., empty_reason: _Optional[_Union[EmptyReason, str]] = ..., credits: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class AppendMembersRequest(_message.Message):
    __slots__ = ("run", "items")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    run: str
    items: _containers.RepeatedCompositeFieldContainer[MemberItem]
    def __init__(self, run: _Optional[str] = ..., items: _Optional[_Iterable[_Union[MemberItem, _Mapping]]] = ...) -> None: ...

class MemberItem(_message.Message):
    __slots__ = ("lease_id", "member", "trajectory", "num_discarded")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    NUM_DISCARDED_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    member: int
    trajectory: _trajectory_pb2.Trajectory
    num_discarded: int
    def __init__(self, lease_id: _Optional[str] = ..., member: _Optional[int] = ..., trajectory: _Optional[_Union[_trajectory_pb2.Trajectory, _Mapping]] = ..., num_discarded: _Optional[int] = ...) -> None: ...

class AppendMembersResponse(_message.Message):
    __slots__ = ("outcomes", "num_overflowed")
    class NumOverflowedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    NUM_OVERFLOWED_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[AppendOutcome]
    num_overflowed: _containers.ScalarMap[str, int]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[AppendOutcome, _Mapping]]] = ..., num_overflowed: _Optional[_Mapping[str, int]] = ...) -> None: ...

class RecordedTurn(_message.Message):
    __slots__ = ("trajectory_id", "session_id", "turn", "sampled", "answer", "snapshot")
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    session_id: str
    turn: int
    sampled: _inference_service_pb2.GenerateResponse
    answer: _environment_service_pb2.StepResponse
    snapshot: bytes
    def __init__(self, trajectory_id: _Optional[str] = ..., session_id: _Optional[str] = ..., turn: _Optional[int] = ..., sampled: _Optional[_Union[_inference_service_pb2.GenerateResponse, _Mapping]] = ..., answer: _Optional[_Union[_environment_service_pb2.StepResponse, _Mapping]] = ..., snapshot: _Optional[bytes] = ...) -> None: ...

class TurnItem(_message.Message):
    __slots__ = ("lease_id", "member", "turn")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    member: int
    turn: RecordedTurn
    def __init__(self, lease_id: _Optional[str] = ..., member: _Optional[int] = ..., turn: _Optional[_Union[RecordedTurn, _Mapping]] = ...) -> None: ...

class AppendTurnsRequest(_message.Message):
    __slots__ = ("run", "items")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    run: str
    items: _containers.RepeatedCompositeFieldContainer[TurnItem]
    def __init__(self, run: _Optional[str] = ..., items: _Optional[_Iterable[_Union[TurnItem, _Mapping]]] = ...) -> None: ...

class AppendTurnsResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[AppendOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[AppendOutcome, _Mapping]]] = ...) -> None: ...

class GetTurnsRequest(_message.Message):
    __slots__ = ("run", "lease_id", "member")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    run: str
    lease_id: str
    member: int
    def __init__(self, run: _Optional[str] = ..., lease_id: _Optional[str] = ..., member: _Optional[int] = ...) -> None: ...

class GetTurnsResponse(_message.Message):
    __slots__ = ("turns", "snapshot")
    TURNS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedCompositeFieldContainer[RecordedTurn]
    snapshot: bytes
    def __init__(self, turns: _Optional[_Iterable[_Union[RecordedTurn, _Mapping]]] = ..., snapshot: _Optional[bytes] = ...) -> None: ...

class AppendGroupsRequest(_message.Message):
    __slots__ = ("run", "stage", "items")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    run: str
    stage: _trajectory_pb2.Stage
    items: _containers.RepeatedCompositeFieldContainer[AppendItem]
    def __init__(self, run: _Optional[str] = ..., stage: _Optional[_Union[_trajectory_pb2.Stage, str]] = ..., items: _Optional[_Iterable[_Union[AppendItem, _Mapping]]] = ...) -> None: ...

class AppendItem(_message.Message):
    __slots__ = ("group", "lease_id", "num_discarded", "priority")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_DISCARDED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    group: _trajectory_pb2.Group
    lease_id: str
    num_discarded: int
    priority: float
    def __init__(self, group: _Optional[_Union[_trajectory_pb2.Group, _Mapping]] = ..., lease_id: _Optional[str] = ..., num_discarded: _Optional[int] = ..., priority: _Optional[float] = ...) -> None: ...

class AppendGroupsResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[AppendOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[AppendOutcome, _Mapping]]] = ...) -> None: ...

class AppendOutcome(_message.Message):
    __slots__ = ("status", "reason", "message")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    status: AppendStatus
    reason: str
    message: str
    def __init__(self, status: _Optional[_Union[AppendStatus, str]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class LeaseGroupsRequest(_message.Message):
    __slots__ = ("run", "stage", "worker", "max_groups", "min_groups", "lease_s", "wait_s", "max_staleness", "task_id_prefix", "selection")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MAX_GROUPS_FIELD_NUMBER: _ClassVar[int]
    MIN_GROUPS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_PREFIX_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    run: str
    stage: _trajectory_pb2.Stage
    worker: str
    max_groups: int
    min_groups: int
    lease_s: float
    wait_s: float
    max_staleness: int
    task_id_prefix: str
    selection: Selection
    def __init__(self, run: _Optional[str] = ..., stage: _Optional[_Union[_trajectory_pb2.Stage, str]] = ..., worker: _Optional[str] = ..., max_groups: _Optional[int] = ..., min_groups: _Optional[int] = ..., lease_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., max_staleness: _Optional[int] = ..., task_id_prefix: _Optional[str] = ..., selection: _Optional[_Union[Selection, str]] = ...) -> None: ...

class GroupLease(_message.Message):
    __slots__ = ("lease_id", "group", "num_deliveries", "expires_in_s")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUM_DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    group: _trajectory_pb2.Group
    num_deliveries: int
    expires_in_s: float
    def __init__(self, lease_id: _Optional[str] = ..., group: _Optional[_Union[_trajectory_pb2.Group, _Mapping]] = ..., num_deliveries: _Optional[int] = ..., expires_in_s: _Optional[float] = ...) -> None: ...

class LeaseGroupsResponse(_message.Message):
    __slots__ = ("leases", "empty_reason", "num_ready", "is_cut")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    EMPTY_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_READY_FIELD_NUMBER: _ClassVar[int]
    IS_CUT_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[GroupLease]
    empty_reason: EmptyReason
    num_ready: int
    is_cut: bool
    def __init__(self, leases: _Optional[_Iterable[_Union[GroupLease, _Mapping]]] = ..., empty_reason: _Optional[_Union[EmptyReason, str]] = ..., num_ready: _Optional[int] = ..., is_cut: bool = ...) -> None: ...

class AcknowledgeRequest(_message.Message):
    __slots__ = ("run", "items")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    run: str
    items: _containers.RepeatedCompositeFieldContainer[AcknowledgeItem]
    def __init__(self, run: _Optional[str] = ..., items: _Optional[_Iterable[_Union[AcknowledgeItem, _Mapping]]] = ...) -> None: ...

class AcknowledgeItem(_message.Message):
    __slots__ = ("lease_id", "outcome", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    outcome: Outcome
    reason: str
    def __init__(self, lease_id: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class AcknowledgeResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[AcknowledgeOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[AcknowledgeOutcome, _Mapping]]] = ...) -> None: ...

class AcknowledgeOutcome(_message.Message):
    __slots__ = ("lease_id", "acknowledged", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    acknowledged: bool
    reason: str
    def __init__(self, lease_id: _Optional[str] = ..., acknowledged: bool = ..., reason: _Optional[str] = ...) -> None: ...

class ReturnRequest(_message.Message):
    __slots__ = ("run", "items")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    run: str
    items: _containers.RepeatedCompositeFieldContainer[ReturnItem]
    def __init__(self, run: _Optional[str] = ..., items: _Optional[_Iterable[_Union[ReturnItem, _Mapping]]] = ...) -> None: ...

class ReturnItem(_message.Message):
    __slots__ = ("lease_id", "reason", "num_trajectories", "failed", "set_aside", "failed_members")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    FAILED_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    reason: str
    num_trajectories: int
    failed: bool
    set_aside: bool
    failed_members: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_id: _Optional[str] = ..., reason: _Optional[str] = ..., num_trajectories: _Optional[int] = ..., failed: bool = ..., set_aside: bool = ..., failed_members: _Optional[_Iterable[int]] = ...) -> None: ...

class ReturnResponse(_message.Message):
    __slots__ = ("num_returned", "num_dropped")
    NUM_RETURNED_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    num_returned: int
    num_dropped: int
    def __init__(self, num_returned: _Optional[int] = ..., num_dropped: _Optional[int] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("run", "lease_ids", "lease_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    lease_s: float
    def __init__(self, run: _Optional[str] = ..., lease_ids: _Optional[_Iterable[str]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class ExtendResponse(_message.Message):
    __slots__ = ("lost_lease_ids",)
    LOST_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lost_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lost_lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ListLeasesRequest(_message.Message):
    __slots__ = ("run", "stage", "worker")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    run: str
    stage: _trajectory_pb2.Stage
    worker: str
    def __init__(self, run: _Optional[str] = ..., stage: _Optional[_Union[_trajectory_pb2.Stage, str]] = ..., worker: _Optional[str] = ...) -> None: ...

class ListLeasesResponse(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReopenLeasesRequest(_message.Message):
    __slots__ = ("run", "lease_ids", "lease_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    lease_s: float
    def __init__(self, run: _Optional[str] = ..., lease_ids: _Optional[_Iterable[str]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class ReopenLeasesResponse(_message.Message):
    __slots__ = ("leases", "lost_lease_ids", "is_cut")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LOST_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_CUT_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[GroupLease]
    lost_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    is_cut: bool
    def __init__(self, leases: _Optional[_Iterable[_Union[GroupLease, _Mapping]]] = ..., lost_lease_ids: _Optional[_Iterable[str]] = ..., is_cut: bool = ...) -> None: ...

class AdvancePolicyRequest(_message.Message):
    __slots__ = ("run", "policy_version", "trained_lease_ids", "max_outstanding_groups")
    RUN_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAINED_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTSTANDING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    run: str
    policy_version: _trajectory_pb2.PolicyVersion
    trained_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    max_outstanding_groups: int
    def __init__(self, run: _Optional[str] = ..., policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., trained_lease_ids: _Optional[_Iterable[str]] = ..., max_outstanding_groups: _Optional[int] = ...) -> None: ...

class AdvancePolicyResponse(_message.Message):
    __slots__ = ("credits",)
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    credits: int
    def __init__(self, credits: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("run", "interval_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    interval_s: float
    def __init__(self, run: _Optional[str] = ..., interval_s: _Optional[float] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: ReplayStats
    def __init__(self, stats: _Optional[_Union[ReplayStats, _Mapping]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: ReplayStats
    def __init__(self, stats: _Optional[_Union[ReplayStats, _Mapping]] = ...) -> None: ...

class LedgerCounts(_message.Message):
    __slots__ = ("num_tasks_offered", "num_groups_leased", "num_groups_unscored", "num_groups_scored", "num_groups_training", "num_groups_trained", "num_groups_consumed", "num_groups_dropped", "num_trajectories_generated", "num_trajectories_consumed", "num_trajectories_dropped", "num_trajectories_live", "num_trajectories_waiting", "num_groups_closed_short", "oldest_s")
    class NumGroupsDroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumTrajectoriesDroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class OldestSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NUM_TASKS_OFFERED_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_LEASED_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_UNSCORED_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_SCORED_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_TRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_TRAINED_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_CONSUMED_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAJECTORIES_GENERATED_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAJECTORIES_CONSUMED_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAJECTORIES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAJECTORIES_LIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAJECTORIES_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_CLOSED_SHORT_FIELD_NUMBER: _ClassVar[int]
    OLDEST_S_FIELD_NUMBER: _ClassVar[int]
    num_tasks_offered: int
    num_groups_leased: int
    num_groups_unscored: int
    num_groups_scored: int
    num_groups_training: int
    num_groups_trained: int
    num_groups_consumed: int
    num_groups_dropped: _containers.ScalarMap[str, int]
    num_trajectories_generated: int
    num_trajectories_consumed: int
    num_trajectories_dropped: _containers.ScalarMap[str, int]
    num_trajectories_live: int
    num_trajectories_waiting: int
    num_groups_closed_short: int
    oldest_s: _containers.ScalarMap[str, float]
    def __init__(self, num_tasks_offered: _Optional[int] = ..., num_groups_leased: _Optional[int] = ..., num_groups_unscored: _Optional[int] = ..., num_groups_scored: _Optional[int] = ..., num_groups_training: _Optional[int] = ..., num_groups_trained: _Optional[int] = ..., num_groups_consumed: _Optional[int] = ..., num_groups_dropped: _Optional[_Mapping[str, int]] = ..., num_trajectories_generated: _Optional[int] = ..., num_trajectories_consumed: _Optional[int] = ..., num_trajectories_dropped: _Optional[_Mapping[str, int]] = ..., num_trajectories_live: _Optional[int] = ..., num_trajectories_waiting: _Optional[int] = ..., num_groups_closed_short: _Optional[int] = ..., oldest_s: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ReplayStats(_message.Message):
    __slots__ = ("training", "evaluation", "policy_version", "max_outstanding_groups", "credits", "num_redelivered", "num_dead_letters", "num_duplicate_appends", "num_rejected_appends", "cursor", "store", "is_full", "settled_cursor")
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTSTANDING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    NUM_REDELIVERED_FIELD_NUMBER: _ClassVar[int]
    NUM_DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_DUPLICATE_APPENDS_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_APPENDS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    IS_FULL_FIELD_NUMBER: _ClassVar[int]
    SETTLED_CURSOR_FIELD_NUMBER: _ClassVar[int]
    training: LedgerCounts
    evaluation: LedgerCounts
    policy_version: _trajectory_pb2.PolicyVersion
    max_outstanding_groups: int
    credits: int
    num_redelivered: int
    num_dead_letters: int
    num_duplicate_appends: int
    num_rejected_appends: int
    cursor: str
    store: str
    is_full: bool
    settled_cursor: str
    def __init__(self, training: _Optional[_Union[LedgerCounts, _Mapping]] = ..., evaluation: _Optional[_Union[LedgerCounts, _Mapping]] = ..., policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., max_outstanding_groups: _Optional[int] = ..., credits: _Optional[int] = ..., num_redelivered: _Optional[int] = ..., num_dead_letters: _Optional[int] = ..., num_duplicate_appends: _Optional[int] = ..., num_rejected_appends: _Optional[int] = ..., cursor: _Optional[str] = ..., store: _Optional[str] = ..., is_full: bool = ..., settled_cursor: _Optional[str] = ...) -> None: ...

class PeekRequest(_message.Message):
    __slots__ = ("run", "stage", "max_groups")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MAX_GROUPS_FIELD_NUMBER: _ClassVar[int]
    run: str
    stage: _trajectory_pb2.Stage
    max_groups: int
    def __init__(self, run: _Optional[str] = ..., stage: _Optional[_Union[_trajectory_pb2.Stage, str]] = ..., max_groups: _Optional[int] = ...) -> None: ...

class PeekResponse(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Group]
    def __init__(self, groups: _Optional[_Iterable[_Union[_trajectory_pb2.Group, _Mapping]]] = ...) -> None: ...

class ListDeadLettersRequest(_message.Message):
    __slots__ = ("run", "max_groups")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MAX_GROUPS_FIELD_NUMBER: _ClassVar[int]
    run: str
    max_groups: int
    def __init__(self, run: _Optional[str] = ..., max_groups: _Optional[int] = ...) -> None: ...

class DeadLetter(_message.Message):
    __slots__ = ("group_id", "stage", "reason", "num_deliveries", "group")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    stage: _trajectory_pb2.Stage
    reason: str
    num_deliveries: int
    group: _trajectory_pb2.Group
    def __init__(self, group_id: _Optional[str] = ..., stage: _Optional[_Union[_trajectory_pb2.Stage, str]] = ..., reason: _Optional[str] = ..., num_deliveries: _Optional[int] = ..., group: _Optional[_Union[_trajectory_pb2.Group, _Mapping]] = ...) -> None: ...

class ListDeadLettersResponse(_message.Message):
    __slots__ = ("dead_letters",)
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    dead_letters: _containers.RepeatedCompositeFieldContainer[DeadLetter]
    def __init__(self, dead_letters: _Optional[_Iterable[_Union[DeadLetter, _Mapping]]] = ...) -> None: ...

class RequeueRequest(_message.Message):
    __slots__ = ("run", "group_ids")
    RUN_FIELD_NUMBER: _ClassVar[int]
    GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    run: str
    group_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., group_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RequeueResponse(_message.Message):
    __slots__ = ("num_requeued",)
    NUM_REQUEUED_FIELD_NUMBER: _ClassVar[int]
    num_requeued: int
    def __init__(self, num_requeued: _Optional[int] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("run", "confirm")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    run: str
    confirm: str
    def __init__(self, run: _Optional[str] = ..., confirm: _Optional[str] = ...) -> None: ...

class PurgeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
