from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from dialoop.clients.channel import Channel
from dialoop.clients.retry import RetryPolicy
from dialoop.clients.scorer import ScorerClient
from dialoop.errors import InvalidConfig, InvalidInput, PreconditionFailed, Unavailable
from dialoop.trajectory import Purpose, Stage
from dialoop.v1.scorer_service_pb2_grpc import add_ScorerServiceServicer_to_server
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime import ServerSettings
from dialoop_services.runtime.exit_reason import known_error
from dialoop_services.scorer.estimator import Estimator
from dialoop_services.scorer.reference_batches import ReferenceBatches
from dialoop_services.scorer.rewards import GroupReward
from dialoop_services.scorer.scoring import Scoring
from dialoop_services.scorer.servicer import Scorer, ScorerServicer

from tests.support.collector_world import RUN, ScriptedPolicy, World, adds_up, make_tasks, world
from tests.support.samples.scorer_samples import make_group, make_sequence
from tests.support.scorer_world import scoring
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]


async def collect(w: World, count: int) -> None:
    """Unscored groups, as a collector leaves them."""
    await w.allow(count)
    async with w.collecting(ScriptedPolicy()):
        await w.until(lambda c: c.num_groups_unscored == count)


async def test_every_unscored_group_is_scored_whole_and_once():
    async with world() as w:
        await collect(w, 5)
        async with scoring(w, max_groups=2):
            await w.until(lambda c: c.num_groups_scored == 5)
            await asyncio.sleep(0.3)
        leased = await w.replay.lease_groups(RUN, Stage.SCORED, worker="t", max_groups=9)
        assert len({lease.group.group_id for lease in leased.leases}) == 5
        for lease in leased.leases:
            advantages = [s.advantage for t in lease.group.trajectories for s in t.sequences]
            assert None not in advantages
            assert sum(advantages) == pytest.approx(0.0, abs=1e-5)
        stats = await w.replay.get_stats(RUN)
        assert (stats.num_redelivered, stats.num_rejected_appends) == (0, 0)
        assert not (
            await w.replay.lease_groups(RUN, Stage.UNSCORED, worker="x", max_groups=1)
        ).leases
        assert adds_up(stats.training)


async def test_two_scorers_share_the_groups():
    async with world() as w:
        await collect(w, 8)
        async with scoring(w, worker="a", max_groups=1), scoring(w, worker="b", max_groups=1):
            await w.until(lambda c: c.num_groups_scored == 8)
        assert (await w.replay.get_stats(RUN)).num_duplicate_appends == 0


async def test_a_group_delivered_again_is_scored_once():
    async with world() as w:
        await collect(w, 1)
        leased = await w.replay.lease_groups(
            RUN, Stage.UNSCORED, worker="gone", max_groups=1, lease_s=2.0
        )
        (lease,) = leased.leases
        scored = await Scoring().score(lease.group)
        await w.replay.append_group(RUN, Stage.SCORED, scored, lease_id=lease.lease_id)
        async with scoring(w), asyncio.timeout(PATIENCE_S):  # the first never acknowledged
            while await w.replay.peek(RUN, Stage.UNSCORED):
                await asyncio.sleep(0.02)
        counts = await w.training()
        assert counts.num_groups_scored == 1
        assert not (
            await w.replay.lease_groups(RUN, Stage.UNSCORED, worker="x", max_groups=1)
        ).leases
        assert adds_up(counts)


async def test_a_killed_scorers_groups_are_scored_by_another():
    async with world() as w:
        await collect(w, 2)
        await w.replay.lease_groups(RUN, Stage.UNSCORED, worker="gone", max_groups=2, lease_s=0.3)
        async with scoring(w):
            await w.until(lambda c: c.num_groups_scored == 2)


async def test_a_reward_that_fails_drops_its_group_under_that_reason():
    def broken(group):
        raise KeyError("answer")

    scorer = Scorer(Scoring(rewards=(GroupReward(name="x", function=broken),)))
    async with world() as w:
        await collect(w, 2)
        async with scoring(w, scorer):
            await w.until(lambda c: c.num_groups_dropped == {"reward_failed": 2})
        counts = await w.training()
        assert counts.num_trajectories_dropped == {"reward_failed": 4}
        assert adds_up(counts)


async def test_uniform_groups_are_dropped_when_asked_and_free_their_credit(caplog):
    async with world() as w:
        await collect(w, 2)
        async with scoring(w, Scorer(Scoring(drop_uniform=True))):
            await w.until(lambda c: c.num_groups_dropped == {"uniform_reward": 2})
        assert (await w.replay.get_stats(RUN)).credits == 2
    # The course of things: counted, and nothing to be warned of.
    assert not [
        record for record in caplog.records if record.name == "dialoop_services.scorer.worker"
    ]


