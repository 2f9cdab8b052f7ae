from __future__ import annotations

import asyncio
from dataclasses import replace
from unittest.mock import patch

import pytest
from dialoop.clients.retry import RetryPolicy
from dialoop.collection import collect
from dialoop.environments import arithmetic
from dialoop.errors import CapacityExhausted, DeadlineExceeded, InternalError
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Purpose, SamplingParams, Stage, Task
from dialoop_services.collector.replicas import Replicas
from dialoop_services.replay.store import QueueLimits

from tests.support.collector_world import RUN, ScriptedPolicy, adds_up, make_tasks, world
from tests.support.waiting import PATIENCE_S


def failing(*numbers: int):
    """An answer that raises on these calls."""

    def answer(number: int) -> str:
        if number in numbers:
            raise InternalError("out of memory")
        return f"Result={number}<submit>"

    return answer


async def test_tasks_become_whole_groups_under_the_names_the_ledger_expects():
    async with world() as w:
        await w.allow(5)
        async with w.collecting(ScriptedPolicy()) as counters:
            await w.until(lambda c: c.num_groups_unscored == 5)
        leased = await w.replay.lease_groups(RUN, Stage.UNSCORED, worker="s", max_groups=9)
        for lease in leased.leases:
            task = lease.group.task
            assert task.task_id == f"arithmetic/train/0/{task.key}"
            assert lease.group.group_id == task.task_id
            assert lease.group.num_trajectories == task.num_trajectories == 2
            assert all(t.is_scorable for t in lease.group.trajectories)
        counts = await w.training()
        assert adds_up(counts)
        assert counters.to_json()["training"]["num_trajectories"] == 10
        assert counts.num_trajectories_generated == 10


async def test_no_more_groups_are_played_than_there_are_credits():
    async with world() as w, w.collecting(ScriptedPolicy()):
        await asyncio.sleep(0.3)
        assert (await w.training()).num_trajectories_generated == 0
        await w.allow(2)
        await w.until(lambda c: c.num_groups_unscored == 2)
        await asyncio.sleep(0.3)
        assert (await w.training()).num_groups_unscored == 2


async def test_a_page_of_tasks_is_kept_on_offer_through_the_epochs():
    async with world() as w:
        await w.allow(6)
        async with w.collecting(ScriptedPolicy(), page_size=4):
            await w.until(lambda c: c.num_groups_unscored == 6 and c.num_tasks_offered >= 4)
        assert (await w.training()).num_tasks_offered < 8


async def test_two_collectors_play_different_tasks():
    async with world() as w:
        await w.allow(8)
        async with (
            w.collecting(ScriptedPolicy(delay_s=0.01), worker="a"),
            w.collecting(ScriptedPolicy(delay_s=0.01), worker="b"),
        ):
            await w.until(lambda c: c.num_groups_unscored == 8)
        counts = await w.training()
        assert counts.num_trajectories_generated == counts.num_trajectories_live == 16
        leased = await w.replay.lease_groups(RUN, Stage.UNSCORED, worker="s", max_groups=9)
        assert len({lease.group.task.key for lease in leased.leases}) == 8


async def test_evaluation_tasks_keep_their_sampling_and_get_the_environments_stop_strings():
    policy = ScriptedPolicy()
    async with world() as w:
        greedy = SamplingParams(temperature=0.0)
        tasks = await make_tasks(w, 2, purpose=Purpose.EVALUATION, sampling=greedy)
        await w.replay.offer_tasks(RUN, tasks)
        async with w.collecting(policy, max_new_tokens=9) as counters, asyncio.timeout(PATIENCE_S):
            while counters.to_json()["evaluation"]["num_groups_appended"] < 2:
                await asyncio.sleep(0.02)
        leased = await w.replay.lease_groups(RUN, Stage.EVALUATION, worker="t", max_groups=9)
        assert len(leased.leases) == 2
        stop = (await w.environment.get_environment("arithmetic")).stop
    assert stop
    assert policy.sampling_log == [SamplingParams(temperature=0.0, max_new_tokens=9, stop=stop)] * 2


async def test_a_member_that_failed_is_played_again_and_its_first_play_is_counted_once():
    async with world() as w:
        await w.allow(1)
        async with w.collecting(ScriptedPolicy(answer=failing(1))) as counters:
            await w.until(lambda c: c.num_groups_unscored == 1)
        counts = await w.training()
        assert counts.num_trajectories_dropped == {"member_retried": 1}
        assert (counts.num_trajectories_generated, counts.num_trajectories_live) == (3, 2)
        assert adds_up(counts)
    counted = counters.to_json()
    assert counted["training"]["num_trajectories"] == 3
    assert counted["training"]["num_trajectories_discarded"] == 1
    assert counted["num_failures"] == {"inference/internal": 1}


