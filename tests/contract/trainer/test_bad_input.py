"""Groups that cannot be trained: each is named and kept, and the others are trained as if alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialoop.clients.replay import GroupLease, ReplayStats
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.sequences import Sequence, Source, sequence_of
from dialoop.trajectory import Group, SamplingParams, Stage
from dialoop_learning.model.tiny import make_tiny_model, tiny_config
from dialoop_services.hosting.hosts import OwnProcess
from dialoop_services.replay import servicer
from dialoop_services.replay.store import QueueLimits
from dialoop_services.trainer.__main__ import serve_in
from dialoop_services.trainer.data.batches import read_rows, sort_batch
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings
from transformers import Qwen2ForCausalLM

from tests.support.queue_model.store import ModelStore
from tests.support.recorded_world import FIRST, Recorded, record_groups, recorded_world

Spoil = Callable[[Sequence], Sequence]


def with_reference(row: Sequence) -> Sequence:
    return replace(row, ref_logprobs=row.inference_logprobs.copy())


def without_reference(row: Sequence) -> Sequence:
    return replace(row, ref_logprobs=np.zeros(0, dtype=np.float32))


def too_long(row: Sequence) -> Sequence:
    return sample_sequence([5] * 90, [6, 7])


def without_prompt(row: Sequence) -> Sequence:
    return sample_sequence([], [6, 7])


def of_another_vocabulary(row: Sequence) -> Sequence:
    return sample_sequence([5, 6], [100_000, 7])


def sample_sequence(prompt: list[int], answer: list[int]) -> Sequence:
    pieces: list[tuple[list[int], dict[str, Any]]] = [
        (prompt, {"source": Source.PROMPT}),
        (answer, {"source": Source.MODEL, "policy_version": FIRST}),
    ]
    row = sequence_of(pieces, logprobs=[-1.0] * len(answer))
    return replace(with_reference(row), advantage=1.0)


BAD: dict[str, tuple[Spoil, str]] = {
    "loss_input_missing": (without_reference, "This loss needs ref_logprobs."),
    "sequence_too_long": (too_long, "has 92 tokens, more than the 64 of a row."),
    "empty_prompt": (without_prompt, "to train its first, which nothing predicts"),
    "token_out_of_range": (of_another_vocabulary, "100000 is outside the model's vocabulary"),
}
SETTINGS: dict[str, Any] = {"max_row_tokens": 64, "objective": {"kl_coeff": 0.1}}


def change_sequences(group: Group, spoil: Spoil, *, member: int | None = None) -> Group:
    """The group with other sequences, of one member or all."""
    trajectories = tuple(
        replace(trajectory, sequences=tuple(map(spoil, trajectory.sequences)))
        if member in (None, index)
        else trajectory
        for index, trajectory in enumerate(group.trajectories)
    )
    return replace(group, trajectories=trajectories)


def good(groups: list[Group]) -> list[Group]:
    """With a reference, and none of them uniform."""
    signal = [group for group in groups if group.trajectories[0].sequences[0].advantage]
    return [change_sequences(group, with_reference) for group in signal]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("bad_input") / "model", seed=0)


@pytest.fixture(scope="module")
def groups(model_dir: Path) -> list[Group]:
    return good(record_groups(model_dir, 14))


def settings_of(world: Recorded, **settings: Any) -> TrainerSettings:
    """Of a trainer on a world's groups."""
    return TrainerSettings(
        port=0,
        run=world.run,
        run_dir=world.run_dir,
        model_dir=world.model_dir,
        replay_address=world.replay_address,
        inference_addresses=[world.inference_address],
        evaluation={"num_tasks": 0},
        max_staleness=100,
        **{"pipeline_depth": 1, "groups_per_train_step": 2} | SETTINGS | settings,
    )


@asynccontextmanager
async def training(world: Recorded, **settings: Any) -> AsyncIterator[None]:
    """A trainer in this process."""
    settings_of_run = settings_of(world, **settings)
    host = OwnProcess(settings_of_run)
    running = asyncio.create_task(serve_in(host, settings_of_run))
    try:
        yield
    finally:
        host.server.stop()
        await running


async def until_done(world: Recorded) -> None:
    async with asyncio.timeout(60):
        while not (world.run_dir / "trainer.json").is_file():
            await asyncio.sleep(0.02)