async def test_evaluation_groups_are_not_scored():
    async with world() as w:
        tasks = await make_tasks(w, 1, purpose=Purpose.EVALUATION, num_trajectories=2)
        await w.replay.offer_tasks(RUN, tasks)
        async with w.collecting(ScriptedPolicy()) as counters, asyncio.timeout(PATIENCE_S):
            while not counters.to_json()["evaluation"]["num_groups_appended"]:
                await asyncio.sleep(0.02)
        async with scoring(w):
            await asyncio.sleep(0.3)
        assert len(await w.replay.peek(RUN, Stage.EVALUATION)) == 1


async def test_a_scorer_told_to_stop_finishes_what_it_scores_and_leases_no_more():
    def slow(group):
        has_begun.set()
        may_end.wait(PATIENCE_S)
        return [0.0, 1.0]

    has_begun, may_end = threading.Event(), threading.Event()
    scorer = Scorer(Scoring(rewards=(GroupReward(name="x", function=slow),)))
    async with world() as w:
        await collect(w, 4)
        async with scoring(w, scorer, max_groups=2):
            await asyncio.to_thread(has_begun.wait, PATIENCE_S)
            asyncio.get_running_loop().call_soon(may_end.set)  # once it was told to stop
        counts = await w.training()
        assert counts.num_groups_scored == 2
        waiting = await w.replay.lease_groups(RUN, Stage.UNSCORED, worker="x", max_groups=4)
        assert len(waiting.leases) == 2


class Gate:
    """Counts who is inside at the same time, and lets all go once `count` are."""

    def __init__(self, count: int) -> None:
        self.count, self.inside, self.most = count, 0, 0
        self.is_open = threading.Event()

    def enter(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        if self.inside == self.count:
            self.is_open.set()


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_groups_wait_for_their_judges_at_the_same_time_and_no_more_than_max_groups(kind):
    """With one group at a time the judge of the first would wait for ever."""
    gate = Gate(3)

    def judge(group):
        gate.enter()
        assert gate.is_open.wait(PATIENCE_S)
        gate.inside -= 1
        return [0.0, 1.0]

    async def async_judge(group):
        gate.enter()
        while not gate.is_open.is_set():
            await asyncio.sleep(0.01)
        gate.inside -= 1
        return [0.0, 1.0]

    function = judge if kind == "sync" else async_judge
    scorer = Scorer(Scoring(rewards=(GroupReward(name="x", function=function),)))
    async with world() as w:
        await collect(w, 6)
        async with scoring(w, scorer, max_groups=3):
            await w.until(lambda c: c.num_groups_scored == 6)
        assert adds_up(await w.training())
    assert gate.most == 3


async def test_a_group_whose_judge_is_slow_holds_up_no_other():
    first = threading.Event()
    may_end = threading.Event()

    def judge(group):
        if not first.is_set():
            first.set()
            may_end.wait(PATIENCE_S)
        return [0.0, 1.0]

    scorer = Scorer(Scoring(rewards=(GroupReward(name="x", function=judge),)))
    async with world() as w:
        await collect(w, 4)
        async with scoring(w, scorer, max_groups=2):
            await w.until(lambda c: c.num_groups_scored == 3)
            may_end.set()
            await w.until(lambda c: c.num_groups_scored == 4)


class Flat:
    """A reference that finds everything equally likely."""

    def logprobs_of_sampled(self, sequences, temperatures):
        return [np.full(s.num_model_tokens, -2.0, dtype=np.float32) for s in sequences]

    def logprobs_of_all(self, token_ids, temperatures):
        return [np.full(len(ids) - 1, -2.0, dtype=np.float32) for ids in token_ids]


class Counted(Flat):
    """Counts the sequences of each call; the first call waits until the others have arrived."""

    def __init__(self) -> None:
        self.calls = []
        self.may_end = threading.Event()

    def logprobs_of_sampled(self, sequences, temperatures):
        self.calls.append(len(sequences))
        assert self.may_end.wait(PATIENCE_S)
        if any(-7 in sequence.token_ids for sequence in sequences):
            raise InvalidInput("Token id -7 is in no vocabulary.", reason="TOKEN_OUT_OF_RANGE")
        return super().logprobs_of_sampled(sequences, temperatures)


async def test_groups_that_wait_for_the_reference_are_its_next_batch():
    reference = Counted()
    batches = ReferenceBatches(lambda: reference)
    scoring = Scoring(reference=batches)
    groups = [make_group(0.0, 1.0, task_id=f"t{n}") for n in range(4)]
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        scored = [tasks.create_task(scoring.score(groups[0]))]
        while not reference.calls:
            await asyncio.sleep(0.01)
        scored += [tasks.create_task(scoring.score(group)) for group in groups[1:]]
        while len(batches.waiting) < 3:
            await asyncio.sleep(0.01)
        reference.may_end.set()
    assert reference.calls == [2, 6]
    for task in scored:
        assert task.result().trajectories[1].sequences[0].ref_logprobs.tolist() == [-2.0, -2.0]


async def test_a_group_that_the_reference_refuses_spoils_no_other_of_its_batch():
    reference = Counted()
    reference.may_end.set()
    scoring = Scoring(reference=ReferenceBatches(lambda: reference))
    strange = make_group(0.0, 1.0, sequences=(make_sequence(sampled=(3, -7)),))
    outcomes = await asyncio.gather(
        *(scoring.score(group) for group in (make_group(0.0, 1.0), strange, make_group(1.0, 0.0))),
        return_exceptions=True,
    )
    assert isinstance(outcomes[1], InvalidInput)
    assert [len(o.trajectories) for o in (outcomes[0], outcomes[2])] == [2, 2]
    assert reference.calls == [6, 2, 2, 2]


async def test_leases_are_extended_while_scoring_takes_long():
    def slow(group):
        time.sleep(1.8)
        return [0.0, 1.0]

    scorer = Scorer(Scoring(rewards=(GroupReward(name="x", function=slow),)))
    async with world() as w:
        await collect(w, 2)
        async with scoring(w, scorer, lease_s=3):
            await w.until(lambda c: c.num_groups_scored == 2)
        assert (await w.replay.get_stats(RUN)).num_redelivered == 0


async def test_a_replay_that_is_away_is_waited_for():
    async with world() as w:
        await collect(w, 1)
        lease, outages = w.replay.lease_groups, iter(range(3))

        async def flaky(*arguments, **named):
            if next(outages, None) is not None:
                raise Unavailable("gone")
            return await lease(*arguments, **named)

        w.replay.lease_groups = flaky
        async with scoring(w):
            await w.until(lambda c: c.num_groups_scored == 1)


@asynccontextmanager
async def serve(scorer: Scorer):
    server = GrpcServer(ServerSettings(drain_s=0))
    server.add(
        add_ScorerServiceServicer_to_server, ScorerServicer(scorer), "dialoop.v1.ScorerService"
    )
    async with server, Channel(server.address, retry=RetryPolicy(max_attempts=1)) as channel:
        yield ScorerClient(channel)


async def test_score_answers_with_the_scored_group():
    reference = ReferenceBatches(Flat)
    async with serve(Scorer(Scoring(reference=reference), {"reference": reference})) as scorer:
        scored = await scorer.score(make_group(0.0, 1.0))
    assert [t.sequences[0].advantage for t in scored.trajectories] == pytest.approx(
        [-0.7071, 0.7071], abs=1e-4
    )
    assert scored.trajectories[0].sequences[0].ref_logprobs.tolist() == [-2.0, -2.0]


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (make_group(1.0), "GROUP_TOO_SMALL"),
        (make_group(0.0, 1.0, size=3), "GROUP_INCOMPLETE"),
        (make_group(0.0, 1.0, sequences=()), "UNSCORABLE_TRAJECTORY"),
    ],
)
async def test_score_refuses_what_it_cannot_score(group, reason):
    async with serve(Scorer(Scoring())) as scorer:
        with pytest.raises(InvalidInput) as caught:
            await scorer.score(group)
    assert caught.value.reason == reason


