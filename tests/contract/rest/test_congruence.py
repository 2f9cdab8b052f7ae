"""The same calls give equal answers and equal errors through every door.

One script per service is played against a fresh one through gRPC, REST in JSON, REST in protobuf
and without a server; the environment's client script also on environments without a service.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from dialoop.chat import ChatHistory, History, Message
from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.retry import RetryPolicy
from dialoop.environments import ArithmeticTasks, arithmetic
from dialoop.errors import DialoopError
from dialoop.local.client import LocalEnvironmentClient
from dialoop.v1 import environment_service_pb2 as env
from dialoop.v1 import inference_service_pb2 as inf
from dialoop.v1 import replay_service_pb2 as rep
from dialoop.v1 import run_service_pb2 as runs
from dialoop.v1 import scorer_service_pb2 as sco
from dialoop.v1 import trainer_service_pb2 as tra
from dialoop.v1 import trajectory_pb2
from dialoop.wire.records import GROUP, TRAJECTORY
from google.protobuf.message import Message as Proto

from tests.support.rest_world import (
    GrpcDoor,
    RestServer,
    failing_environment,
    service,
    service_in_process,
)
from tests.support.samples import scorer_samples
from tests.support.samples.congruence_templates import template_script
from tests.support.samples.replay_samples import make_group, make_task, with_advantages

Call = Callable[[str, Proto], Awaitable[Any]]

TASKS = ArithmeticTasks()
KEY = TASKS.keys("train")[0]
ANSWER = TASKS.get("train", KEY).answer
# What differs from one run to the next.
_VOLATILE = ("expires_in_s", "generate_s", "queue_s", "lease_id", "oldest_s")


def response_of(text: str, role: str = "assistant") -> dict[str, Any]:
    return {"response": {"messages": [{"role": role, "content": text}]}}


def step(text: str, index: int = 0, session: str = "s", episode: int = 1) -> env.StepRequest:
    return env.StepRequest(
        session_id=session, episode=episode, step_index=index, history=response_of(text)
    )


def with_prompt(request: env.StepRequest, text: str) -> env.StepRequest:
    request.history.prompt.messages.add(role="user", content=text)
    return request


def whole(request: env.StepRequest) -> env.StepRequest:
    request.whole_prompt = True
    return request


def reset(session: str = "s", episode: int = 1, key: str = KEY) -> env.ResetRequest:
    return env.ResetRequest(session_id=session, episode=episode, split="train", task_key=key)


TOOL = f"<request><Calculator>{KEY}<call>"
SUBMIT = f"Result={ANSWER}<submit>"


async def environment_script(call: Call) -> None:
    async def of(name: str, request: Proto) -> Any:
        return await call(f"EnvironmentService.{name}", request)

    await of("ListEnvironments", env.ListEnvironmentsRequest())
    for name in ("arithmetic", "nope", "ü b"):
        await of("GetEnvironment", env.GetEnvironmentRequest(environment=name))
    page = env.ListTasksRequest(
        environment="arithmetic", split="train", page_size=3, shuffle_seed=5
    )
    for fields in ({}, {"split": "nope"}, {"page_token": "x"}, {"page_size": -1}):
        page_request = env.ListTasksRequest()
        page_request.CopyFrom(page)
        page_request.MergeFrom(env.ListTasksRequest(**fields))
        await of("ListTasks", page_request)
    for fields in (
        {"session_id": "s", "environment": "arithmetic"},
        {"session_id": "s", "environment": "arithmetic", "ttl_s": 5.5},
        {"session_id": "s", "environment": "failing"},
        {"session_id": "", "environment": "failing"},
        {"session_id": "t", "environment": "failing", "ttl_s": -1},
        {"session_id": "t", "environment": "failing"},
        {"session_id": "u", "environment": "arithmetic"},
    ):
        await of("CreateSession", env.CreateSessionRequest(**fields))
    await of("Step", step(TOOL))
    for request in (reset(), reset(), reset(key="x"), reset(episode=5), reset(session="gone")):
        await of("Reset", request)
    for request in (
        step(TOOL),
        step(TOOL),
        step("other"),
        step(TOOL, 4),
        step(TOOL, session="gone"),
        env.StepRequest(session_id="s", episode=1, step_index=1),
        env.StepRequest(session_id="s", episode=1, step_index=1, history=response_of("x", role="")),
        *(with_prompt(request, "another") for request in (step(TOOL), step(SUBMIT, 1))),
        step(SUBMIT, 1),
        *map(whole, (step(TOOL), step(SUBMIT, 1))),
        step(SUBMIT, 2),
    ):
        await of("Step", request)
    await of("GetSession", env.GetSessionRequest(session_id="s"))
    await of("GetSession", env.GetSessionRequest(session_id="gone"))
    await of("Reset", reset(episode=2))
    for request in (
        env.StepAndResetRequest(
            step=step(SUBMIT, episode=2), next_split="train", next_task_key="nope"
        ),
        env.StepAndResetRequest(
            step=step(SUBMIT, episode=2), next_split="train", next_task_key=KEY
        ),
    ):
        await of("StepAndReset", request)
    await of("BatchReset", env.BatchResetRequest(items=[reset("t"), reset("gone"), reset("t", 9)]))
    await of("BatchStep", env.BatchStepRequest(items=[step(TOOL, session="t"), step("x", 9)]))
    await of("Score", env.ScoreRequest(split="train"))
    await runs_script(call)
    for _ in range(2):
        await of("CloseSession", env.CloseSessionRequest(session_id="s"))


async def runs_script(call: Call) -> None:
    async def of(name: str, request: Proto) -> Any:
        return await call(f"RunService.{name}", request)

    for fields in ({}, {"extra_json": "[]"}, {"environment": "nope"}):
        run = {"environment": "calculator", "queries": ["1+2"], **fields}
        await of("RunText", runs.RunTextRequest(**run))
    for fields in ({}, {"free_shots": 1}, {"environment": "nope"}):
        trial = {"environment": "arithmetic", "inputs": [{"data": {"solution": "key"}}], **fields}
        await of("RunTrial", runs.RunTrialRequest(**trial))


async def overflow_script(of: Call) -> None:
    """Append two groups where one may wait."""
    await of("OfferTasks", rep.OfferTasksRequest(run="r", tasks=map(make_task, "cd")))
    for name in "cd":
        ask = rep.LeaseTasksRequest(run="r", worker="w", max_tasks=1)
        lease = (await of("LeaseTasks", ask)).leases[0].lease_id
        items = [rep.AppendItem(group=make_group(make_task(name)), lease_id=lease)]
        unscored = trajectory_pb2.STAGE_UNSCORED
        await of("AppendGroups", rep.AppendGroupsRequest(run="r", stage=unscored, items=items))


async def replay_script(call: Call) -> None:
    async def of(name: str, request: Proto) -> Any:
        return await call(f"ReplayService.{name}", request)

    unscored, to_train = trajectory_pb2.STAGE_UNSCORED, trajectory_pb2.STAGE_SCORED
    task, group = make_task("a"), make_group(make_task("a"))
    for run in ("r", "a b", ""):
        if run:
            await of("GetStats", rep.GetStatsRequest(run=run))
    await of("OfferTasks", rep.OfferTasksRequest(run="r", tasks=[task], next_cursor="1"))
    await of("OfferTasks", rep.OfferTasksRequest(run="r", expected_cursor="7", next_cursor="8"))
    await of("OfferTasks", rep.OfferTasksRequest(run="r", tasks=[trajectory_pb2.Task()]))
    ask = rep.LeaseTasksRequest(run="r", worker="w", max_tasks=1)
    await of("LeaseTasks", ask)
    version = {"lineage": "main", "number": 0}
    for number in (0, 0, -1):
        version["number"] = number
        await of(
            "AdvancePolicy",
            rep.AdvancePolicyRequest(run="r", policy_version=version, max_outstanding_groups=4),
        )
    await of("LeaseTasks", rep.LeaseTasksRequest(run="r", max_tasks=1))
    lease = (await of("LeaseTasks", ask)).leases[0].lease_id
    for stage, item in ((0, group), (unscored, make_group(make_task("b"))), (unscored, group)):
        items = [rep.AppendItem(group=item, lease_id=lease)]
        await of("AppendGroups", rep.AppendGroupsRequest(run="r", stage=stage, items=items))
    for stage in (0, unscored):
        await of("Peek", rep.PeekRequest(run="r", stage=stage, max_groups=2))
    leased = await of(
        "LeaseGroups", rep.LeaseGroupsRequest(run="r", stage=unscored, worker="w", max_groups=1)
    )
    item = rep.AppendItem(group=with_advantages(group), lease_id=leased.leases[0].lease_id)
    await of("AppendGroups", rep.AppendGroupsRequest(run="r", stage=to_train, items=[item]))
    for staleness in (None, 2):
        await of(
            "LeaseGroups",
            rep.LeaseGroupsRequest(
                run="r", stage=to_train, worker="t", max_groups=1, max_staleness=staleness
            ),
        )
    await overflow_script(of)
    done = rep.AcknowledgeItem(lease_id=leased.leases[0].lease_id, outcome=rep.OUTCOME_CONSUMED)
    for items in ([done], [done], [rep.AcknowledgeItem(lease_id="x")]):
        await of("Acknowledge", rep.AcknowledgeRequest(run="r", items=items))
    await of("Return", rep.ReturnRequest(run="r", items=[{"lease_id": "x", "reason": "Bad R"}]))
    await of("Return", rep.ReturnRequest(run="r", items=[{"lease_id": "x", "reason": "gone"}]))
    aside = {"lease_id": "task/1/a", "reason": "gone", "set_aside": True}
    await of("Return", rep.ReturnRequest(run="r", items=[aside]))
    await of("Extend", rep.ExtendRequest(run="r", lease_ids=["x"], lease_s=5))
    await of("Extend", rep.ExtendRequest(run="r", lease_ids=["x"], lease_s=-5))
    await of("ListLeases", rep.ListLeasesRequest(run="r", stage=to_train, worker="nobody"))
    await of("ListLeases", rep.ListLeasesRequest(run="r", stage=to_train))
    await of("ReopenLeases", rep.ReopenLeasesRequest(run="r", lease_ids=["x"]))
    await of("ReopenLeases", rep.ReopenLeasesRequest(run="r"))
    await of("ListDeadLetters", rep.ListDeadLettersRequest(run="r", max_groups=5))
    await of("Requeue", rep.RequeueRequest(run="r", group_ids=["a"]))
    await of("GetStats", rep.GetStatsRequest(run="r"))
    for confirm in ("no", "r"):
        await of("Purge", rep.PurgeRequest(run="r", confirm=confirm))


async def inference_script(call: Call) -> None:
    async def of(name: str, request: Proto) -> Any:
        return await call(f"InferenceService.{name}", request)

    prompt = {"prompt": {"messages": [{"role": "user", "content": "3+4"}]}}
    parts = [{"type": "image", "data": b"\x00\xff"}]
    for request in (
        inf.GenerateRequest(history=prompt),
        inf.GenerateRequest(history=prompt, sampling={"temperature": 0.1, "stop": ["<call>"]}),
        inf.GenerateRequest(history=prompt, sampling={"temperature": -1.0}),
        inf.GenerateRequest(history=prompt, sampling={"stop": [""]}),
        inf.GenerateRequest(),
        inf.GenerateRequest(
            history={"prompt": {"messages": [{"role": "user", "parts": {"parts": parts}}]}}
        ),
    ):
        await of("Generate", request)
    for rows in ([[1, 2, 3], [4]], [[]], [[999_999]], []):
        await of("LogProb", inf.LogProbRequest(token_ids=[{"values": row} for row in rows]))
    await of("GetPolicy", inf.GetPolicyRequest())
    await of("Pause", inf.PauseRequest())
    await of("Resume", inf.ResumeRequest())
    await of("Sleep", inf.SleepRequest())
    await of("Wake", inf.WakeRequest())
    await template_script(call, prompt["prompt"])


async def scorer_script(call: Call) -> None:
    for group in (
        scorer_samples.make_group(0.0, 1.0),
        scorer_samples.make_group(1.0),
        scorer_samples.make_group(0.0, 1.0, size=3),
        scorer_samples.make_group(0.0, 1.0, sequences=()),
    ):
        request = sco.ScorerServiceScoreRequest(group=GROUP.to_proto(group))
        await call("ScorerService.Score", request)
    await call("ScorerService.Score", sco.ScorerServiceScoreRequest())
    rows = [{"values": [1, 2, 3]}, {"values": [4]}]
    await call("ScorerService.LogProb", sco.ScorerServiceLogProbRequest(token_ids=rows))
    played = [TRAJECTORY.to_proto(t) for t in scorer_samples.make_group(0.0, 1.0).trajectories]
    for options in (
        {},
        {"mask_scope": "TOKEN_SCOPE_ALL"},
        {"model_id": "reference"},
        {"model_id": "nobody"},
    ):
        request = sco.ScorerServiceLogProbRequest(trajectories=played, **options)
        await call("ScorerService.LogProb", request)
    for options in (
        {},
        {"estimator": "KL_ESTIMATOR_K3", "model_id": "reference"},
        {"mask_scope": "TOKEN_SCOPE_ALL"},
        {"reference_model_id": "nobody"},
    ):
        request = sco.ScorerServiceRetrieveKlRequest(trajectories=played, **options)
        await call("ScorerService.RetrieveKl", request)


async def trainer_script(call: Call) -> None:
    for name in ("Publish", "Checkpoint", "Evaluate"):
        await call(f"TrainerService.{name}", getattr(tra, f"{name}Request")())
    for name in ("Pause", "Resume"):
        await call(f"TrainerService.{name}", getattr(tra, f"TrainerService{name}Request")())


SCRIPTS = {
    "environment": environment_script,
    "replay": replay_script,
    "inference": inference_script,
    "scorer": scorer_script,
    "trainer": trainer_script,
}
DOORS = ("grpc", "json", "protobuf", "in_process")
REACHED = {
    "environment": {
        "ENVIRONMENT_NOT_FOUND",
        "SPLIT_NOT_FOUND",
        "BAD_PAGE_TOKEN",
        "SESSION_CONFLICT",
        "CAPACITY",
        "SESSION_LOST",
        "TASK_NOT_FOUND",
        "STEP_GAP",
        "STEP_CONFLICT",
        "HISTORY_REWRITTEN",
        "FULL_MISSING",
        "INVALID_HISTORY",
        "EPISODE_DONE",
        "OUT_OF_RANGE",
        "NO_INFERENCE",
        "BAD_EXTRA",
        "NOT_A_GAME",
    },
    "replay": {"BAD_RUN", "CURSOR_MOVED", "INVALID_INPUT", "CONFIRM_RUN", "GROUP_NOT_FOUND"},
    "inference": {
        "NO_TOKENS",
        "TOKEN_OUT_OF_RANGE",
        "INVALID_SAMPLING",
        "PROMPT_MISSING",
        "TEMPLATE_CONFLICT",
        "TEMPLATE_INVALID",
        "TEMPLATE_NOT_FOUND",
        "NOT_PARSEABLE",
        "NO_PARSER",
    },
    "scorer": {
        "GROUP_TOO_SMALL",
        "GROUP_INCOMPLETE",
        "UNSCORABLE_TRAJECTORY",
        "MODEL_NOT_FOUND",
        "RAGGED",
    },
    "trainer": set(),
}


def without_ids(message: Any) -> Any:
    """Without what differs from one run to the next."""
    if not isinstance(message, Proto):
        return message
    copy = type(message)()
    copy.CopyFrom(message)
    _clear(copy)
    return copy


def _clear(message: Proto) -> None:
    for field, value in message.ListFields():
        if field.name in _VOLATILE:
            message.ClearField(field.name)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for inner in value if field.is_repeated else [value]:
                _clear(inner)


async def transcript(name: str, door: str) -> list[tuple[str, Any]]:
    answers: list[tuple[str, Any]] = []
    async with open_door(name, door) as caller:

        async def call(rpc: str, request: Proto) -> Any:
            answer = await caller(rpc, request)
            answers.append((rpc, without_ids(answer)))
            return answer

        await SCRIPTS[name](call)
    return answers


@asynccontextmanager
async def open_door(name: str, door: str) -> AsyncIterator[Call]:
    """A fresh service behind a door."""
    settings: dict[str, Any] = {"token": "right"} | (
        {"capacity": 2} if name == "environment" else {}
    )
    async with AsyncExitStack() as exits:
        caller: GrpcDoor | RestServer
        if door == "in_process":
            network = await exits.enter_async_context(service_in_process(name, **settings))
            caller = GrpcDoor(grpc.aio.insecure_channel(network.address(name)), "right")
        else:
            server = await exits.enter_async_context(service(name, **settings))
            if door == "grpc":
                caller = GrpcDoor(grpc.aio.insecure_channel(server.address), "right")
            else:
                caller = RestServer(server, "right", binary=door == "protobuf")
        exits.push_async_callback(caller.close)
        yield caller


@pytest.mark.parametrize("name", SCRIPTS)
async def test_every_door_answers_and_refuses_alike(name):
    by_door = {door: await transcript(name, door) for door in DOORS}
    for door in DOORS[1:]:
        for expected, answer in zip(by_door["grpc"], by_door[door], strict=True):
            assert answer == expected, door
    reasons = {answer[1] for _, answer in by_door["grpc"] if isinstance(answer, tuple)}
    assert reasons >= REACHED[name]
    assert "INTERNAL" not in reasons  # all doors would agree on that, too


async def test_environments_without_a_server_answer_and_refuse_alike():
    async with (
        service("environment") as server,
        Channel(server.address, retry=RetryPolicy(max_attempts=1)) as channel,
    ):
        served = await play_calls(EnvironmentClient(channel))
    assert await play_calls(LocalEnvironmentClient(arithmetic(), failing_environment())) == served


async def play_calls(client: Any) -> list[Any]:
    """What a client's user sees of a whole script."""
    answers: list[Any] = []

    async def see(call: Awaitable[Any]) -> None:
        try:
            answers.append(await call)
        except DialoopError as error:
            answers.append((type(error), error.reason))

    def answer(text: str) -> ChatHistory:
        return ChatHistory(response=History((Message(role="assistant", content=text),)))

    def see_step(text: str, index: int, session: str = "s") -> Awaitable[Any]:
        return client.step(session, episode=1, step_index=index, history=answer(text))

    await see(client.list_environments())
    await see(client.get_environment("nope"))
    await see(client.list_tasks("arithmetic", split="train", page_size=3, shuffle_seed=2))
    await see(client.list_tasks("arithmetic", split="nope"))
    await see(client.create_session("s", "arithmetic"))
    await see(client.create_session("s", "failing"))
    await see(client.create_session("", "failing"))
    await see(client.reset("gone", episode=1, split="train", task_key=KEY))
    await see(client.reset("s", episode=1, split="train", task_key="nope"))
    for _ in range(2):
        await see(client.reset("s", episode=1, split="train", task_key=KEY))
    await see(client.reset("s", episode=5, split="train", task_key=KEY))
    await see(see_step(TOOL, 0))
    await see(see_step(TOOL, 0))
    await see(see_step("other", 0))
    await see(see_step(TOOL, 7))
    await see(client.step("s", episode=1, step_index=1, history=ChatHistory()))
    await see(see_step(SUBMIT, 1))
    await see(see_step(SUBMIT, 2))
    await see(see_step(SUBMIT, 0, "gone"))
    await see(client.close_session("s"))
    await see(client.close_session("s"))
    return answers