async def test_a_task_whose_member_always_fails_is_given_back_and_dropped_at_last():
    always = ScriptedPolicy(answer=failing(*range(1, 1000)))
    async with world(QueueLimits(max_attempts=2)) as w:
        tasks = await make_tasks(w, 1, purpose=Purpose.TRAINING, num_trajectories=2)
        await w.replay.offer_tasks(RUN, tasks)
        await w.allow(1)
        async with w.collecting(always, member_retries=1, page_size=1) as counters:
            await w.until(lambda c: c.num_groups_dropped.get("member_failed", 0) >= 1)
        counts = await w.training()
        assert adds_up(counts)
        assert counts.num_trajectories_live == 0
        played = counters.to_json()["training"]["num_trajectories"]
        assert played == counts.num_trajectories_generated


@pytest.mark.parametrize("reason", ["ANSWER_TIMED_OUT", "DEADLINE_EXCEEDED"])
async def test_an_answer_that_is_always_late_is_counted_and_dropped_by_its_name(reason: str):
    """Taken for an outage, it would be leased for ever and hold its credit."""

    def answer(number: int) -> str:
        raise DeadlineExceeded("late", reason=Reason(reason))

    always = ScriptedPolicy(answer=answer)
    patience = RetryPolicy(max_attempts=None, total_s=0.1, first_wait_s=0.02)
    async with world(QueueLimits(max_attempts=2)) as w:
        tasks = await make_tasks(w, 1, purpose=Purpose.TRAINING, num_trajectories=2)
        await w.replay.offer_tasks(RUN, tasks)
        await w.allow(1)
        replicas = Replicas([always], patience)
        async with w.collecting(replicas, member_retries=1, page_size=1) as counters:
            await w.until(lambda c: c.num_groups_dropped.get(reason.lower(), 0) >= 1)
        counts = await w.training()
    assert adds_up(counts)
    assert set(counters.to_json()["num_failures"]) == {f"inference/{reason.lower()}"}


async def test_a_member_too_large_to_append_is_counted_as_failed():
    async with world(QueueLimits(max_attempts=2)) as w:

        async def append_members(*_, **__):
            raise CapacityExhausted("too large", reason=Reason.MESSAGE_TOO_LARGE)

        await w.allow(1)
        with patch.object(w.replay, "append_members", append_members):
            async with w.collecting(ScriptedPolicy()):
                await w.until(lambda c: c.num_groups_dropped.get("message_too_large", 0) >= 1)
        assert adds_up(await w.training())


async def test_a_group_that_finds_the_no_room_is_counted_and_the_next_is_played():
    limits = QueueLimits(lease_s=60, max_waiting_groups=1, overflow="reject")
    async with world(limits) as w:
        await w.allow(2)
        async with w.collecting(ScriptedPolicy(), page_size=1) as counters:
            await w.until(lambda c: c.num_groups_dropped.get("no_room", 0) >= 3)
        counts = await w.training()
        assert adds_up(counts)
        assert counts.num_groups_unscored == 1
    counted = counters.to_json()
    assert counted["training"]["num_trajectories_appended"] == counts.num_trajectories_generated
    assert set(counted["num_tasks_returned"]) <= {"shutdown"}, "nothing failed"


async def test_an_unknown_environment_drops_its_task_and_nothing_else():
    async with world(QueueLimits(max_attempts=1)) as w:
        lost = Task(task_id="x", environment="nowhere", split="train", key="1", num_trajectories=2)
        await w.replay.offer_tasks(RUN, [lost])
        await w.allow(2)
        async with w.collecting(ScriptedPolicy()):
            await w.until(lambda c: c.num_groups_unscored == 2)
        assert (await w.training()).num_groups_dropped == {"environment_not_found": 1}


async def test_a_rejected_group_is_given_back_under_the_ledgers_reason():
    ahead = ScriptedPolicy(version=PolicyVersion(lineage="main", number=7))
    async with world(QueueLimits(max_attempts=1)) as w:
        await w.allow(1)
        async with w.collecting(ahead, patience_s=0.1) as counters:
            await w.until(lambda c: c.num_groups_dropped.get("future_version", 0) >= 1)
        counts = await w.training()
        assert adds_up(counts)
        assert counters.to_json()["num_tasks_returned"]["future_version"] >= 1


async def test_what_an_unannounced_policy_sampled_waits_for_the_announcement():
    """A queue that lost its last second is told its newest policy again a little later."""
    newest = PolicyVersion(lineage="main", number=7)
    async with world() as w:
        await w.allow(1)
        async with w.collecting(ScriptedPolicy(version=newest)) as counters:
            async with asyncio.timeout(PATIENCE_S):
                while not counters.to_json()["training"]["num_trajectories"]:
                    await asyncio.sleep(0.01)
            assert (await w.training()).num_groups_unscored == 0
            await w.replay.advance_policy(RUN, newest, max_outstanding_groups=1)
            await w.until(lambda c: c.num_groups_unscored == 1)
        counts = await w.training()
        assert adds_up(counts)
        assert not counts.num_groups_dropped
        assert counters.to_json()["num_tasks_returned"].keys() <= {"shutdown"}