async def test_bad_groups_are_set_aside_with_their_data_and_the_others_are_trained(
    tmp_path: Path, model_dir: Path, groups: list[Group]
) -> None:
    spoilt = dict(zip((1, 2, 5, 8), BAD, strict=True))
    changed = [
        change_sequences(group, BAD[spoilt[number]][0], member=1) if number in spoilt else group
        for number, group in enumerate(groups[:12])
    ]
    store = ModelStore(QueueLimits())
    async with recorded_world(tmp_path, model_dir, store, changed) as world:
        async with training(world, num_steps=4):
            await until_done(world)
        stats = await world.replay.get_stats(world.run)
        letters = await world.replay.list_dead_letters(world.run)
    assert {letter.group_id: letter.reason for letter in letters} == {
        changed[number].group_id: reason for number, reason in spoilt.items()
    }
    kept = {letter.group_id: letter.group for letter in letters}
    for number in spoilt:
        whole = kept[changed[number].group_id]
        assert [t.sequences[0].token_ids.tolist() for t in whole.trajectories] == [
            t.sequences[0].token_ids.tolist() for t in changed[number].trajectories
        ]
    rows = [row for row in world.metrics if row["kind"] == "set_aside"]
    for row in rows:
        words = BAD[row["reason"]][1]
        assert row["trajectory_id"] == f"{row['group_id']}.1"
        assert words in row["message"]
    assert len(rows) == len(BAD)
    assert [row["num_groups_trained"] for row in world.train_rows] == [2, 2, 2, 2]
    assert stats.training.num_groups_consumed == 8
    assert stats.training.num_groups_dropped == {"dead_letter": 4}
    trained = (world.run_dir / "trajectories.jsonl").read_text("utf-8").splitlines()
    order = [json.loads(line)["group_id"] for line in trained]
    expected = [group.group_id for number, group in enumerate(changed) if number not in spoilt]
    assert order[::2] == expected


def with_number(name: str, number: float) -> Spoil:
    """Spoil the first number of a column, or the advantage."""

    def spoil(row: Sequence) -> Sequence:
        if name == "advantage":
            return replace(row, advantage=number)
        values = getattr(row, name).copy()
        values[0] = number
        return replace(row, **{name: values})

    return spoil


POISON: list[tuple[str, float, str]] = [
    ("inference_logprobs", float("nan"), "non_finite"),
    ("inference_logprobs", -1e30, "out_of_range"),
    ("inference_logprobs", 5.0, "out_of_range"),
    ("ref_logprobs", 9.0, "out_of_range"),
    ("advantage", float("inf"), "non_finite"),
    ("advantage", 1e38, "out_of_range"),
]


