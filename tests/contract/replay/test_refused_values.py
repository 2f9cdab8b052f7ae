"""Values that nobody can train are refused at append through every door, with the field named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import pytest
from dialoop.v1 import replay_service_pb2 as rep
from dialoop.v1 import trajectory_pb2 as pb
from dialoop.v1.replay_service_pb2_grpc import ReplayServiceStub

from tests.support.rest_world import GrpcDoor, RestServer, refusal, routes, service
from tests.support.samples.replay_samples import make_group, make_task, set_values

Spoil = Callable[[pb.Trajectory], object]
TASK = make_task("a")
REJECTED = rep.APPEND_STATUS_REJECTED


def reward(**fields: Any) -> Spoil:
    return lambda t: t.turns[0].rewards.append(pb.Reward(name="judge", **fields))


def column(name: str, *values: float) -> Spoil:
    return lambda t: set_values(t.sequences[0], name, values)


def segment(**fields: int) -> Spoil:
    return lambda t: t.sequences[0].segments[1].MergeFrom(pb.Segment(**fields))


def sequence(**fields: Any) -> Spoil:
    return lambda t: t.sequences[0].MergeFrom(pb.Sequence(**fields))


def turn(**fields: int) -> Spoil:
    return lambda t: t.turns[0].MergeFrom(pb.Turn(**fields))


def negative_version(trajectory: pb.Trajectory) -> None:
    trajectory.sequences[0].policy_versions[0].number = -1


def same_id(trajectory: pb.Trajectory) -> None:
    trajectory.trajectory_id = "a.0"


def other_group(trajectory: pb.Trajectory) -> None:
    trajectory.group_id = "b"


# Why each is refused, and the field that the message names.
REFUSED: Mapping[str, tuple[Spoil, str, str]] = {
    "reward": (reward(value=1e30), "OUT_OF_RANGE", "judge"),
    "weight": (reward(value=1.0, weight=-1e30), "OUT_OF_RANGE", "judge"),
    "per_token": (reward(value=0.0, per_token=[1e10, -1e10]), "OUT_OF_RANGE", "judge"),
    "log-prob above 0": (
        column("inference_logprobs", 0.5, -1.0),
        "OUT_OF_RANGE",
        "inference_logprobs",
    ),
    "log-prob too low": (column("ref_logprobs", -1e5, -1.0), "OUT_OF_RANGE", "ref_logprobs"),
    "advantage": (sequence(advantage=1e30), "OUT_OF_RANGE", "advantage"),
    "token_advantages": (
        column("token_advantages", 0.0, -1e30),
        "OUT_OF_RANGE",
        "token_advantages",
    ),
    "id below 0": (column("token_ids", -1, 8, 2, 11, 12), "TOKEN_OUT_OF_RANGE", "token_ids"),
    "id too large": (column("token_ids", 100, 8, 2, 11, 12), "TOKEN_OUT_OF_RANGE", "token_ids"),
    "version": (negative_version, "OUT_OF_RANGE", "version"),
    "twice": (same_id, "TRAJECTORY_REPEATED", "trajectory_id"),
    "of another group": (other_group, "GROUP_MISMATCH", "group_id"),
    "turn": (segment(turn=9), "OUT_OF_RANGE", "turn"),
    "message": (segment(message_index=9), "OUT_OF_RANGE", "message_index"),
    "version's index": (segment(policy_version_index=3), "OUT_OF_RANGE", "policy_version_index"),
    "turn's messages": (turn(message_start=9), "OUT_OF_RANGE", "message_start"),
}
# JSON has no numbers that are not finite, so its door refuses the body.
NOT_FINITE: Mapping[str, tuple[Callable[[float], Spoil], str]] = {
    "reward": (lambda x: reward(value=x), "judge"),
    "weight": (lambda x: reward(value=1.0, weight=x), "judge"),
    "per_token": (lambda x: reward(value=0.0, per_token=[x]), "judge"),
    "advantage": (lambda x: sequence(advantage=x), "advantage"),
    "inference_logprobs": (lambda x: column("inference_logprobs", x, -1.0), "inference_logprobs"),
    "token_advantages": (lambda x: column("token_advantages", 0.0, x), "token_advantages"),
}
FINITE = 0.40625  # is written so, and replaced


def request_of(spoil: Spoil) -> rep.AppendGroupsRequest:
    group = make_group(TASK)
    spoil(group.trajectories[1])
    item = rep.AppendItem(group=group, lease_id="task/1/a")
    return rep.AppendGroupsRequest(run="r", stage=pb.STAGE_UNSCORED, items=[item])


def members_of(request: rep.AppendGroupsRequest) -> rep.AppendMembersRequest:
    """Return the append of the spoiled member alone."""
    member = request.items[0].group.trajectories[1]
    item = rep.MemberItem(lease_id="task/1/a", member=1, trajectory=member)
    return rep.AppendMembersRequest(run="r", items=[item])


async def outcome_of(door: GrpcDoor | RestServer, request: Any) -> rep.AppendOutcome:
    name = type(request).__name__.removesuffix("Request")
    answer: Any = await door(f"ReplayService.{name}", request)
    outcome: rep.AppendOutcome = answer.outcomes[0]
    return outcome


async def test_what_nobody_can_train_is_refused_alike_with_the_field_named() -> None:
    async with service("replay") as server, grpc.aio.insecure_channel(server.address) as channel:
        by_grpc, by_rest = GrpcDoor(channel), RestServer(server)
        binary = RestServer(server, binary=True)
        for case, (spoil, reason, field) in REFUSED.items():
            request = request_of(spoil)
            expected = await outcome_of(by_grpc, request)
            assert (expected.status, expected.reason) == (REJECTED, reason), case
            assert field in expected.message, case
            for door in (by_rest, binary):
                assert await outcome_of(door, request) == expected, case
            if reason != "TRAJECTORY_REPEATED":
                member = await outcome_of(by_grpc, members_of(request))
                assert member == await outcome_of(by_rest, members_of(request)) == expected, case
        await by_rest.close()
        await binary.close()


async def test_an_id_longer_than_the_ledger_keeps_is_refused_with_its_length() -> None:
    request = members_of(request_of(lambda trajectory: None))
    request.items[0].lease_id = "x" * 2000
    async with service("replay") as server, grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="An id has 2000 characters"):
            await ReplayServiceStub(channel).AppendMembers(request)


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
async def test_a_number_that_is_not_finite_is_refused_at_every_door(number: str) -> None:
    route = routes("ReplayService")["AppendGroups"]
    async with service("replay") as server, grpc.aio.insecure_channel(server.address) as channel:
        by_grpc, by_rest = GrpcDoor(channel), RestServer(server)
        binary = RestServer(server, binary=True)
        for case, (spoil_with, field) in NOT_FINITE.items():
            request = request_of(spoil_with(float(number)))
            expected = await outcome_of(by_grpc, request)
            assert (expected.status, expected.reason) == (REJECTED, "NON_FINITE"), case
            assert field in expected.message, case
            assert await outcome_of(binary, request) == expected, case
            fields = by_rest._arguments_of(route, request_of(spoil_with(FINITE)))["json"]
            body = json.dumps(fields)
            assert str(FINITE) in body
            response = await by_rest.http.post(
                route.path.replace("{run}", "r"),
                content=body.replace(str(FINITE), number),
                headers={"content-type": "application/json"},
            )
            assert refusal(response) == (400, "INVALID_FIELD"), case
        await by_rest.close()
        await binary.close()
