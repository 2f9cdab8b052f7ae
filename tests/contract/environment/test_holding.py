"""What the service holds for episodes, how it lets go, and what it refuses when it is full."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.retry import RetryPolicy
from dialoop.environments import (
    ArithmeticTasks,
    ChatEnv,
    Given,
    MaxTurns,
    PythonInterpreter,
    TaskChoice,
    Transform,
    arithmetic,
    dataset_chat_env,
    tool_environment,
)
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.trajectory import DoneReason, Owner
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings

from tests.support.environment_doors import open_session, play, reason_of, say
from tests.support.rest_world import http_of, refusal
from tests.support.waiting import PATIENCE_S, until

TASKS = ArithmeticTasks()
KEY = TASKS.keys("train")[0]
TASK = {"split": "train", "task_key": KEY}
CALL = "<request><gate>x<call>"


class Gate:
    name = "gate"

    def __init__(self) -> None:
        self.runs = 0
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self, query: str) -> str:
        self.runs += 1
        self.entered.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return "through"


class Holds(Transform):
    """Holds something per episode."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.freed: list[str] = []

    def reset(self, opening):
        name = f"episode {len(self.held)}"
        self.held.append(name)
        return opening.remember(held=name)

    async def close(self, episode):
        self.freed.append(episode.state["held"])


@asynccontextmanager
async def serve(*environments, **settings):
    environment_settings = EnvironmentSettings(rest_port=0, drain_s=1, **settings)
    async with (
        serving(environment_settings, Catalogue(environments)) as server,
        Channel(server.address, retry=RetryPolicy(max_attempts=1)) as channel,
    ):
        yield EnvironmentClient(channel), server


async def test_an_episode_is_let_go_once_whether_it_ends_or_its_session_does():
    holds = Holds()
    environment = ChatEnv(name="held", tasks=TASKS, transforms=(holds, MaxTurns(2)))
    async with serve(environment, reap_interval_s=0.02) as (client, _):
        await open_session(client, "held", **TASK)
        await play(client, "a", "b")  # over: freed
        await until(lambda: holds.freed == ["episode 0"])
        await client.reset("s", episode=2, **TASK)
        await client.reset("s", episode=3, **TASK)  # left behind: freed
        await until(lambda: holds.freed == ["episode 0", "episode 1"])
        await client.close_session("s")
        await until(lambda: holds.freed == ["episode 0", "episode 1", "episode 2"])
        await client.create_session("t", "held", ttl_s=2.0)
        await client.reset("t", episode=1, **TASK)  # expires: freed
        await until(lambda: len(holds.freed) == 4)
        await open_session(client, "held", "u", **TASK)  # the service stops: freed
    assert sorted(holds.freed) == sorted(holds.held)


async def test_a_step_that_nobody_comes_back_for_is_cancelled_with_its_tool():
    gate = Gate()
    environment = tool_environment(name="gated", tasks=TASKS, tools=[gate], rewards=[])
    async with serve(environment, abandon_s=0.2) as (client, _):
        await open_session(client, "gated", **TASK)
        asking = asyncio.create_task(client.step("s", episode=1, step_index=0, history=say(CALL)))
        await gate.entered.wait()
        asking.cancel()
        await asyncio.wait([asking])
        async with asyncio.timeout(PATIENCE_S):
            await gate.cancelled.wait()
        again = await client.step("s", episode=1, step_index=0, history=say(CALL))
        assert again.replayed
        assert again.done_reason is DoneReason.ERROR
        assert [(f.owner, f.reason) for f in again.failures] == [
            (Owner.ENVIRONMENT, "STEP_CANCELLED")
        ]
        assert not again.rewards
        assert gate.runs == 1
        assert (await client.reset("s", episode=2, **TASK)).history.prompt


