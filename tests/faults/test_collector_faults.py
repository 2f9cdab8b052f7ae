"""What may die while groups are played, and what must not be lost or doubled then."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from dialoop.chat import as_history
from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.inference import InferenceClient
from dialoop.clients.replay import ReplayClient
from dialoop.clients.retry import RetryPolicy
from dialoop.errors import Unavailable
from dialoop.trajectory import Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop_services.collector.replicas import Replicas
from dialoop_services.replay.store import QueueLimits

from tests.support.collector_world import (
    RUN,
    ScriptedPolicy,
    World,
    adds_up,
    serving_arithmetic,
    serving_policy,
    serving_replay,
    world,
)
from tests.support.queue_model.store import ModelStore
from tests.support.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[2]
PROMPT = as_history("1+2")
ONCE = RetryPolicy(max_attempts=1)
BRIEF = RetryPolicy(max_attempts=None, total_s=PATIENCE_S, first_wait_s=0.02, max_wait_s=0.2)


@asynccontextmanager
async def collector_process(
    w: World, inference_address: str, run_dir: Path, worker: str, *, group_size: int = 2
):
    """`python -m dialoop_services.collector`; killed on leaving if it is still there."""
    settings = {
        "RUN": RUN,
        "RUN_DIR": str(run_dir),
        "WORKER": worker,
        "REPLAY_ADDRESS": w.replay_address,
        "ENVIRONMENT_ADDRESS": w.environment_address,
        "INFERENCE_ADDRESSES": json.dumps([inference_address]),
        "GROUP_SIZE": str(group_size),
        "PAGE_SIZE": "4",
        "LEASE_S": "3",
        "WAIT_S": "0.2",
    }
    environment = {f"DIALOOP_COLLECTOR_{name}": value for name, value in settings.items()}
    paths = {"PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("client", "services"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "dialoop_services.collector",
        cwd=ROOT,
        env=os.environ | paths | environment,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_killed_collectors_tasks_are_issued_again_and_nothing_is_doubled(tmp_path):
    async with world() as w, serving_policy(ScriptedPolicy(delay_s=600)) as stuck:
        await w.allow(3)
        async with collector_process(w, stuck.address, tmp_path, "killed") as process:
            await w.until(lambda c: c.num_groups_leased == 3)
            process.send_signal(signal.SIGKILL)
            await process.wait()
        async with w.collecting(ScriptedPolicy()):
            await w.until(lambda c: c.num_groups_unscored == 3)
        leased = await w.replay.lease_groups(RUN, Stage.UNSCORED, worker="s", max_groups=9)
        assert len({lease.group.task.task_id for lease in leased.leases}) == 3
        counts = await w.training()
        assert counts.num_trajectories_generated == counts.num_trajectories_live == 6
        assert adds_up(counts)


class Spy(ModelStore):
    """A queue that knows which members are finished, and was asked to play."""

    def __init__(self, limits: QueueLimits) -> None:
        super().__init__(limits)
        self.finished: set[tuple[str, int]] = set()
        self.to_be_played_again: set[tuple[str, int]] = set()
        self.num_leases = 0
        self.workers: set[str] = set()
        self.unfinished: dict[str, tuple[str, int, int]] = {}
        """Of each lease its worker, how many members it has, and how many are finished."""

    def is_in_the_middle(self, worker: str) -> bool:
        """Whether a group of a worker has members that are finished and members that are not."""
        return any(w == worker and 0 < n < size for w, size, n in self.unfinished.values())

    async def apply(self, request, answer):
        response = await super().apply(request, answer)
        if isinstance(response, pb.LeaseTasksResponse):
            self.workers.add(request.worker)
            self.num_leases += len(response.leases)
            for held in response.leases:
                self.unfinished[held.lease_id] = request.worker, len(held.members), 0
            played = {(held.task.task_id, m) for held in response.leases for m in held.members}
            self.to_be_played_again |= played & self.finished
        if isinstance(request, pb.AppendMembersRequest):
            for item, outcome in zip(request.items, response.outcomes, strict=True):
                if outcome.status == pb.APPEND_STATUS_APPENDED:
                    self.finished.add((item.lease_id.split("/", 2)[2], item.member))
                    worker, size, count = self.unfinished[item.lease_id]
                    self.unfinished[item.lease_id] = worker, size, count + 1
        return response


@pytest.mark.parametrize(
    "num_kills",
    [
        1,
        pytest.param(
            20,
            marks=[
                pytest.mark.heavy(reason="kills a collector twenty times, some minutes"),
                pytest.mark.timeout(900),
            ],
        ),
    ],
)
async def test_collectors_killed_over_and_over_throw_nothing_away_that_was_finished(
    tmp_path, num_kills
):
    size = 4

    def slow_and_quick(number: int) -> str:
        policy.delay_s = 0.05 * (number % 5)
        # Every second member has another turn, so that the others are finished before it.
        return f"Result={number}<submit>" if number % 2 else "<request><calculator>1+1<call>"

    policy = ScriptedPolicy(answer=slow_and_quick)
    # A loaded machine lets leases run out too; that blames nobody here.
    spy = Spy(QueueLimits(lease_s=60, max_attempts=100))
    async with world(store=spy) as w, serving_policy(policy) as replica, AsyncExitStack() as exits:

        async def start(number: int):
            process = collector_process(w, replica.address, tmp_path, f"c{number}", group_size=size)
            return await exits.enter_async_context(process)

        running = [await start(number) for number in range(2)]
        num_groups = 2
        for kill in range(num_kills):
            await until(lambda worker=f"c{kill}": worker in spy.workers)
            async with asyncio.timeout(PATIENCE_S):
                while not spy.is_in_the_middle(f"c{kill}"):
                    num_groups += 1  # the other collector may have taken what there was
                    await w.allow(num_groups)
                    await asyncio.sleep(0.05)
            process = running.pop(0)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            running.append(await start(2 + kill))
        await w.until(lambda c: c.num_groups_unscored == num_groups)
        leased = await w.replay.lease_groups(RUN, Stage.UNSCORED, worker="s", max_groups=999)
        counts = await w.training()
    assert {lease.group.num_trajectories for lease in leased.leases} == {size}
    assert len({lease.group.group_id for lease in leased.leases}) == num_groups
    played = [t.trajectory_id for lease in leased.leases for t in lease.group.trajectories]
    assert len(set(played)) == len(spy.finished) == num_groups * size
    assert counts.num_trajectories_generated == counts.num_trajectories_live == num_groups * size
    assert not counts.num_groups_dropped
    assert adds_up(counts)
    assert not spy.to_be_played_again
    assert spy.num_leases > num_groups, "tasks of the dead were issued again"


async def test_a_terminated_collector_returns_its_leases_writes_its_counts_and_exits_0(tmp_path):
    policy = ScriptedPolicy()
    async with world() as w, serving_policy(policy) as replica:
        await w.allow(2)
        async with collector_process(w, replica.address, tmp_path, "c1") as process:
            await w.until(lambda c: c.num_groups_unscored == 2)
            policy.delay_s = 600
            await w.allow(3)
            await w.until(lambda c: c.num_groups_leased == 1)
            process.terminate()
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
        counts = await w.training()
        assert counts.num_groups_leased == 0
        written = json.loads((tmp_path / "collector-c1.json").read_text())
        assert written["worker"] == "c1"
        assert written["training"]["num_trajectories"] == counts.num_trajectories_generated == 4
        assert written["training"]["num_tokens"] == 8
        assert written["num_tasks_returned"] == {"shutdown": 1}
        assert adds_up(counts)


async def test_tasks_whose_lease_is_answered_after_the_stop_are_given_back_at_once():
    async with world() as w:
        await w.allow(1)
        lease_tasks = w.replay.lease_tasks

        async def late(*arguments, **options):
            answer = await lease_tasks(*arguments, **options)
            await asyncio.sleep(0.2)
            return answer

        w.replay.lease_tasks = late
        async with w.collecting(ScriptedPolicy()):
            await w.until(lambda c: c.num_groups_leased == 1)
        assert (await w.training()).num_groups_leased == 0


async def test_an_environment_that_dies_loses_no_task():
    async with serving_replay() as replay:
        async with serving_arithmetic() as environment:
            port, address = environment.port, environment.address
            channels = Channel(replay.address), Channel(address, retry=ONCE)
            clients = ReplayClient(channels[0]), EnvironmentClient(channels[1])
            w = World(*clients, replay.address, address)
            policy = ScriptedPolicy(delay_s=0.3)
            await w.allow(4)
            collecting = w.collecting(policy, max_groups_in_flight=4)
            counters = await collecting.__aenter__()
            await w.until(lambda c: c.num_groups_leased > 0)
        await asyncio.sleep(0.5)
        async with serving_arithmetic(port):
            await w.until(lambda c: c.num_groups_unscored == 4)
            await collecting.__aexit__(None, None, None)
        counts = await w.training()
        assert counts.num_groups_dropped == {}
        assert counts.num_trajectories_live == 8
        assert counters.to_json()["training"]["num_trajectories"] == (
            counts.num_trajectories_generated
        )
        assert adds_up(counts)
        for channel in channels:
            await channel.close()


async def test_a_killed_replica_fails_no_member():
    async with world() as w, serving_policy(ScriptedPolicy(delay_s=0.05)) as steady:
        doomed = serving_policy(ScriptedPolicy(delay_s=0.05))
        await doomed.__aenter__()
        addresses = (steady.address, doomed.address)
        channels = [Channel(address, retry=ONCE) for address in addresses]
        replicas = Replicas([InferenceClient(channel) for channel in channels], BRIEF)
        await w.allow(12)
        async with w.collecting(replicas, max_groups_in_flight=2) as counters:
            await w.until(lambda c: c.num_groups_unscored >= 2)
            await doomed.__aexit__(None, None, None)
            await w.until(lambda c: c.num_groups_unscored == 12)
        assert counters.to_json()["num_failures"] == {}
        counts = await w.training()
        assert counts.num_trajectories_generated == counts.num_trajectories_live == 24
        for channel in channels:
            await channel.close()


async def test_a_replay_that_is_away_for_a_while_gets_the_groups_that_were_played():
    async with world() as w:
        await w.allow(2)
        append, outages = w.replay.append_members, iter(range(3))

        async def flaky(*arguments):
            if next(outages, None) is not None:
                raise Unavailable("gone")
            return await append(*arguments)

        w.replay.append_members = flaky
        async with w.collecting(ScriptedPolicy()):
            await w.until(lambda c: c.num_groups_unscored == 2)
        assert (await w.training()).num_trajectories_generated == 4


async def test_an_answer_that_was_lost_after_an_append_doubles_nothing():
    async with world() as w:
        await w.allow(1)
        append, lost = w.replay.append_members, iter([True])

        async def forgetful(*arguments):
            answer = await append(*arguments)
            if next(lost, False):
                raise Unavailable("connection reset")
            return answer

        w.replay.append_members = forgetful
        async with w.collecting(ScriptedPolicy()) as counters, asyncio.timeout(PATIENCE_S):
            while not counters.to_json()["training"]["num_groups_appended"]:
                await asyncio.sleep(0.02)
        counts = await w.training()
        assert counts.num_trajectories_generated == counts.num_trajectories_live == 2


async def test_an_outage_longer_than_patience_does_not_count_against_the_task():
    async def away(*_, **__):
        raise Unavailable("gone")

    policy = ScriptedPolicy()
    async with world() as w:
        await w.allow(1)
        policy.generate = away
        short = RetryPolicy(max_attempts=None, total_s=0.2, first_wait_s=0.02, max_wait_s=0.1)
        async with w.collecting(Replicas([policy], short)) as counters:
            async with asyncio.timeout(PATIENCE_S):
                while counters.to_json()["num_tasks_returned"].get("service_away", 0) < 4:
                    await asyncio.sleep(0.02)
        counts = await w.training()
        assert counts.num_groups_dropped == {}
        assert adds_up(counts)


async def test_a_replica_that_fails_is_left_alone():
    good, bad = ScriptedPolicy(), ScriptedPolicy()

    async def away(*_, **__):
        bad.sampling_log.append(None)
        raise Unavailable("gone", reason="NOT_READY")

    bad.generate = away
    slow = RetryPolicy(max_attempts=None, total_s=20, first_wait_s=10, max_wait_s=10)
    replicas = Replicas([bad, good], slow)
    for _ in range(6):
        await replicas.generate(PROMPT)
    assert len(good.sampling_log) == 6
    assert len(bad.sampling_log) == 1


async def test_a_group_keeps_to_its_replica_and_moves_while_that_is_away():
    policies = {"a": ScriptedPolicy(), "b": ScriptedPolicy()}
    group = Replicas(policies, BRIEF).of_group("g")
    for _ in range(4):
        await group.generate(PROMPT)
    home, other = sorted(policies.values(), key=lambda p: -len(p.sampling_log))
    assert (len(home.sampling_log), len(other.sampling_log)) == (4, 0)

    async def away(*_, **__):
        raise Unavailable("gone", reason="NOT_READY")

    home.generate = away
    await group.generate(PROMPT)
    assert len(other.sampling_log) == 1


async def test_sleep_is_no_outage_however_long_the_trainer_has_the_device():
    policy, naps = ScriptedPolicy(), iter(range(12))
    generate = policy.generate

    async def asleep(*arguments, **named):
        if next(naps, None) is not None:
            raise Unavailable("the trainer has the device", reason="ASLEEP")
        return await generate(*arguments, **named)

    policy.generate = asleep
    short = RetryPolicy(max_attempts=None, total_s=0.05, first_wait_s=0.02, max_wait_s=0.02)
    await Replicas([policy], short).generate(PROMPT)
    assert next(naps, None) is None


async def test_retries_with_all_replicas_away_end():
    bad = ScriptedPolicy()

    async def away(*_, **__):
        raise Unavailable("gone")

    bad.generate = away
    brief = RetryPolicy(max_attempts=None, total_s=0.1, first_wait_s=0.01)
    with pytest.raises(Unavailable) as caught:
        await Replicas([bad], brief).generate(PROMPT)
    assert caught.value.reason == "SERVICE_AWAY"
