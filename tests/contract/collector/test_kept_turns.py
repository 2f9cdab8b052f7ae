"""Episodes whose process died go on at their turn; what was sampled is not sampled again."""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.replay import Appended, ReplayClient
from dialoop.clients.retry import RetryPolicy
from dialoop.environments import Transform, arithmetic, current_call_id, current_episode
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.environments.standard import tool_environment
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Stage
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings

from tests.support.collector_world import (
    MAIN_0,
    RUN,
    ScriptedPolicy,
    World,
    adds_up,
    serving_replay,
)
from tests.support.waiting import until

ASKS, SUBMITS = "<request><look>1+1<call>", "Result=1<submit>"
NUM_TURNS = 3


class Looks:
    """A tool that notes its calls, and answers the same each time unless it `drifts`."""

    name = "look"

    def __init__(self, *, drifts: bool = False) -> None:
        self.call_ids: list[str] = []
        self.drifts = drifts

    @property
    def num_calls(self) -> int:
        return len(self.call_ids)

    def __call__(self, query: str) -> str:
        self.call_ids.append(current_call_id())
        number = self.num_calls if self.drifts else current_episode().state["num_steps"]
        return f"{query}: {number}"


class Steps(Transform):
    """Counts steps: a snapshot has to hold the count."""

    async def step(self, outcome):
        return outcome.remember(num_steps=outcome.episode.state.get("num_steps", 0) + 1)


def environment_with(tool: Looks, redo: str):
    """Arithmetic with another tool, and as many turns as it takes."""
    made = tool_environment(
        name="arithmetic",
        tasks=arithmetic().tasks,
        tools=[tool],
        rewards=[],
        max_turns=9,
        redo=redo,
    )
    return replace(made, transforms=(Steps(), *made.transforms))


@asynccontextmanager
async def playing_on(environment, port: int = 0):
    """A served environment."""
    settings = EnvironmentSettings(port=port, drain_s=0)
    async with serving(settings, Catalogue([environment])) as server:
        yield server


@asynccontextmanager
async def world_of(address: str):
    """A queue, and clients of it and of the environment there."""
    async with AsyncExitStack() as exits:
        replay = await exits.enter_async_context(serving_replay())
        once = RetryPolicy(max_attempts=1)
        channels = [
            await exits.enter_async_context(Channel(each, retry=once))
            for each in (replay.address, address)
        ]
        yield World(
            replay=ReplayClient(channels[0]),
            environment=EnvironmentClient(channels[1]),
            replay_address=replay.address,
            environment_address=address,
        )


class Script(ScriptedPolicy):
    """Asks twice and submits; from call `stuck_at` on it does not answer."""

    def __init__(self, *, stuck_at: int | None = None, version: PolicyVersion = MAIN_0) -> None:
        super().__init__(version=version)
        self.stuck_at = stuck_at
        self.turns: list[int] = []

    async def generate(self, history, *, turn=0, **question):
        self.turns.append(turn)
        self.delay_s = 600 if self.stuck_at is not None and len(self.turns) > self.stuck_at else 0
        self.answer = lambda _: SUBMITS if turn == NUM_TURNS - 1 else ASKS
        return await super().generate(history, turn=turn, **question)


async def members(w: World, num: int = 1):
    await w.until(lambda c: c.num_groups_unscored == num)
    leased = await w.replay.lease_groups(RUN, Stage.UNSCORED, worker="s", max_groups=9)
    assert adds_up(await w.training())
    return [member for lease in leased.leases for member in lease.group.trajectories]


@pytest.mark.parametrize("redo", ["safe", "never", "snapshot"])
@pytest.mark.parametrize("loses_sessions", [False, True])
async def test_the_next_collector_goes_on_where_the_environment_can(redo, loses_sessions):
    """A session that lives on goes on under any `redo`, and runs no tool twice."""
    tool, later = Looks(), PolicyVersion(lineage="main", number=1)
    async with AsyncExitStack() as exits:
        server = await exits.enter_async_context(playing_on(environment_with(tool, redo)))
        w = await exits.enter_async_context(world_of(server.address))
        await w.allow(1)
        stuck = Script(stuck_at=2)
        async with w.collecting(stuck, group_size=1):
            await until(lambda: len(stuck.turns) == 3)
        assert (stuck.turns, tool.num_calls) == ([0, 1, 2], 2)
        if loses_sessions:
            port = server.port
            await server.__aexit__(None, None, None)
            await exits.enter_async_context(playing_on(environment_with(tool, redo), port))
        await w.replay.advance_policy(RUN, later, max_outstanding_groups=1)
        fresh = Script(version=later)
        async with w.collecting(fresh, group_size=1) as counters:
            (member,) = await members(w)
    counts = counters.to_json()
    is_restart = loses_sessions and redo == "never"
    assert fresh.turns == ([0, 1, 2] if is_restart else [2])
    num_again = {"safe": 2, "never": 2, "snapshot": 1}[redo] if loses_sessions else 0
    assert tool.num_calls == 2 + num_again
    num_effects = 4 if is_restart else 2
    assert len(set(tool.call_ids)) == num_effects, "a call that is made again has its first id"
    answers = [message.text for message in member.history if message.role == "tool"]
    assert answers == ["1+1: 1<response>", "1+1: 2<response>"]
    assert counts["num_episodes_continued"] == (0 if is_restart else 1)
    assert counts["num_episodes_restarted"] == ({"session_lost": 1} if is_restart else {})
    assert counts["num_failures"] == {}
    assert len(member.turns) == NUM_TURNS
    assert member.num_model_tokens == 2 * NUM_TURNS
    (sequence,) = member.sequences
    versions = [MAIN_0, MAIN_0, later] if not is_restart else [later] * 3
    sampled = [segment.policy_version for segment in sequence.segments if segment.policy_version]
    assert sampled == versions, "each turn keeps the version that sampled it"
    assert sequence.inference_logprobs.tolist() == [-0.5, -1.5] * 3