async def test_a_retry_in_time_keeps_the_step():
    gate = Gate()
    environment = tool_environment(name="gated", tasks=TASKS, tools=[gate], rewards=[])
    async with serve(environment, abandon_s=2.0) as (client, _):
        await open_session(client, "gated", **TASK)
        asking = asyncio.create_task(client.step("s", episode=1, step_index=0, history=say(CALL)))
        await gate.entered.wait()
        asking.cancel()
        retry = asyncio.create_task(client.step("s", episode=1, step_index=0, history=say(CALL)))
        await asyncio.sleep(2.5)
        gate.open.set()
        assert not (await retry).failures
        assert gate.runs == 1


async def test_two_steps_at_once_are_aborted_and_too_many_steps_are_refused_for_now():
    gate = Gate()
    environment = tool_environment(name="gated", tasks=TASKS, tools=[gate], rewards=[])
    async with serve(environment, max_working_steps=1) as (client, server):
        await open_session(client, "gated", "a", **TASK)
        await open_session(client, "gated", "b", **TASK)
        first = asyncio.create_task(client.step("a", episode=1, step_index=0, history=say(CALL)))
        await gate.entered.wait()
        second = client.step("a", episode=1, step_index=0, history=say("other"))
        assert await reason_of(second) == "SESSION_BUSY"
        async with http_of(server) as http:
            response = {"messages": [{"role": "assistant", "content": CALL}]}
            body = {"episode": 1, "step_index": 0, "history": {"response": response}}
            busy = await http.post("/v1/sessions/a/step", json={**body, "step_index": 1})
            assert refusal(busy) == (409, "SESSION_BUSY")
            full = await http.post("/v1/sessions/b/step", json=body)
            assert refusal(full) == (429, "CAPACITY")
            assert full.headers["retry-after"] == "1"
        gate.open.set()
        assert not (await first).failures
        assert not (await play(client, CALL, session="b"))[0].failures


async def test_a_group_is_all_or_none():
    async with serve(arithmetic(), ChatEnv(name="blank"), capacity=3) as (client, _):
        choice = TaskChoice(**TASK)
        too_many = client.create_group("g", "arithmetic", num_sessions=4, choice=choice)
        assert await reason_of(too_many) == "OUT_OF_RANGE"
        await client.create_session("g.1", "blank")
        taken = client.create_group("g", "arithmetic", num_sessions=2, choice=choice)
        assert await reason_of(taken) == "SESSION_CONFLICT"
        assert await reason_of(client.get_session("g.0")) == "SESSION_LOST"
        full = client.create_group("h", "arithmetic", num_sessions=3, choice=choice)
        assert await reason_of(full) == "CAPACITY"
        unknown = TaskChoice(split="train", task_key="nope")
        refused = client.create_group("h", "arithmetic", num_sessions=2, choice=unknown)
        assert await reason_of(refused) == "TASK_NOT_FOUND"
        assert await reason_of(client.get_session("h.0")) == "SESSION_LOST"
        await client.create_group("h", "arithmetic", num_sessions=2, choice=choice)
        other = client.create_group(
            "h", "arithmetic", num_sessions=2, choice=TaskChoice(**TASK, seed=9)
        )
        assert await reason_of(other) == "STEP_CONFLICT"


async def test_a_retried_group_joins_its_task_and_disturbs_no_session_that_went_on():
    environment = dataset_chat_env([{"query": f"q{n}"} for n in range(9)], shuffle=False)
    async with serve(environment) as (client, _):
        ask = {"num_sessions": 2, "choice": TaskChoice()}
        first = await client.create_group("g", "dataset", **ask)
        await client.close_session("g.0")
        again = await client.create_group("g", "dataset", **ask)
        assert again.openings[0].history == first.openings[1].history
        for episode in (2, 3, 4):
            await client.reset("g.1", episode=episode)
        refused = client.create_group("g", "dataset", **ask)
        assert await reason_of(refused) == "STEP_CONFLICT"
        assert (await client.get_session("g.1")).episode == 4


