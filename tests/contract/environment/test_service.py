"""Every rpc of EnvironmentService over a real loopback connection."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from dialoop.chat import ChatHistory, History, Message
from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentClient
from dialoop.environments import ArithmeticTasks, ExactResult, arithmetic, tool_environment
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.trajectory import DoneReason
from dialoop.v1 import chat_pb2, trajectory_pb2
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1.environment_service_pb2_grpc import EnvironmentServiceStub
from dialoop.wire.messages import CHAT_HISTORY, HISTORY
from dialoop.wire.records import TRAJECTORY
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings
from google.rpc import error_details_pb2
from grpc_status import rpc_status

TASKS = ArithmeticTasks()
KEY = TASKS.keys("train")[0]
ANSWER = TASKS.get("train", KEY).answer
TOOL = f"<request><Calculator>{KEY}<call>"
SUBMIT = f"Result={ANSWER}<submit>"


def secret(query: str) -> str:
    raise RuntimeError("secret text")


@asynccontextmanager
async def service(**settings):
    failing = tool_environment(name="failing", tasks=TASKS, tools=[secret], rewards=[ExactResult()])
    catalogue = Catalogue([arithmetic(), failing])
    async with (
        serving(EnvironmentSettings(**settings), catalogue) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield EnvironmentServiceStub(channel)


def response(text: str, **fields) -> chat_pb2.ChatHistory:
    message = Message(role="assistant", content=text, **fields)
    return CHAT_HISTORY.to_proto(ChatHistory(response=History((message,))))


def step(
    text: str, index: int = 0, *, session: str = "s", episode: int = 1, whole: bool = True
) -> pb.StepRequest:
    return pb.StepRequest(
        session_id=session,
        episode=episode,
        step_index=index,
        history=response(text),
        whole_prompt=whole,
    )


def reset(session: str = "s", episode: int = 1, key: str = KEY) -> pb.ResetRequest:
    return pb.ResetRequest(session_id=session, episode=episode, split="train", task_key=key)


async def start(stub, session: str = "s", environment: str = "arithmetic") -> pb.ResetResponse:
    await stub.CreateSession(pb.CreateSessionRequest(session_id=session, environment=environment))
    return await stub.Reset(reset(session))


async def refusal(call) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    info = error_details_pb2.ErrorInfo()
    rpc_status.from_call(caught.value).details[0].Unpack(info)
    return caught.value.code().name, info.reason


async def test_environments_say_what_they_are():
    async with service() as stub:
        answer = await stub.GetEnvironment(pb.GetEnvironmentRequest(environment="arithmetic"))
        info = answer.environment
        assert (info.name, info.max_turns, info.version) == ("arithmetic", 3, "1")
        assert list(info.stop) == ["<submit>", "<call>"]
        assert list(info.tools) == ["Calculator"]
        assert list(info.reward_names) == ["result"]
        assert {s.name: s.num_tasks for s in info.splits}["heldout"] == 256
        everything = await stub.ListEnvironments(pb.ListEnvironmentsRequest())
        assert [e.name for e in everything.environments] == ["arithmetic", "failing"]
        unknown = stub.GetEnvironment(pb.GetEnvironmentRequest(environment="x"))
        assert await refusal(unknown) == ("NOT_FOUND", "ENVIRONMENT_NOT_FOUND")


async def test_tasks_come_in_pages():
    async with service() as stub:
        list_request = pb.ListTasksRequest(environment="arithmetic", split="heldout", page_size=200)
        page = await stub.ListTasks(list_request)
        list_request.page_token = page.next_page_token
        page = await stub.ListTasks(list_request)
        assert [page.tasks[0].epoch, page.tasks[-1].epoch] == [0, 1]
        list_request.page_token = "nonsense"
        assert await refusal(stub.ListTasks(list_request)) == ("INVALID_ARGUMENT", "BAD_PAGE_TOKEN")
        list_request.split = "nope"
        assert await refusal(stub.ListTasks(list_request)) == ("NOT_FOUND", "SPLIT_NOT_FOUND")


async def test_golden_episode_over_the_wire():
    async with service() as stub:
        opening = await start(stub)
        assert opening.environment_version == "1"
        assert not opening.history.HasField("full")
        first = await stub.Step(step(TOOL))
        assert first.done_reason == DoneReason.NOT_DONE
        assert first.num_tool_calls == 1
        full = CHAT_HISTORY.from_proto(first.history).respond(
            Message(role="assistant", content=SUBMIT)
        )
        last_step = step("", index=1)
        last_step.history.CopyFrom(CHAT_HISTORY.to_proto(full))
        last = await stub.Step(last_step)
        texts = [m.content for m in last.history.prompt.messages]
        assert texts == [KEY, TOOL, f"{ANSWER}<response>", SUBMIT]
        assert (last.terminated, last.done_reason) == (True, DoneReason.SUBMITTED)
        assert [(r.name, r.value) for r in last.rewards] == [("result", 1.0)]
        assert not last.replayed
        again = await stub.Step(last_step)
        assert again.replayed
        again.replayed = False
        assert again == last


async def test_refusals_have_their_status_and_reason():
    async with service(capacity=1) as stub:
        await start(stub)
        other = pb.CreateSessionRequest(session_id="t", environment="arithmetic")
        conflict = pb.CreateSessionRequest(session_id="s", environment="failing")
        nothing = pb.StepRequest(session_id="s", episode=1)
        rewritten = step("")
        rewritten.history.CopyFrom(
            CHAT_HISTORY.to_proto(ChatHistory(full=History((Message(role="user", content="x"),))))
        )
        broken = step("x")
        broken.history.response.messages[0].role = ""
        for rpc, request, expected in [
            (stub.CreateSession, other, ("RESOURCE_EXHAUSTED", "CAPACITY")),
            (stub.CreateSession, conflict, ("ALREADY_EXISTS", "SESSION_CONFLICT")),
            (stub.Step, nothing, ("INVALID_ARGUMENT", "FULL_MISSING")),
            (stub.Step, rewritten, ("FAILED_PRECONDITION", "HISTORY_REWRITTEN")),
            (stub.Step, broken, ("INVALID_ARGUMENT", "INVALID_HISTORY")),
            (stub.Step, step("x", 4), ("FAILED_PRECONDITION", "STEP_GAP")),
            (stub.Step, step("x", session="t"), ("NOT_FOUND", "SESSION_LOST")),
            (stub.Reset, reset(episode=2, key="x"), ("NOT_FOUND", "TASK_NOT_FOUND")),
        ]:
            assert await refusal(rpc(request)) == expected
        state = await stub.GetSession(pb.GetSessionRequest(session_id="s"))
        assert (state.episode, state.next_step_index, state.done) == (1, 0, False)


async def test_sessions_expire_and_say_so():
    async with service(reap_interval_s=0.02) as stub:
        request = pb.CreateSessionRequest(session_id="s", environment="arithmetic", ttl_s=0.05)
        assert (await stub.CreateSession(request)).ttl_s == 0.05
        await asyncio.sleep(0.2)
        assert await refusal(stub.Reset(reset())) == ("NOT_FOUND", "SESSION_EXPIRED")


async def test_closing_is_idempotent():
    async with service() as stub:
        await start(stub)
        close = pb.CloseSessionRequest(session_id="s")
        assert (await stub.CloseSession(close)).closed
        assert not (await stub.CloseSession(close)).closed
        get = stub.GetSession(pb.GetSessionRequest(session_id="s"))
        assert await refusal(get) == ("NOT_FOUND", "SESSION_LOST")


async def test_a_session_shows_where_it_stands():
    async with service() as stub:
        await stub.CreateSession(
            pb.CreateSessionRequest(session_id="s", environment="arithmetic", ttl_s=100)
        )
        state = await stub.GetSession(pb.GetSessionRequest(session_id="s"))
        assert (state.episode, state.HasField("history")) == (0, False)
        await stub.Reset(reset())
        after = await stub.Step(step(TOOL))
        state = await stub.GetSession(pb.GetSessionRequest(session_id="s"))
        assert (state.environment, state.episode, state.next_step_index) == ("arithmetic", 1, 1)
        assert state.history == after.history
        assert 50 < state.expires_in_s <= 100


async def test_step_and_reset_opens_the_next_episode_when_the_first_ends():
    async with service() as stub:
        await start(stub)
        following = {"next_split": "train", "next_task_key": KEY, "next_seed": 3}
        going = await stub.StepAndReset(pb.StepAndResetRequest(step=step(TOOL), **following))
        assert not going.HasField("reset")
        ending = pb.StepAndResetRequest(step=step(SUBMIT, 1), **following)
        ended = await stub.StepAndReset(ending)
        assert ended.step.terminated
        assert ended.reset.history.prompt.messages[0].content == KEY
        again = await stub.StepAndReset(ending)
        assert again.step.replayed
        assert again.reset == ended.reset
        state = await stub.GetSession(pb.GetSessionRequest(session_id="s"))
        assert (state.episode, state.next_step_index, state.done) == (2, 0, False)


async def test_batches_have_a_status_per_item():
    async with service() as stub:
        for name in "ab":
            await stub.CreateSession(
                pb.CreateSessionRequest(session_id=name, environment="arithmetic")
            )
        resets = await stub.BatchReset(
            pb.BatchResetRequest(items=[reset("a"), reset("lost"), reset("b")])
        )
        kinds = [item.WhichOneof("outcome") for item in resets.items]
        assert kinds == ["response", "error", "response"]
        assert resets.items[1].error.reason == "SESSION_LOST"
        assert resets.items[1].error.code == grpc.StatusCode.NOT_FOUND.value[0]
        items = [step(SUBMIT, session="a"), pb.StepRequest(session_id="b", episode=1)]
        items.append(step(TOOL, session="b"))
        steps = await stub.BatchStep(pb.BatchStepRequest(items=items))
        assert steps.items[0].response.terminated
        assert steps.items[1].error.reason == "FULL_MISSING"
        assert steps.items[2].WhichOneof("outcome") in ("response", "error")
        assert not (await stub.BatchStep(pb.BatchStepRequest())).items


async def test_a_failing_tool_is_a_failure_with_its_owner_and_no_reward():
    async with service() as stub:
        await start(stub, environment="failing")
        answer = await stub.Step(step("<request><secret>x<call>"))
        (failure,) = answer.failures
        assert (failure.owner, failure.reason) == (trajectory_pb2.OWNER_TOOL, "TOOL_FAILED")
        assert "secret text" not in str(answer)
        assert (answer.truncated, answer.done_reason) == (True, DoneReason.ERROR)
        assert not answer.rewards


async def test_a_stream_carries_many_sessions_and_answers_by_request_id():
    async with service(max_concurrent_items=8) as stub:
        call = stub.Interact()
        for n in range(20):
            session = f"s{n}"
            create = pb.CreateSessionRequest(session_id=session, environment="arithmetic")
            for request in [
                pb.InteractRequest(request_id=f"{n}c", create_session=create),
                pb.InteractRequest(request_id=f"{n}r", reset=reset(session)),
                pb.InteractRequest(request_id=f"{n}s", step=step(SUBMIT, session=session)),
            ]:
                await call.write(request)
        await call.write(pb.InteractRequest(request_id="empty"))
        lost = pb.InteractRequest(request_id="lost", reset=reset("nobody"))
        await call.write(lost)
        await call.write(pb.InteractRequest(end={"num_messages": 62}))
        await call.done_writing()
        answers = {answer.request_id: answer async for answer in call}
        assert len(answers) == 62
        assert all(answers[f"{n}s"].step.rewards[0].value == 1.0 for n in range(20))
        assert answers["empty"].error.reason == "INVALID_INPUT"
        assert answers["lost"].error.reason == "SESSION_LOST"


async def test_a_stream_answers_out_of_order():
    answered = asyncio.Event()

    async def slow(query: str) -> str:
        await answered.wait()
        return "late"

    catalogue = Catalogue(
        [tool_environment(name="arithmetic", tasks=TASKS, tools=[slow], rewards=[])]
    )
    async with (
        serving(EnvironmentSettings(), catalogue) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = EnvironmentServiceStub(channel)
        await start(stub, "a")
        await start(stub, "b")
        call = stub.Interact()
        slowly = step("<request><slow>x<call>", session="a")
        await call.write(pb.InteractRequest(request_id="slow", step=slowly))
        await call.write(pb.InteractRequest(request_id="quick", step=step("no", session="b")))
        await call.write(pb.InteractRequest(end={"num_messages": 2}))
        await call.done_writing()
        request_ids = []
        async for answer in call:
            request_ids.append(answer.request_id)
            answered.set()
        assert request_ids == ["quick", "slow"]


def make_trajectory(key: str = KEY) -> trajectory_pb2.Trajectory:
    history = History.from_chats(
        [{"role": "user", "content": key}, {"role": "assistant", "content": SUBMIT}]
    )
    return trajectory_pb2.Trajectory(
        environment="arithmetic",
        task_key=key,
        history=HISTORY.to_proto(history),
        turns=[
            trajectory_pb2.Turn(
                message_start=1, num_messages=1, stop_reason=trajectory_pb2.STOP_REASON_STOP
            )
        ],
        terminated=True,
        done_reason=trajectory_pb2.DONE_REASON_SUBMITTED,
    )


async def test_a_finished_trajectory_can_be_scored():
    async with service() as stub:
        answer = await stub.Score(pb.ScoreRequest(split="train", trajectory=make_trajectory()))
        assert [[r.value for r in turn.rewards] for turn in answer.turns] == [[1.0]]
        unknown = pb.ScoreRequest(split="train", trajectory=make_trajectory("1+1"))
        assert await refusal(stub.Score(unknown)) == ("NOT_FOUND", "TASK_NOT_FOUND")
        running = pb.ScoreRequest(split="train", trajectory=make_trajectory())
        running.trajectory.terminated = False
        refused = await refusal(stub.Score(running))
        assert refused == ("INVALID_ARGUMENT", "TRAJECTORY_NOT_DONE")


async def test_32_sessions_play_at_once():
    async with service() as stub:

        async def play(session: str) -> float:
            await start(stub, session)
            await stub.Step(step(TOOL, session=session))
            last = await stub.Step(step(SUBMIT, 1, session=session))
            await stub.CloseSession(pb.CloseSessionRequest(session_id=session))
            return last.rewards[0].value

        rewards = await asyncio.gather(*(play(f"s{n}") for n in range(32)))
        assert rewards == [1.0] * 32


async def test_the_sdk_client_plays_scores_and_reads_tasks():
    async with (
        serving(EnvironmentSettings(), Catalogue([arithmetic()])) as server,
        Channel(server.address) as channel,
    ):
        client = EnvironmentClient(channel)
        assert (await client.get_environment("arithmetic")).max_turns == 3
        page = await client.list_tasks("arithmetic", split="train", page_size=3, shuffle_seed=1)
        assert len(page.tasks) == 3
        await client.create_session("s", "arithmetic")
        opening = await client.reset("s", episode=1, split="train", task_key=KEY)
        answered = opening.history.respond(Message(role="assistant", content=SUBMIT))
        outcome = await client.step("s", episode=1, step_index=0, history=answered)
        assert outcome.rewards[0].success
        again = await client.step("s", episode=1, step_index=0, history=answered)
        assert again.replayed
        scores = await client.score(TRAJECTORY.from_proto(make_trajectory()), split="train")
        assert [[r.value for r in score.rewards] for score in scores] == [[1.0]]
        assert await client.close_session("s")