@pytest.mark.parametrize("redo", ["safe", "snapshot", "never"])
async def test_an_environment_that_is_started_again_loses_no_turn_unless_it_must(redo):
    tool = Looks()
    async with AsyncExitStack() as exits:
        server = await exits.enter_async_context(playing_on(environment_with(tool, redo)))
        w = await exits.enter_async_context(world_of(server.address))
        await w.allow(1)
        policy = Script()
        generate, port = policy.generate, server.port

        async def while_it_restarts(history, *, turn=0, **question):
            samples = await generate(history, turn=turn, **question)
            if policy.turns == [0, 1]:
                await server.__aexit__(None, None, None)
                await exits.enter_async_context(playing_on(environment_with(tool, redo), port))
            return samples

        policy.generate = while_it_restarts
        async with w.collecting(policy, group_size=1) as counters:
            (member,) = await members(w)
    counts = counters.to_json()
    assert len(member.turns) == NUM_TURNS
    if redo == "never":
        assert policy.turns == [0, 1, 0, 1, 2]
        assert counts["num_episodes_restarted"] == {"session_lost": 1}
        assert counts["training"]["num_trajectories_discarded"] == 1, "its tokens count"
    else:
        assert policy.turns == [0, 1, 2]
        assert (counts["num_episodes_continued"], counts["num_failures"]) == (1, {})


async def test_an_environment_that_claims_a_safe_redo_and_differs_is_played_from_the_start():
    tool = Looks(drifts=True)
    async with AsyncExitStack() as exits:
        server = await exits.enter_async_context(playing_on(environment_with(tool, "safe")))
        w = await exits.enter_async_context(world_of(server.address))
        await w.allow(1)
        stuck = Script(stuck_at=2)
        async with w.collecting(stuck, group_size=1):
            await until(lambda: len(stuck.turns) == 3)
        port = server.port
        await server.__aexit__(None, None, None)
        await exits.enter_async_context(playing_on(environment_with(tool, "safe"), port))
        fresh = Script()
        async with w.collecting(fresh, group_size=1) as counters:
            (member,) = await members(w)
    counts = counters.to_json()
    assert fresh.turns == [0, 1, 2]
    assert counts["num_episodes_restarted"] == {"redo_differs": 1}
    assert counts["training"]["num_trajectories"] == 1, "what was not sampled is no trajectory"
    assert (len(member.turns), member.failures) == (NUM_TURNS, ())


@pytest.mark.parametrize("snapshot", [b"", b"x" * 40])
async def test_a_snapshot_that_is_torn_is_played_from_the_start(snapshot):
    tool = Looks()
    async with AsyncExitStack() as exits:
        server = await exits.enter_async_context(playing_on(environment_with(tool, "snapshot")))
        w = await exits.enter_async_context(world_of(server.address))
        await w.allow(1)
        stuck = Script(stuck_at=2)
        async with w.collecting(stuck, group_size=1):
            await until(lambda: len(stuck.turns) == 3)
        port, get_turns = server.port, w.replay.get_turns
        await server.__aexit__(None, None, None)
        await exits.enter_async_context(playing_on(environment_with(tool, "snapshot"), port))

        async def torn(*arguments, **options):
            *turns, last = await get_turns(*arguments, **options)
            assert last.answer.snapshot
            return (*turns, replace(last, answer=replace(last.answer, snapshot=snapshot)))

        w.replay.get_turns = torn
        fresh = Script()
        async with w.collecting(fresh, group_size=1) as counters:
            (member,) = await members(w)
    assert fresh.turns == [0, 1, 2]
    assert counters.to_json()["num_episodes_restarted"] == {"snapshot_torn": 1}
    assert (len(member.turns), member.failures) == (NUM_TURNS, ())


async def test_a_session_that_began_with_a_snapshot_lives_on_like_any_other():
    tool = Looks()
    async with AsyncExitStack() as exits:
        server = await exits.enter_async_context(playing_on(environment_with(tool, "snapshot")))
        w = await exits.enter_async_context(world_of(server.address))
        await w.allow(1)
        first, second, third = Script(stuck_at=2), Script(stuck_at=0), Script()
        async with w.collecting(first, group_size=1):
            await until(lambda: len(first.turns) == 3)
        port = server.port
        await server.__aexit__(None, None, None)
        await exits.enter_async_context(playing_on(environment_with(tool, "snapshot"), port))
        async with w.collecting(second, group_size=1):
            await until(lambda: second.turns == [2])
        async with w.collecting(third, group_size=1):
            (member,) = await members(w)
    assert third.turns == [2]
    assert (tool.num_calls, len(set(tool.call_ids))) == (3, 2)
    assert len(member.turns) == NUM_TURNS


async def test_a_queue_that_lost_turns_with_its_disk_gets_them_all_once_more():
    tool = Looks()
    async with AsyncExitStack() as exits:
        server = await exits.enter_async_context(playing_on(environment_with(tool, "safe")))
        w = await exits.enter_async_context(world_of(server.address))
        await w.allow(1)
        append, kept, numbers = w.replay.append_turns, [], itertools.count()

        async def forgetful(run, items):
            if next(numbers) == 0:  # it says yes, and then the power fails
                return (Appended(is_duplicate=False, is_rejected=False),)
            kept.extend(item.turn.turn for item in items)
            return await append(run, items)

        w.replay.append_turns = forgetful
        async with w.collecting(Script(), group_size=1):
            (member,) = await members(w)
    assert len(member.turns) == NUM_TURNS
    assert kept == [1, 0, 1, 2]
