"""Row 59: tools of real MCP servers, over stdio and streamable HTTP, through every door."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from dialoop.clients.connection import Dialoop
from dialoop.environments import ArithmeticTasks, ChatEnv, McpServer, McpTools, NativeCalls
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.errors import InvalidConfig
from dialoop.trajectory import Owner
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings

from tests.support.environment_doors import at, open_session, play, texts
from tests.support.waiting import PATIENCE_S

PROGRAM = Path(__file__).parents[2] / "support" / "programs" / "mcp_program.py"
STDIO = McpServer(command=sys.executable, args=(str(PROGRAM),))
SHARED = McpServer(command=sys.executable, args=(str(PROGRAM),), shared=True)
TASKS = ArithmeticTasks()
TASK = {"split": "train", "task_key": TASKS.keys("train")[0]}


def environment(server: McpServer = STDIO, **options) -> ChatEnv:
    tools = McpTools({"lab": server}, **options)
    return ChatEnv(name="lab", tasks=TASKS, transforms=(tools,))


def call(name: str, arguments: str = "{}") -> str:
    return f"<tool>{name}\n{arguments}</tool>"


@pytest.mark.parametrize("door", ["grpc", "rest", "sdk"])
async def test_59_mcp_tools_over_stdio(door):
    async with at(door, environment()) as client:
        info = await client.get_environment("lab")
        assert "lab.add" in info.tools
        assert info.spec.tool_definitions[0].description == "Add two numbers."
        await open_session(client, "lab", **TASK)
        two = call("lab.add", '{"left": 3, "right": 4}') + call("add", '{"left": 1, "right": 1}')
        (outcome,) = await play(client, two)
        assert texts(outcome)[-2:] == [
            "Tool lab.add executed successfully:\n7",
            "Tool add executed successfully:\n2",
        ]
        assert outcome.num_tool_calls == 2


async def test_what_the_policy_gets_wrong_is_told_to_it_and_a_picture_is_no_repr():
    async with at("sdk", environment()) as client:
        await open_session(client, "lab", **TASK)
        answers = (
            call("lab.add", '{"left": "3"}')
            + call("lab.add", "{oops")
            + call("lab.nope")
            + call("lab.fail")
            + call("lab.picture")
        )
        (outcome,) = await play(client, answers)
        *refused, failed, picture = texts(outcome)[-5:]
        assert [text.partition("\n")[2] for text in refused] == [
            "missing argument right.",
            "the arguments are not JSON.",
            "unknown tool lab.nope.",
        ]
        assert "Error executing tool fail" in failed
        assert picture == "Tool lab.picture executed successfully:\n[image]"
        assert not outcome.done
        assert not outcome.failures


async def test_the_server_gets_no_variables_of_the_service(monkeypatch):
    monkeypatch.setenv("SECRET_KEY_OF_THE_SERVICE", "x")
    named = McpServer(command=sys.executable, args=(str(PROGRAM),), env={"GIVEN": "1"})
    async with at("sdk", environment(named)) as client:
        await open_session(client, "lab", **TASK)
        (outcome,) = await play(client, call("lab.variables"))
        assert "GIVEN" in texts(outcome)[-1]
        assert "SECRET_KEY_OF_THE_SERVICE" not in texts(outcome)[-1]


async def test_a_tool_that_never_answers_is_cut_off_and_the_next_call_works():
    async with at("sdk", environment(timeout_s=3.0)) as client:
        await open_session(client, "lab", "a", **TASK)
        await open_session(client, "lab", "b", **TASK)
        (outcome,) = await play(client, call("lab.sleep"), session="a")
        assert [(f.owner, f.reason) for f in outcome.failures] == [(Owner.TOOL, "TOOL_TIMEOUT")]
        assert outcome.truncated
        (other,) = await play(client, call("lab.add", '{"left": 1, "right": 2}'), session="b")
        assert texts(other)[-1].endswith("\n3")


async def test_what_a_server_remembers_is_of_one_episode_unless_it_is_shared():
    for server, counts in ((STDIO, ["1", "2", "1"]), (SHARED, ["1", "2", "3"])):
        made = environment(server)
        assert made.traits.needs_session is not server.shared
        async with at("sdk", made) as client:
            for name in "ab":
                await open_session(client, "lab", name, **TASK)
            outcomes = await play(client, call("lab.count"), call("lab.count"), session="a")
            outcomes += await play(client, call("lab.count"), session="b")
            assert [texts(outcome)[-1].rpartition("\n")[2] for outcome in outcomes] == counts


async def test_an_episodes_server_that_dies_is_not_started_anew_without_its_state():
    async with at("sdk", environment(tool_failures="tell")) as client:
        await open_session(client, "lab", "a", **TASK)
        await open_session(client, "lab", "b", **TASK)
        lines = (call("lab.count"), call("lab.leave"), call("lab.count"))
        outcomes = await play(client, *lines, session="a")
        (other,) = await play(client, call("lab.count"), session="b")
    assert "failed" in texts(outcomes[-1])[-1]
    assert texts(other)[-1].endswith("\n1")


async def test_59_mcp_tools_without_a_server():
    async with Dialoop(environment=environment()) as dialoop:
        await open_session(dialoop.environment, "lab", **TASK)
        (outcome,) = await play(dialoop.environment, call("add", '{"left": 3, "right": 4}'))
        assert texts(outcome)[-1].endswith("\n7")


async def test_only_allowed_tools_are_offered():
    only = McpServer(command=sys.executable, args=(str(PROGRAM),), allowed=("add",))
    async with at("sdk", environment(only, syntax=NativeCalls())) as client:
        assert (await client.get_environment("lab")).tools == ("lab.add",)


async def test_a_server_that_cannot_be_reached_keeps_the_service_down_and_says_what_to_do():
    for server in (
        McpServer(command=sys.executable, args=("-c", "raise SystemExit(3)")),
        McpServer(command="/no/such/program"),
        McpServer(url="http://127.0.0.1:9/mcp"),
        McpServer(command=sys.executable, args=("-c", "import time; time.sleep(60)")),
    ):
        tools = environment(server, start_timeout_s=1.0)
        with pytest.raises(InvalidConfig) as caught:
            await tools.acquire()
        assert caught.value.reason == "MCP_UNREACHABLE"
        assert "by hand" in caught.value.remedy
    missing = McpServer(command=sys.executable, args=(str(PROGRAM),), allowed=("nope",))
    with pytest.raises(InvalidConfig, match="no tool nope"):
        await environment(missing).acquire()


async def test_a_server_that_dies_is_seen_in_readyz_and_its_calls_are_failures():
    settings = EnvironmentSettings(rest_port=0, health_interval_s=0.05, drain_s=1)
    catalogue = Catalogue([environment(SHARED)])
    async with (
        serving(settings, catalogue) as server,
        httpx.AsyncClient(base_url=f"http://{server.rest_address}", trust_env=False) as http,
    ):
        assert (await http.get("/readyz")).status_code == 200
        await http.post("/v1/sessions", json={"session_id": "s", "environment": "lab"})
        await http.post("/v1/sessions/s/reset", json={"episode": 1, **TASK})
        response = {"messages": [{"role": "assistant", "content": call("lab.leave")}]}
        step = {"episode": 1, "step_index": 0, "history": {"response": response}}
        answer = (await http.post("/v1/sessions/s/step", json=step, timeout=PATIENCE_S)).json()
        assert answer["failures"][0]["owner"] == "OWNER_TOOL"
        async with asyncio.timeout(PATIENCE_S):
            while (await http.get("/readyz")).status_code == 200:
                await asyncio.sleep(0.05)
        states = (await http.get("/readyz")).json()["services"]
        assert states["environments/lab"] == "NOT_SERVING"
        async with asyncio.timeout(PATIENCE_S):  # it is connected anew by itself
            while (await http.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.05)


async def test_59_mcp_tools_over_streamable_http():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = subprocess.Popen([sys.executable, str(PROGRAM), str(port)], stderr=subprocess.DEVNULL)
    try:
        await _listening(port)
        async with at("sdk", environment(McpServer(url=f"http://127.0.0.1:{port}/mcp"))) as client:
            await open_session(client, "lab", **TASK)
            (outcome,) = await play(client, call("lab.add", '{"left": 3, "right": 4}'))
            assert texts(outcome)[-1] == "Tool lab.add executed successfully:\n7"
    finally:
        program.kill()
        program.wait()


async def _listening(port: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return