async def test_a_policys_own_failure_is_appended_not_played_again():
    async with world() as w:
        await w.allow(1)
        nonsense = ScriptedPolicy(answer=lambda _: "<request><Calculator>1/0<call>")
        async with w.collecting(nonsense, max_turns=3):
            await w.until(lambda c: c.num_groups_unscored == 1)
        counts = await w.training()
        assert counts.num_trajectories_generated == 2
        assert not counts.num_trajectories_dropped


async def test_a_collector_that_stops_gives_its_leases_back_at_once():
    async with world() as w:
        await w.allow(3)
        async with w.collecting(ScriptedPolicy(delay_s=600)) as counters:
            await w.until(lambda c: c.num_groups_leased == 3)
        counts = await w.training()
        assert counts.num_groups_leased == 0
        assert counts.num_groups_dropped == {}
        assert counters.to_json()["num_tasks_returned"] == {"shutdown": 3}
        async with w.collecting(ScriptedPolicy()):
            await w.until(lambda c: c.num_groups_unscored == 3)
        assert adds_up(await w.training())


async def test_members_finished_before_a_stop_are_counted_as_thrown_away():
    def slow_second(number: int) -> str:
        if number == 2:
            raise InternalError("again, later")
        return "Result=1<submit>"

    async with world() as w:
        await w.allow(1)
        policy = ScriptedPolicy(answer=slow_second)
        async with w.collecting(policy, member_retries=9) as counters:
            async with asyncio.timeout(PATIENCE_S):
                while counters.to_json()["training"]["num_trajectories"] < 2:
                    await asyncio.sleep(0)
        counts = await w.training()
        played = counters.to_json()["training"]["num_trajectories"]
        assert counts.num_trajectories_generated == played
        assert adds_up(counts)


async def test_leases_are_extended_while_a_group_is_played():
    async with world() as w:
        await w.allow(1)
        async with w.collecting(ScriptedPolicy(delay_s=4.5), lease_s=3):
            await w.until(lambda c: c.num_groups_unscored == 1)
        counts = await w.training()
        assert counts.num_trajectories_generated == 2


async def test_a_lost_lease_ends_the_round_and_is_counted():
    async with world() as w:
        await w.allow(1)
        policy = ScriptedPolicy(delay_s=600)
        async with w.collecting(policy, lease_s=1) as counters:
            await w.until(lambda c: c.num_groups_leased == 1)
            await w.replay.purge(RUN)
            async with asyncio.timeout(PATIENCE_S):
                while not counters.to_json()["num_leases_lost"]:
                    await asyncio.sleep(0.02)
        assert adds_up(await w.training())


class ToolThenAnswer(ScriptedPolicy):
    """Calls a tool in the first turn, and answers in the second."""

    async def generate(self, history, *, turn=0, **question):
        self.answer = lambda _: "Result=1<submit>" if turn else "<request><Calculator>1+2<call>"
        return await super().generate(history, turn=turn, **question)


async def test_last_turn_only_puts_the_last_turns_into_the_queue_and_evaluations_whole():
    """Its parts are those of `dialoop.collect(last_turn_only=True)`."""
    async with world() as w:
        await w.allow(1)
        (task,) = await make_tasks(w, 1, purpose=Purpose.EVALUATION)
        await w.replay.offer_tasks(RUN, [replace(task, num_trajectories=2)])
        async with w.collecting(ToolThenAnswer(), last_turn_only=True):
            evaluated, trained = [
                await w.replay.lease_groups(RUN, stage, worker="x", max_groups=1, wait_s=PATIENCE_S)
                for stage in (Stage.EVALUATION, Stage.UNSCORED)
            ]
    assert [len(t.turns) for t in evaluated.leases[0].group.trajectories] == [2, 2]
    batches = collect(
        arithmetic(), ToolThenAnswer(), group_size=2, total_turns=1, last_turn_only=True
    )
    (batch,) = [batch async for batch in batches]
    for ours, theirs in zip(trained.leases[0].group.trajectories, batch.trajectories, strict=True):
        assert (ours.history, ours.sequences) == (theirs.history, theirs.sequences)
        assert [turn.rewards for turn in ours.turns] == [turn.rewards for turn in theirs.turns]
        assert (len(ours.turns), ours.terminated) == (1, True)
        (row,) = ours.sequences
        assert row.response_mask().tolist() == [False] * 8 + [True] * 2