async def test_the_documents_old_names_are_read_over_rest():
    async with serve(ChatEnv(name="blank")) as (_, server), http_of(server) as http:
        await http.post("/v1/sessions", json={"session_id": "s", "environment": "blank"})
        old = {"episode": 1, "text": "Write a function."}
        opening = (await http.post("/v1/sessions/s/reset", json=old)).json()
        assert opening["history"]["prompt"]["messages"][0]["content"] == "Write a function."
        for index, text in enumerate(("one", ["two"])):
            step = {"episode": 1, "step_index": index, "text_response": text}
            outcome = (await http.post("/v1/sessions/s/step", json=step)).json()
        spoken = [m["content"] for m in outcome["history"]["prompt"]["messages"]]
        assert spoken == ["Write a function.", "one", "two"]
        for wrong in ({"episode": 2, "text": 3}, {"episode": 2, "text": "a", "query": "b"}):
            refused = await http.post("/v1/sessions/s/reset", json=wrong)
            assert refusal(refused)[0] == 400


async def test_the_documents_example_of_a_python_interpreter_works_with_its_own_names():
    environment = ChatEnv(
        name="python", system_prompt="Decorate your code.", transforms=(PythonInterpreter(),)
    )
    code = "Here:\n```python\ndef square(x):\n    return x * x\nprint('square:', square(2))\n```\n"
    async with serve(environment) as (_, server), http_of(server) as http:
        await http.post("/v1/sessions", json={"session_id": "s", "environment": "python"})
        await http.post("/v1/sessions/s/reset", json={"episode": 1, "text": "Square a number."})
        step = {"episode": 1, "text_response": [code]}
        outcome = (await http.post("/v1/sessions/s/step", json=step)).json()
        last = outcome["history"]["prompt"]["messages"][-1]
        assert last["role"] == "tool"
        assert last["content"] == "Code block 1 executed successfully:\nsquare: 4\n"


async def test_unknown_environments_and_questions_for_closed_ones_are_refused():
    async with serve(arithmetic()) as (client, _):
        assert await reason_of(client.create_session("x", "nope")) == "ENVIRONMENT_NOT_FOUND"
        choice = TaskChoice(question=Given(query="1+1"))
        group = client.create_group("g", "nope", num_sessions=1, choice=choice)
        assert await reason_of(group) == "ENVIRONMENT_NOT_FOUND"
        opening = await open_session(client, "arithmetic", question=Given(query="12+13"))
        # Any ChatEnv plays a question of its caller.
        assert opening.history.prompt[0].text == "12+13"


@pytest.mark.parametrize("views", [("history", "text"), ("text", "tokens")])
async def test_a_step_in_two_views_is_refused(views):
    body = {
        "history": {"response": {"messages": [{"role": "assistant", "content": "x"}]}},
        "text": {"response": "x"},
        "tokens": {"response": {"values": [1]}},
    }
    async with serve(ChatEnv(name="blank")) as (client, server), http_of(server) as http:
        await open_session(client, "blank", question=Given(query="q"))
        step = {"episode": 1, "step_index": 0, **{view: body[view] for view in views}}
        answer = await http.post("/v1/sessions/s/step", json=step)
        assert refusal(answer) == (400, "WRONG_MODE")


async def test_a_blank_environment_is_served_by_config_alone():
    options = {"system_prompt": "Be brief.", "end_on_tag": "answer", "max_steps": 3}
    entries = [{"use": "chat", "options": options}]
    settings = EnvironmentSettings(rest_port=0, drain_s=1, environments=entries)
    async with serving(settings) as server, http_of(server) as http:
        await http.post("/v1/sessions", json={"session_id": "s", "environment": "chat"})
        reset = {"episode": 1, "query": "What is 3+4?", "data": {"answer": "7"}}
        opening = (await http.post("/v1/sessions/s/reset", json=reset)).json()
        spoken = [m["content"] for m in opening["history"]["prompt"]["messages"]]
        assert spoken == ["Be brief.", "What is 3+4?"]
        step = {"episode": 1, "step_index": 0, "text_response": "<answer>7</answer>"}
        outcome = (await http.post("/v1/sessions/s/step", json=step)).json()
        assert outcome["terminated"]
        assert outcome["done_reason"] == "DONE_REASON_CONTENT"
        assert outcome["rewards"][0]["value"] == 1.0