async def test_numbers_of_a_queue_without_checks_are_set_aside_and_again_after_a_requeue(
    tmp_path: Path, model_dir: Path, groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue's file may be older than the check at append, and a requeue passes no check."""
    monkeypatch.setattr(servicer, "check_group", lambda *_, **__: None)
    spoilt = [
        change_sequences(group, with_number(name, number), member=1)
        for group, (name, number, _) in zip(groups, POISON, strict=False)
    ]
    reasons = {group.group_id: poison[2] for group, poison in zip(spoilt, POISON, strict=True)}
    whole = groups[len(spoilt) : len(spoilt) + 4]
    queue = [*spoilt[:3], *whole[:2], *spoilt[3:], *whole[2:]]
    async with recorded_world(tmp_path, model_dir, ModelStore(QueueLimits()), queue) as world:
        async with training(world, num_steps=2):
            await until_done(world)
        letters = await world.replay.list_dead_letters(world.run)
        assert {letter.group_id: letter.reason for letter in letters} == reasons
        assert await world.replay.requeue(world.run, list(reasons)) == len(reasons)
        async with training(world, num_steps=3):
            async with asyncio.timeout(60):
                while len(letters := await world.replay.list_dead_letters(world.run)) < len(POISON):
                    await asyncio.sleep(0.05)
        stats = await world.replay.get_stats(world.run)
    assert {letter.group_id: letter.reason for letter in letters} == reasons
    assert stats.training.num_groups_consumed == len(whole)
    assert [row["num_groups_trained"] for row in world.train_rows] == [2, 2]
    assert [row["num_refused"] for row in world.train_rows] == [0, 0]


async def test_a_scorer_that_never_gives_what_the_loss_needs_fails_the_job_by_name(
    tmp_path: Path, model_dir: Path, groups: list[Group]
) -> None:
    changed = [change_sequences(group, without_reference) for group in groups[:8]]
    async with recorded_world(tmp_path, model_dir, ModelStore(QueueLimits()), changed) as world:
        settings = settings_of(world, num_steps=1, max_bad_groups=1)
        async with asyncio.timeout(60):
            with pytest.raises(ExceptionGroup) as caught:
                await serve_in(OwnProcess(settings), settings)
        letters = await world.replay.list_dead_letters(world.run)
    assert caught.group_contains(InvalidInput, match="This loss needs ref_logprobs.")
    assert len(letters) == 6  # three batches of two; the rest may yet be of use
    assert not world.train_rows


async def test_bad_groups_in_a_row_do_not_fail_a_job_of_one_group_a_step(
    tmp_path: Path, model_dir: Path, groups: list[Group]
) -> None:
    """Four that have nothing to do with one another are no reason to stop."""
    bad = [
        change_sequences(group, spoil)
        for group, (spoil, _) in zip(groups[:4], BAD.values(), strict=True)
    ]
    changed = [*bad, *groups[4:6]]
    async with recorded_world(tmp_path, model_dir, ModelStore(QueueLimits()), changed) as world:
        async with training(world, num_steps=2, groups_per_train_step=1):
            await until_done(world)
        letters = await world.replay.list_dead_letters(world.run)
    assert [letter.reason for letter in letters] == list(BAD)
    assert [row["num_groups_trained"] for row in world.train_rows] == [1, 1]


async def test_what_the_loss_does_not_need_may_be_missing_from_some(
    tmp_path: Path, model_dir: Path, groups: list[Group]
) -> None:
    """A loss that needs no reference takes groups with one and groups without."""
    changed = [change_sequences(groups[0], without_reference), groups[1]]
    async with recorded_world(tmp_path, model_dir, ModelStore(QueueLimits()), changed) as world:
        async with training(world, num_steps=1, objective={}):
            await until_done(world)
        letters = await world.replay.list_dead_letters(world.run)
    assert len(world.train_rows) == 1
    assert not letters


async def test_a_sequence_too_long_is_dropped_alone_and_counted_where_that_is_asked_for(
    tmp_path: Path, model_dir: Path, groups: list[Group]
) -> None:
    changed = [change_sequences(groups[0], too_long, member=1), groups[1]]
    async with recorded_world(tmp_path, model_dir, ModelStore(QueueLimits()), changed) as world:
        async with training(world, num_steps=1, oversize="drop"):
            await until_done(world)
        letters = await world.replay.list_dead_letters(world.run)
    (row,) = world.train_rows
    assert (row["num_groups_trained"], row["num_oversize"]) == (2, 1)
    assert not letters


def other_model(directory: Path) -> Path:
    """The tiny model with half of its layers."""
    make_tiny_model(directory)
    config = tiny_config()
    config.num_hidden_layers = 2
    config.layer_types = config.layer_types[:2]
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


def _without_ages(stats: ReplayStats) -> ReplayStats:
    """The ages grow from one look to the next."""
    training, evaluation = (
        replace(stats.training, oldest_s={}),
        replace(stats.evaluation, oldest_s={}),
    )
    return replace(stats, training=training, evaluation=evaluation)


async def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_touched(
    tmp_path: Path, model_dir: Path, groups: list[Group]
) -> None:
    async with recorded_world(
        tmp_path / "w", model_dir, ModelStore(QueueLimits()), groups[:4]
    ) as world:
        async with training(world, num_steps=1):
            await until_done(world)
        root = world.run_dir / "checkpoints"
        before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        counts = _without_ages(await world.replay.get_stats(world.run))
        other = replace(world, model_dir=other_model(tmp_path / "other"))
        limited = settings_of(other, num_steps=2)
        with pytest.raises(InvalidConfig) as caught:
            await serve_in(OwnProcess(limited), limited)
        assert caught.value.reason == "WEIGHTS_MISMATCH"
        assert str(tmp_path / "other") in str(caught.value)
        assert caught.value.remedy
        assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
        assert _without_ages(await world.replay.get_stats(world.run)) == counts
        async with training(world, num_steps=2):
            async with asyncio.timeout(60):
                while len(world.train_rows) < 2:
                    await asyncio.sleep(0.02)
    assert [row["train_step"] for row in world.train_rows] == [1, 2]


async def play(world: Recorded, groups: list[Group]) -> None:
    """A collector and a scorer in one, who play a group only when there is a credit for it."""
    by_task = {group.task.task_id: group for group in groups}
    run, replay = world.run, world.replay
    await replay.offer_tasks(run, [group.task for group in groups])
    while by_task:
        for held in (await replay.lease_tasks(run, worker="c", max_tasks=1, wait_s=0.1)).leases:
            group = by_task.pop(held.task.task_id)
            await replay.append_group(run, Stage.UNSCORED, group, lease_id=held.lease_id)
            (unscored,) = (
                await replay.lease_groups(run, Stage.UNSCORED, worker="s", max_groups=1)
            ).leases
            await replay.append_group(run, Stage.SCORED, group, lease_id=unscored.lease_id)
            await replay.acknowledge(run, [unscored.lease_id])


async def test_uniform_and_bad_groups_give_their_credits_back_so_that_nothing_stalls(
    tmp_path: Path, model_dir: Path, groups: list[Group]
) -> None:
    """With exactly one batch of credits, whoever kept one would wait for ever."""

    def flat(row: Sequence) -> Sequence:
        return replace(row, advantage=0.0)

    changed = list(groups)
    # Two batches, and half of one; the others replace them.
    changed[:5] = [change_sequences(group, flat) for group in changed[:5]]
    changed[7] = change_sequences(changed[7], too_long)
    async with recorded_world(tmp_path, model_dir, ModelStore(QueueLimits()), []) as world:
        async with training(world, num_steps=2, pipeline_depth=0):
            async with asyncio.timeout(60):
                await play(world, changed[:10])
            await until_done(world)
        stats = await world.replay.get_stats(world.run)
    rows = world.train_rows
    assert [row["num_groups_trained"] for row in rows] == [2, 2]
    assert [row["num_groups_dropped"] for row in rows] == [5, 0]
    assert [row["policy_version"] for row in rows] == [2, 3]
    assert stats.training.num_groups_dropped == {"uniform_reward": 5, "dead_letter": 1}
    assert (stats.training.num_groups_consumed, stats.credits) == (4, 2)


@pytest.mark.parametrize("reason", BAD)
def test_a_fault_names_the_trajectory_and_changes_nothing(
    model_dir: Path, groups: list[Group], reason: str
) -> None:
    learner = Learner(TrainerSettings(model_dir=model_dir, **SETTINGS))
    before = {name: values.clone() for name, values in learner.state.policy.state_dict().items()}
    spoil, words = BAD[reason]
    bad = change_sequences(groups[1], spoil, member=1)
    leases = [
        GroupLease(lease_id=group.group_id, group=group, num_deliveries=1, expires_in_s=60)
        for group in (groups[0], bad, groups[2])
    ]
    batch = sort_batch(leases, current=FIRST, max_staleness=0, consumed_group_ids=())
    rows, (fault,) = read_rows(batch, partial(learner.rows_to_train, current=FIRST))
    assert not rows
    assert (fault.lease.group, fault.reason) == (bad, reason)
    assert fault.trajectory_id == bad.trajectories[1].trajectory_id
    assert words in str(fault.error)
    assert fault.error.remedy
    after = learner.state.policy.state_dict()
    assert all(bool((after[name] == values).all()) for name, values in before.items())


def test_a_group_with_a_greedy_member_is_set_aside_and_one_at_mixed_temperatures_is_not(
    model_dir: Path, groups: list[Group]
) -> None:
    def at(group: Group, *temperatures: float) -> GroupLease:
        pairs = zip(group.trajectories, temperatures, strict=True)
        sampled_so = tuple(replace(t, sampling=SamplingParams(temperature=x)) for t, x in pairs)
        group = replace(group, trajectories=sampled_so)
        return GroupLease(lease_id=group.group_id, group=group, num_deliveries=1, expires_in_s=60)

    learner = Learner(TrainerSettings(model_dir=model_dir, **SETTINGS))
    leases = [at(groups[0], 0.5, 1.0), at(groups[1], 1.0, 0.0)]
    batch = sort_batch(leases, current=FIRST, max_staleness=0, consumed_group_ids=())
    rows, (fault,) = read_rows(batch, partial(learner.rows_to_train, current=FIRST))
    assert not rows
    assert (fault.lease, fault.reason) == (leases[1], "greedy_sampling")
    assert fault.trajectory_id == groups[1].trajectories[1].trajectory_id


def test_a_group_without_a_sampled_token_is_dropped_by_name(groups: list[Group]) -> None:
    def silent(_: Sequence) -> Sequence:
        return sequence_of([([5, 6], {"source": Source.PROMPT})])

    group = change_sequences(groups[0], silent)
    lease = GroupLease(lease_id="x", group=group, num_deliveries=1, expires_in_s=60)
    batch = sort_batch([lease], current=FIRST, max_staleness=0, consumed_group_ids=())
    assert list(batch.dropped) == ["no_trainable_token"]
