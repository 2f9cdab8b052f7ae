"""Agents: played alone and by a collector; what goes wrong has an owner and is never reward 0."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import openai
import pytest
from dialoop import Dialoop
from dialoop.agents import AgentHost, AgentOutcome, load_agent, play_agent
from dialoop.clients.errors import is_outage
from dialoop.clients.retry import RetryPolicy
from dialoop.errors import CapacityExhausted, InvalidConfig, Unavailable
from dialoop.trajectory import (
    DoneReason,
    Failure,
    Owner,
    Purpose,
    Reward,
    SamplingParams,
    Stage,
    Task,
)
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.model.policy import load_policy
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.training import update
from dialoop_services.collector.agents import AgentPlayer, RecordingReplicas, load_agents
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.inference.recordings.store import RecordingLimits
from dialoop_services.scorer.scoring import Scoring

from tests.support import collector_world
from tests.support.agent_world import ScriptedEngine, agent_world, make_tool_model
from tests.support.collector_world import MAIN_0, RUN

TASK = Task(task_id="t", environment="arithmetic", split="train", key="35+40", seed=3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tool_model(tmp_path_factory.mktemp("agents") / "model")


async def ask_once(task, connection):
    """The simplest agent: one question, and whether the answer has the sum in it."""
    async with openai.AsyncOpenAI(
        base_url=connection.base_url, api_key=connection.api_key, max_retries=0
    ) as client:
        answer = await client.chat.completions.create(
            model=connection.model, messages=[{"role": "user", "content": task.key}]
        )
    return 1.0 if "75" in answer.choices[0].message.content else 0.0


not_async = 3


async def test_an_agents_run_is_a_trajectory_with_its_reward(directory):
    engine = ScriptedEngine(directory, ["It is 75."])
    async with agent_world(directory, engine) as world:
        host = AgentHost(recordings=world.recordings)
        sampling = SamplingParams(temperature=1.0, max_new_tokens=30)
        trajectory = await play_agent(
            TASK, agent=ask_once, host=host, group_id="g", sampling=sampling
        )
    assert trajectory.reward == 1.0
    assert trajectory.is_scorable
    assert (trajectory.group_id, trajectory.task_key, trajectory.seed) == ("g", "35+40", 3)
    assert trajectory.sampling.max_new_tokens == 30
    assert trajectory.num_model_tokens == len(engine.log[0].token_ids)


async def test_a_notebook_records_through_the_sdk(directory):
    engine = ScriptedEngine(directory, ["It is 75."])
    async with agent_world(directory, engine) as world, Dialoop(inference=world.channel) as dialoop:
        host = AgentHost(recordings=dialoop.recordings(world.url))
        assert (await play_agent(TASK, agent=ask_once, host=host)).reward == 1.0


def message_of(trajectory):
    return trajectory.failures[0].message


async def test_a_sync_agent_plays_and_its_error_is_named(directory):
    def ask(task, connection):
        client = openai.OpenAI(base_url=connection.base_url, api_key=connection.api_key)
        message = {"role": "user", "content": task.key}
        answer = client.chat.completions.create(model=connection.model, messages=[message])
        return float("75" in answer.choices[0].message.content)

    def broken(task, connection):
        ask(task, connection)
        raise KeyError("a secret")

    async with agent_world(directory, ScriptedEngine(directory, ["75"] * 2)) as world:
        host = AgentHost(recordings=world.recordings)
        right, wrong = [await play_agent(TASK, agent=a, host=host) for a in (ask, broken)]
    assert right.reward == 1.0
    assert wrong.failures[0].owner is Owner.AGENT
    assert "agent broken failed: KeyError at test_agents.py, line" in message_of(wrong)


async def test_an_agent_that_fails_is_nobodys_reward_of_zero(directory):
    async def broken(task, connection):
        await ask_once(task, connection)
        raise RuntimeError("a secret of the agent")

    async def slow(task, connection):
        await ask_once(task, connection)
        await asyncio.sleep(60)

    async def talkative(task, connection):
        await ask_once(task, connection)
        return "a lot"

    async with agent_world(directory, ScriptedEngine(directory, ["75"] * 3)) as world:
        host = AgentHost(recordings=world.recordings, time_limit_s=2.0)
        played = [await play_agent(TASK, agent=a, host=host) for a in (broken, slow, talkative)]
    failures = [(t.failures[0].owner, t.failures[0].reason) for t in played]
    assert failures == [
        (Owner.AGENT, "AGENT_FAILED"),
        (Owner.AGENT, "AGENT_TIMED_OUT"),
        (Owner.AGENT, "AGENT_FAILED"),
    ]
    assert "agent broken failed: RuntimeError at test_agents.py, line" in message_of(played[0])
    assert "agent talkative returned a str" in message_of(played[2])
    assert not any(t.is_scorable for t in played)
    assert "secret" not in str(played)
    assert all(t.num_model_tokens for t in played)  # what was sampled is kept all the same


async def test_an_agent_that_never_asked_and_a_replica_that_is_away_are_failures(directory):
    async def idle(task, connection):
        return 1.0

    class Away:
        async def create(self, recording_id, **options):
            raise Unavailable("Nobody there.", reason="NOT_READY")

    async with agent_world(directory, ScriptedEngine(directory, [])) as world:
        unasked = await play_agent(TASK, agent=idle, host=AgentHost(recordings=world.recordings))
        away = await play_agent(TASK, agent=idle, host=AgentHost(recordings=Away()))
    failures = [(f.owner, f.reason) for f in unasked.failures]
    assert failures == [(Owner.AGENT, "RECORDING_EMPTY")]
    assert [(f.owner, f.reason) for f in away.failures] == [(Owner.INFERENCE, "NOT_READY")]


async def test_agents_that_fail_before_they_ask_leave_room_for_more_than_the_store_holds(directory):
    """Each recording that nobody closed took a place: at 1,024 the job stood still."""

    async def broken(task, connection):
        raise KeyError("a secret")

    async def cancelled(task, connection):
        raise asyncio.CancelledError

    async def idle(task, connection):
        return 1.0

    def exits(task, connection):
        raise SystemExit(1)

    async def slow(task, connection):
        await asyncio.sleep(60)

    class NoMessages:
        async def create_session(self, session_id, environment):
            raise RuntimeError("a secret")

    limits = RecordingLimits(max_recordings=2)
    engine = ScriptedEngine(directory, ["75"])
    async with agent_world(directory, engine, limits=limits) as world:
        host = AgentHost(recordings=world.recordings, time_limit_s=0.5)
        agents = (broken, cancelled, idle, exits, slow, broken, cancelled, idle, exits)
        played = [await play_agent(TASK, agent=agent, host=host) for agent in agents]
        lost = replace(host, sessions=NoMessages())
        played += [await play_agent(TASK, agent=idle, host=lost) for _ in range(3)]
        patient = replace(host, time_limit_s=60)
        assert (await play_agent(TASK, agent=ask_once, host=patient)).reward == 1.0
    owners = [t.failures[0].owner for t in played]
    assert owners == [Owner.AGENT] * len(agents) + [Owner.ENVIRONMENT] * 3
    reasons = {t.failures[0].reason for t in played[: len(agents)]}
    assert reasons == {"AGENT_FAILED", "AGENT_TIMED_OUT", "RECORDING_EMPTY"}


async def test_a_full_store_is_not_told_as_a_service_that_is_away(directory):
    policy = RetryPolicy(max_attempts=None, first_wait_s=0.01, total_s=0.05)
    limits = RecordingLimits(max_recordings=1)
    async with agent_world(directory, ScriptedEngine(directory, []), limits=limits) as world:
        await world.recordings.create("open")
        replicas = RecordingReplicas([world.recordings], policy)
        with pytest.raises(CapacityExhausted) as caught:
            await replicas.create("another")
    assert caught.value.reason == "TOO_MANY_RECORDINGS"
    assert not is_outage(caught.value)  # or else its task would be played for ever, uncounted


async def test_a_full_context_ends_the_episode_without_a_failure(directory):
    async def chatty(task, connection):
        await ask_once(task, connection)
        try:
            await ask_once(replace(task, task=replace(task.task, key="9" * 200)), connection)
        except openai.BadRequestError as error:
            raise RuntimeError("the library's own") from error

    engine = ScriptedEngine(directory, ["75"], max_model_len=100)
    async with agent_world(directory, engine) as world:
        trajectory = await play_agent(
            TASK, agent=chatty, host=AgentHost(recordings=world.recordings)
        )
    assert trajectory.failures == ()
    assert trajectory.truncated
    assert trajectory.done_reason is DoneReason.MAX_LENGTH


async def test_an_agents_own_failures_and_labels_are_kept(directory):
    async def act_and_score(task, connection):
        await ask_once(task, connection)
        lost = Failure(owner=Owner.POLICY, reason="WRONG_FORMAT", message="no number")
        rewards = (Reward(name="a", value=1.0), Reward(name="b", value=1.0, weight=0.5))
        return AgentOutcome(rewards=rewards, failures=(lost,), labels={"kind": "sum"})

    async with agent_world(directory, ScriptedEngine(directory, ["75"])) as world:
        trajectory = await play_agent(
            TASK, agent=act_and_score, host=AgentHost(recordings=world.recordings)
        )
    assert trajectory.reward == 1.5
    assert trajectory.is_scorable  # the policy's own mistakes are scored
    assert trajectory.labels["kind"] == "sum"


async def test_an_agent_that_is_stopped_leaves_a_closed_recording(directory):
    started = asyncio.Event()

    async def endless(task, connection):
        await ask_once(task, connection)
        started.set()
        await asyncio.sleep(60)

    async with agent_world(directory, ScriptedEngine(directory, ["75"])) as world:
        host = AgentHost(recordings=world.recordings)
        playing = asyncio.create_task(play_agent(TASK, agent=endless, host=host))
        await started.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        (kept,) = world.store._kept.values()
        assert kept.recording.is_closed


def test_agents_are_loaded_by_import_path():
    assert load_agent(f"{__name__}:ask_once") is ask_once
    for wrong in ("nowhere:run", f"{__name__}:nothing", f"{__name__}:not_async", "", "x:"):
        with pytest.raises(InvalidConfig):
            load_agent(wrong)


def test_agents_need_every_replicas_rest_server():
    environment = {"agent": f"{__name__}:ask_once"}
    with pytest.raises(InvalidConfig) as caught:
        load_agents(CollectorSettings(environment=environment))
    assert caught.value.reason == "NO_REST_ADDRESS"
    addresses = ["127.0.0.1:1"]
    settings = CollectorSettings(environment=environment, inference_rest_addresses=addresses)
    assert load_agents(settings) == {"arithmetic": ask_once}
    assert load_agents(CollectorSettings()) == {}


class _Away:
    """A replica that is gone."""

    async def create(self, recording_id, **options):
        raise Unavailable("Nobody there.")


async def test_a_collector_plays_a_group_with_an_agent_and_the_group_trains(directory):
    answers = itertools.cycle(["It is 75.", "It is 7."])

    async def guess(task, connection):
        assert task.prompt[-1].text  # the environment's own question
        await ask_once(task, connection)
        return next(answers) == "It is 75."

    engine = ScriptedEngine(directory, ["It is 75.", "It is 7."] * 20, policy_version=MAIN_0)
    patience = RetryPolicy(max_attempts=None, total_s=10, first_wait_s=0.02, max_wait_s=0.1)
    async with agent_world(directory, engine) as served, collector_world.world() as w:
        host = AgentHost(
            recordings=RecordingReplicas([_Away(), served.recordings], patience),
            sessions=w.environment,
        )
        agent = AgentPlayer(guess, host)
        await w.allow(1)
        async with w.collecting(None, players={"arithmetic": agent}, group_size=2):
            await w.until(lambda c: c.num_groups_unscored == 1)
        leased = await w.replay.lease_groups(RUN, Stage.UNSCORED, worker="s", max_groups=1)
    (lease,) = leased.leases
    assert lease.group.task.purpose is Purpose.TRAINING
    assert all(
        t.is_scorable and t.group_id == lease.group.group_id for t in lease.group.trajectories
    )
    assert all(t.sampling.stop == () for t in lease.group.trajectories)
    group = await Scoring().score(lease.group)
    sequences = [s for t in group.trajectories for s in t.sequences]
    assert sorted(s.advantage for s in sequences)[0] < 0 < max(s.advantage for s in sequences)
    policy = load_policy(directory)
    before = [p.detach().clone() for p in policy.parameters()]
    optimizer = GuardedOptimizer(list(policy.parameters()), OptimizerSettings(learning_rate=1e-3))
    rows = pack_rows([TokenRow.from_sequence(s) for s in sequences])
    assert update(policy, optimizer, [rows], load_objective("dppo_mask")).step.applied
    after = [p.detach() for p in policy.parameters()]
    assert any(not old.equal(new) for old, new in zip(before, after, strict=True))


async def test_a_member_whose_agent_fails_is_played_again(directory):
    runs = itertools.count()

    async def flaky(task, connection):
        if next(runs) == 0:
            raise RuntimeError
        return await ask_once(task, connection)

    engine = ScriptedEngine(directory, ["75"] * 20, policy_version=MAIN_0)
    async with agent_world(directory, engine) as served, collector_world.world() as w:
        agent = AgentPlayer(flaky, AgentHost(recordings=served.recordings))
        await w.allow(1)
        async with w.collecting(None, players={"arithmetic": agent}, group_size=2) as counters:
            await w.until(lambda c: c.num_groups_unscored == 1)
        counts = await w.training()
    assert counters.to_json()["num_failures"] == {"agent/agent_failed": 1}
    assert collector_world.adds_up(counts)
    assert counts.num_trajectories_generated == 3