async def test_logprobs_begin_at_the_second_token():
    async with serve(Scorer(Scoring(), {"reference": ReferenceBatches(Flat)})) as scorer:
        rows = await scorer.logprobs([[1, 2, 3], [4]])
    assert [row.tolist() for row in rows] == [[-2.0, -2.0], []]


async def test_logprobs_without_a_reference_model_are_refused():
    async with serve(Scorer(Scoring())) as scorer:
        with pytest.raises(PreconditionFailed) as caught:
            await scorer.logprobs([[1, 2]])
    assert caught.value.reason == "NO_REFERENCE_MODEL"


async def test_the_process_scores_and_ends_with_exit_code_0():
    async with world() as w:
        await collect(w, 2)
        settings = {
            "DIALOOP_SCORER_RUN": RUN,
            "DIALOOP_SCORER_REPLAY_ADDRESS": w.replay_address,
            "DIALOOP_SCORER_REWARDS": json.dumps(
                [{"name": "brief", "use": "tests.unit.scorer.test_scoring:brevity"}]
            ),
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "client", ROOT / "services"))),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dialoop_services.scorer", cwd=ROOT, env=os.environ | settings
        )
        try:
            await w.until(lambda c: c.num_groups_scored == 2)
            process.terminate()
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        (group,) = await w.replay.peek(RUN, Stage.SCORED, max_groups=1)
        names = [r.name for r in group.trajectories[0].turns[-1].rewards]
        assert names[-1] == "brief"


def _mistaken(rewards: list[float]) -> list[float]:
    return [reward / 0 for reward in rewards]


async def test_an_estimator_that_fails_twice_in_the_same_way_ends_the_service() -> None:
    scorer = Scorer(Scoring(estimator=Estimator(path="mine:mistaken", function=_mistaken)))
    async with world() as w:
        await collect(w, 3)
        with pytest.raises(BaseExceptionGroup) as caught:
            async with scoring(w, scorer, max_groups=1):
                await w.until(lambda c: c.num_groups_dropped.get("estimator_failed") == 2)
        error = known_error(caught.value)
        assert isinstance(error, InvalidConfig)
        assert "ZeroDivisionError at test_scorer.py, line" in str(error)
        assert "It did so 2 times in a row" in str(error)
        stats = await w.replay.get_stats(RUN)
        assert stats.training.num_groups_unscored == 1
