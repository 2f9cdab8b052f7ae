"""What a request must be: protobuf fields in, values of the queue out, InvalidInput otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dialoop.errors import InvalidInput
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Purpose, Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import trajectory_pb2

from dialoop_services.replay.leases import Kind, parse_lease
from dialoop_services.replay.queue import Submission
from dialoop_services.replay.store import (
    Acknowledgement,
    CursorMove,
    GivenBack,
    GroupQuery,
    OfferedTask,
    Outcome,
)

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MAX_TASK_ID = 512
_MAX_SECONDS = 30 * 24 * 3600.0
# Above, Lua's JSON would round.
_MAX_VERSION = 10**12
_DEFAULT_PAGE = 20


def run_of(run: str) -> str:
    """A run's name; it becomes part of keys."""
    if not _RUN.fullmatch(run):
        raise InvalidInput(
            f"'{run[:128]}' is no run name.",
            reason="BAD_RUN",
            remedy="Use 1 to 128 letters, digits, '.', '_' and '-', beginning with one of the "
            "former two.",
        )
    return run


def tasks_of(request: pb.OfferTasksRequest) -> tuple[OfferedTask, ...]:
    """The offered tasks."""
    return tuple(map(_task, request.tasks))


def cursor_of(request: pb.OfferTasksRequest) -> CursorMove | None:
    """The wanted move of the cursor; None when both fields are empty."""
    if not request.expected_cursor and not request.next_cursor:
        return None
    return CursorMove(expected=request.expected_cursor, next=request.next_cursor)


def stage_of(stage: int) -> Stage:
    """The stage, which must be given."""
    if stage not in set(Stage):
        raise InvalidInput("stage is unspecified or unknown.", remedy="Set stage.")
    return Stage(stage)


def worker_of(worker: str) -> str:
    """Who leases, for those who look at what is pending."""
    if not worker:
        raise InvalidInput("worker is empty.", remedy="Name the worker that leases.")
    return worker


def count_of(name: str, value: int, *, least: int = 1) -> int:
    """A number that must be at least `least`."""
    if value < least:
        raise InvalidInput(f"{name} is {value}.", remedy=f"Give {name} of at least {least}.")
    return value


def page_of(max_groups: int) -> int:
    """How many to list; 0 means 20."""
    return count_of("max_groups", max_groups, least=0) or _DEFAULT_PAGE


def seconds_of(name: str, value: float) -> float:
    """A time from 0 to 30 days."""
    if not 0 <= value <= _MAX_SECONDS:
        raise InvalidInput(f"{name} is {value}.", remedy=f"Give {name} of 0 to 30 days.")
    return value


def query_of(
    request: pb.LeaseGroupsRequest, *, default_lease_s: float, max_bytes: int
) -> GroupQuery:
    """Which groups are wanted."""
    max_groups = count_of("max_groups", request.max_groups)
    min_groups = count_of("min_groups", request.min_groups, least=0) or 1
    stage = stage_of(request.stage)
    if min_groups > max_groups:
        raise InvalidInput(
            f"min_groups {min_groups} is above max_groups {max_groups}.",
            remedy="Ask for at most max_groups.",
        )
    if request.HasField("max_staleness") and stage is not Stage.SCORED:
        raise InvalidInput(
            "max_staleness bounds only STAGE_SCORED.", remedy="Leave max_staleness out."
        )
    if request.task_id_prefix and stage is not Stage.EVALUATION:
        raise InvalidInput(
            "task_id_prefix selects only in STAGE_EVALUATION.", remedy="Leave it out."
        )
    return GroupQuery(
        stage=stage,
        worker=worker_of(request.worker),
        max_groups=max_groups,
        min_groups=min_groups,
        lease_s=seconds_of("lease_s", request.lease_s) or default_lease_s,
        max_staleness=request.max_staleness if request.HasField("max_staleness") else None,
        task_id_prefix=request.task_id_prefix,
        max_bytes=max_bytes,
    )


def submission_of(item: pb.AppendItem, stage: Stage) -> Submission:
    """A group to append."""
    num_discarded = count_of("num_discarded", item.num_discarded, least=0)
    if num_discarded and stage is Stage.SCORED:
        raise InvalidInput(
            "num_discarded counts what was played, and nothing is played for STAGE_SCORED.",
            remedy="Leave num_discarded out.",
        )
    return Submission(group=item.group, lease_id=item.lease_id, num_discarded=num_discarded)


def acknowledgement_of(item: pb.AcknowledgeItem) -> Acknowledgement:
    """A lease whose work is done."""
    if int(item.outcome) not in set(Outcome):
        raise InvalidInput("outcome is unspecified or unknown.", remedy="Set outcome.")
    outcome = Outcome(item.outcome)
    reason = _reason(item.reason) if outcome is Outcome.DROPPED else ""
    return Acknowledgement(lease_id=item.lease_id, outcome=outcome, reason=reason)


def given_back_of(item: pb.ReturnItem) -> GivenBack:
    """A lease whose work is not done."""
    num_trajectories = count_of("num_trajectories", item.num_trajectories, least=0)
    name = parse_lease(item.lease_id)
    if num_trajectories and name and name.kind is not Kind.TASK:
        raise InvalidInput(
            "num_trajectories counts what was played, and a group lease plays nothing.",
            remedy="Leave num_trajectories out.",
        )
    if item.set_aside and name and name.kind is Kind.TASK:
        raise InvalidInput(
            "set_aside is for groups, and this is a task's lease.", remedy="Leave set_aside out."
        )
    return GivenBack(
        lease_id=item.lease_id,
        reason=_reason(item.reason),
        num_trajectories=num_trajectories,
        failed=item.failed,
        set_aside=item.set_aside,
    )


def version_of(version: trajectory_pb2.PolicyVersion) -> PolicyVersion:
    """The announced version."""
    if not version.lineage or not 0 <= version.number <= _MAX_VERSION:
        raise InvalidInput(
            f"Policy version '{version.lineage}-{version.number}' is incomplete or out of range.",
            remedy="Give a lineage and a number from 0 on.",
        )
    return PolicyVersion(lineage=version.lineage, number=version.number)


def unique(values: Iterable[str]) -> tuple[str, ...]:
    """The values without repeats, in order."""
    return tuple(dict.fromkeys(values))


def _task(task: trajectory_pb2.Task) -> OfferedTask:
    if not 0 < len(task.task_id) <= _MAX_TASK_ID:
        raise InvalidInput(
            f"A task_id has {len(task.task_id)} characters.",
            remedy=f"Give each task an id of 1 to {_MAX_TASK_ID} characters.",
        )
    if int(task.purpose) not in set(Purpose):
        raise InvalidInput(f"Task {task.task_id} has no purpose.", remedy="Set purpose.")
    return OfferedTask(
        task_id=task.task_id,
        purpose=Purpose(task.purpose),
        num_trajectories=count_of("num_trajectories", task.num_trajectories),
        payload=task.SerializeToString(),
    )


def _reason(reason: str) -> str:
    if not _REASON.fullmatch(reason):
        raise InvalidInput(
            f"'{reason[:64]}' is no reason.",
            remedy="Name the reason in snake_case, up to 64 characters.",
        )
    return reason
