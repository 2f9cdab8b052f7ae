"""When clients vanish, steps hang, sessions close mid-step, or the service is killed."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import grpc
import pytest
from dialoop.environments import ArithmeticTasks, ChatEnv, Transform, tool_environment
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.v1 import chat_pb2, trajectory_pb2
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1.environment_service_pb2_grpc import EnvironmentServiceStub
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings

from tests.support.waiting import PATIENCE_S

TASKS = ArithmeticTasks()
KEY = TASKS.keys("train")[0]


class Gate:
    name = "gate"

    def __init__(self) -> None:
        self.runs = 0
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        self.was_cancelled = False

    async def __call__(self, query: str) -> str:
        self.runs += 1
        self.entered.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return "through"


class Hangs(Transform):
    async def step(self, outcome):
        await asyncio.sleep(60)
        return outcome


@asynccontextmanager
async def service(*environments, **settings):
    async with (
        serving(EnvironmentSettings(**settings), Catalogue(environments)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield EnvironmentServiceStub(channel)


def gated_environment(gate: Gate) -> ChatEnv:
    return tool_environment(name="gated", tasks=TASKS, tools=[gate], rewards=[])


async def start(stub, environment: str, session: str = "s") -> None:
    await stub.CreateSession(pb.CreateSessionRequest(session_id=session, environment=environment))
    await stub.Reset(pb.ResetRequest(session_id=session, episode=1, split="train", task_key=KEY))


def step(text: str = "<request><gate>x<call>", session: str = "s") -> pb.StepRequest:
    message = chat_pb2.Message(role="assistant", content=text)
    history = chat_pb2.ChatHistory(response=chat_pb2.History(messages=[message]))
    return pb.StepRequest(
        session_id=session, episode=1, step_index=0, history=history, whole_prompt=True
    )


async def test_a_cancelled_call_leaves_its_step_running_and_a_retry_gets_the_answer():
    gate = Gate()
    async with service(gated_environment(gate)) as stub:
        await start(stub, "gated")
        first = stub.Step(step())
        await gate.entered.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        retry = asyncio.ensure_future(stub.Step(step()))
        await asyncio.sleep(0.05)
        gate.open.set()
        answer = await retry
        assert answer.replayed
        assert answer.history.prompt.messages[-1].content == "through<response>"
        assert gate.runs == 1
        assert not gate.was_cancelled


async def test_a_deadline_that_passes_runs_no_tool_twice():
    gate = Gate()
    async with service(gated_environment(gate)) as stub:
        await start(stub, "gated")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Step(step(), timeout=1.0)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        gate.open.set()
        answer = await stub.Step(step())
        assert answer.history.prompt.messages[-1].content == "through<response>"
        assert gate.runs == 1


async def test_a_stream_that_breaks_off_leaves_its_steps_to_be_found():
    gate = Gate()
    async with service(gated_environment(gate)) as stub:
        await start(stub, "gated")
        call = stub.Interact()
        await call.write(pb.InteractRequest(request_id="1", step=step()))
        await gate.entered.wait()
        call.cancel()
        gate.open.set()
        assert (await stub.Step(step())).replayed
        assert gate.runs == 1


async def test_closing_mid_step_cancels_the_tool_and_tells_the_waiting_client():
    gate = Gate()
    async with service(gated_environment(gate)) as stub:
        await start(stub, "gated")
        waiting = asyncio.ensure_future(stub.Step(step()))
        await gate.entered.wait()
        await stub.CloseSession(pb.CloseSessionRequest(session_id="s"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await waiting
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert gate.was_cancelled


async def test_a_hanging_step_ends_its_episode_as_an_error_and_harms_no_other():
    hanging = ChatEnv(name="hanging", tasks=TASKS, transforms=(Hangs(),))
    gate = Gate()
    gate.open.set()
    async with service(hanging, gated_environment(gate), step_timeout_s=2.0) as stub:
        await start(stub, "hanging")
        await start(stub, "gated", "other")
        stuck = asyncio.ensure_future(stub.Step(step()))
        assert not (await stub.Step(step(session="other"))).failures
        answer = await stuck
        (failure,) = answer.failures
        assert (failure.owner, failure.reason) == (
            trajectory_pb2.OWNER_ENVIRONMENT,
            "STEP_TIMEOUT",
        )
        assert answer.truncated
        assert not answer.rewards
        assert (await stub.Step(step())).replayed


async def test_stopping_the_service_mid_step_ends_in_time_and_cancels_the_tool():
    gate = Gate()
    async with service(gated_environment(gate), drain_s=0.1) as stub:
        await start(stub, "gated")
        waiting = asyncio.ensure_future(stub.Step(step()))
        await gate.entered.wait()
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await waiting
    assert gate.was_cancelled


def _launch(port: int) -> subprocess.Popen[str]:
    environment = dict(os.environ, DIALOOP_ENVIRONMENT_PORT=str(port))
    return subprocess.Popen(
        [sys.executable, "-m", "dialoop_services.environment"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def _port(process: subprocess.Popen[str]) -> int:
    for line in process.stderr:
        if "address=" in line:
            return int(line.rpartition(":")[2].strip().rstrip("]"))
    raise AssertionError("the service did not start")


async def test_after_a_kill_a_session_is_lost_and_never_a_fresh_one():
    first = _launch(0)
    port = _port(first)
    second = None
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await start(EnvironmentServiceStub(channel), "arithmetic")
        first.send_signal(signal.SIGKILL)
        first.wait()
        second = _launch(port)
        _port(second)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await EnvironmentServiceStub(channel).Step(step("Result=1<submit>"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        second.terminate()
        assert second.wait(timeout=PATIENCE_S) == 0
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait()
                process.stderr.close()


def test_a_broken_task_file_or_an_unknown_environment_is_one_sentence_and_exit_2(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "q", "answer": "1"}\n{oops\n')
    for name, value, sentence in [
        ("TASK_FILE", str(path), f"Line 2 of {path}"),
        ("ENVIRONMENTS", "nope", "There is no environment 'nope'."),
    ]:
        ended = subprocess.run(
            [sys.executable, "-m", "dialoop_services.environment"],
            env=dict(os.environ, **{f"DIALOOP_ENVIRONMENT_{name}": value}),
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 2
        assert sentence in ended.stderr
        assert ended.stderr.count("\n") == 1
