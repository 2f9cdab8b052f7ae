"""Row 58: the Python a policy writes, run in the sandbox, through every door."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from dialoop.environments import ArithmeticTasks, ChatEnv, MaxTurns, PythonInterpreter
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.errors import Unavailable
from dialoop.sandbox import Assessment, Sandbox, self_test
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentEntry, EnvironmentSettings

from tests.support.environment_doors import DOORS, at, open_session, play, roles, say, texts
from tests.support.sandbox_world import descendants
from tests.support.waiting import PATIENCE_S

TASKS = ArithmeticTasks()
TASK = {"split": "train", "task_key": TASKS.keys("train")[0]}


def environment(**options) -> ChatEnv:
    transforms = (PythonInterpreter(**options), MaxTurns(50))
    return ChatEnv(name="python", tasks=TASKS, transforms=transforms)


def block(code: str) -> str:
    return f"```python\n{code}\n```"


@pytest.mark.parametrize("door", DOORS)
async def test_58_python_interpreter(door):
    async with at(door, environment(persistent=True)) as client:
        info = await client.get_environment("python")
        assert info.spec.facts["sandbox"] in ("bubblewrap", "landlock", "rlimits")
        assert "network" in info.spec.facts["sandbox_denies"]
        await open_session(client, "python", **TASK)
        both = block("x = 20; print(x)") + "\nand\n" + block("x.nope")
        first, second = await play(client, both, block("print(x + 1)"))
        assert roles(first)[-3:] == ["assistant", "tool", "tool"]
        good, bad = texts(first)[-2:]
        assert good == "Code block 1 executed successfully:\n20\n"
        assert bad.startswith("Code block 2 failed:\nTraceback")
        assert texts(second)[-1] == "Code block 1 executed successfully:\n21\n"
        assert first.num_tool_calls == 2


async def test_a_retried_step_runs_its_code_once():
    async with at("sdk", environment(persistent=True)) as client:
        await open_session(client, "python", **TASK)
        await play(client, block("runs = 0"))
        again = {"episode": 1, "step_index": 1, "history": say(block("runs += 1"))}
        storm = [client.step("s", **again) for _ in range(8)]
        assert len({texts(outcome)[-1] for outcome in await asyncio.gather(*storm)}) == 1
        last = await client.step("s", episode=1, step_index=2, history=say(block("print(runs)")))
        assert texts(last)[-1].endswith("\n1\n")


async def test_sessions_do_not_share_and_a_reset_forgets():
    async with at("sdk", environment(persistent=True)) as client:
        await open_session(client, "python", "a", **TASK)
        await open_session(client, "python", "b", **TASK)
        await play(client, block("x = 'a'"), session="a")
        (other,) = await play(client, block("print(x)"), session="b")
        assert "NameError" in texts(other)[-1]
        await client.reset("a", episode=2, **TASK)
        (fresh,) = await play(client, block("print(x)"), session="a", episode=2)
        assert "NameError" in texts(fresh)[-1]


async def test_closing_a_session_ends_its_interpreter():
    env = environment(persistent=True, sandbox=Sandbox(num_spares=0))
    async with at("sdk", env) as client:
        await open_session(client, "python", **TASK)
        await play(client, block("x = 1"))
        server = env.transforms[0].sandbox._pool.forkserver_pid
        assert descendants(server)
        await client.close_session("s")
        async with asyncio.timeout(PATIENCE_S):
            while descendants(server):
                await asyncio.sleep(0.02)


async def test_others_are_answered_while_code_never_ends():
    async with at("sdk", environment(timeout_s=2.0)) as client:
        await open_session(client, "python", "slow", **TASK)
        await open_session(client, "python", "quick", **TASK)
        await play(client, block("print(0)"), session="quick")
        endless = asyncio.create_task(play(client, block("while True: pass"), session="slow"))
        times = []
        for index in range(1, 20):
            started = time.perf_counter()
            step = {"episode": 1, "step_index": index, "history": say(block("print(1)"))}
            await client.step("quick", **step)
            times.append(time.perf_counter() - started)
            if endless.done():
                break
        (outcome,) = await endless
        assert texts(outcome)[-1].startswith("Code block 1 failed:\nTimed out after 2 s.")
        assert sorted(times)[len(times) // 2] < 1.5


async def test_readyz_tells_the_level():
    settings = EnvironmentSettings(rest_port=0, drain_s=1)
    async with (
        serving(settings, Catalogue([environment()])) as server,
        httpx.AsyncClient(base_url=f"http://{server.rest_address}", trust_env=False) as http,
    ):
        details = (await http.get("/readyz")).json()["details"]
        assert details["environments/python"]["sandbox"] in ("bubblewrap", "landlock", "rlimits")


async def test_the_service_does_not_start_without_the_configured_level(monkeypatch):
    def assess(level):
        return Assessment(level=level, missing="not on this machine")

    monkeypatch.setattr(self_test, "assess", assess)
    entry = EnvironmentEntry(use=f"{__name__}:environment")
    with pytest.raises(Unavailable) as refused:
        async with serving(EnvironmentSettings(environments=[entry])):
            pass
    assert refused.value.reason == "SANDBOX_LEVEL_MISSING"
    assert "not on this machine" in refused.value.message
