"""`loss = "self_distillation"`: the policy behind a prompt with feedback teaches itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop import testing
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.trajectory import Group
from dialoop.v1 import trajectory_pb2 as pb
from dialoop.wire.records import GROUP
from dialoop_learning.rl.advantages import with_advantages
from dialoop_ops.policies.replay_step import StepRepeater
from dialoop_services.config.job import JobConfig
from dialoop_services.trainer.data.batches import sequences_of
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings

from benchmarks.servers.families import make_family
from tests.support.metrics.job import real_job
from tests.support.metrics.plain_steps import PlainModel
from tests.support.metrics.self_teaching import (
    COMMAS,
    FIRST,
    LOWER,
    RIGHT,
    Class,
    batch_of,
    leases_of,
    turn_of,
)
from tests.support.trainer_world import lease, worlds

SETTINGS: dict[str, Any] = {
    "loss": "self_distillation",
    **{"num_steps": 1, "groups_per_train_step": 2, "num_minibatches": 1, "max_bad_groups": 1},
    "evaluation": {"num_tasks": 0},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture
def room(directory: Path) -> Class:
    return Class(directory)


def rows_of(directory: Path, *groups: Group, **settings: Any) -> tuple[Learner, list[Any]]:
    learner = Learner(TrainerSettings(model_dir=directory, **SETTINGS | settings))
    return learner, learner.rows_to_train(sequences_of(groups), current=FIRST)


def prompt_of(directory: Path, *members: Any, **settings: Any) -> list[int]:
    """The first member's prompt for the teacher."""
    _, rows = rows_of(directory, testing.group(*members), **settings)
    ids: list[int] = rows[0].teacher_prompt.tolist()
    return ids


def test_the_teacher_is_the_plain_model_behind_a_prompt_with_the_feedback(
    directory: Path, room: Class
) -> None:
    """Over two turns and at another temperature too; the sampled ids are as they were recorded."""
    groups = room.groups()
    learner, rows = rows_of(directory, *groups)
    model, ready = PlainModel(directory), learner.prepare(learner.plan(rows))
    for row, (own, taught) in zip(ready, room.by_hand(*groups), strict=True):
        assert row.token_ids.tolist() == own.ids
        assert row.behind_teacher_prompt().token_ids.tolist() == taught.ids
        assert row.ref_logprobs.tolist() == pytest.approx(model.logprobs(taught), abs=2e-5)


def test_a_successful_answer_is_shown_unless_it_is_not_wanted_or_too_long(
    directory: Path, room: Class
) -> None:
    wrong = room.member("the sea", turn_of(COMMAS))
    right = room.member("the sea", turn_of("", reward=1.0), said=RIGHT)
    close = room.member("the sea", turn_of("", reward=0.9), said="the sea is salt")
    alone, shown = room.taught("the sea", COMMAS), room.taught("the sea", COMMAS, RIGHT)
    assert prompt_of(directory, wrong, close, right) == shown
    assert prompt_of(directory, wrong, close) == alone
    assert prompt_of(directory, wrong, right, objective={"sibling_answer": False}) == alone
    assert prompt_of(directory, wrong, right, max_row_tokens=len(shown) + 5) == shown
    assert prompt_of(directory, wrong, right, max_row_tokens=len(shown) + 4) == alone
    easier = {"success_reward": 0.9}
    closer = room.taught("the sea", COMMAS, "the sea is salt")
    assert prompt_of(directory, wrong, close, right, candidates=easier) == closer


def test_a_row_that_feedback_makes_too_long_is_refused_or_left_out(
    directory: Path, room: Class
) -> None:
    long = room.member("the sea", turn_of(COMMAS * 4))
    short = room.member("the sea", turn_of(COMMAS))
    most = {"max_row_tokens": len(room.taught("the sea", COMMAS)) + 5}
    with pytest.raises(InvalidInput, match="With feedback") as caught:
        rows_of(directory, testing.group(long, short), **most)
    assert caught.value.reason == "SEQUENCE_TOO_LONG"
    for oversize in ("drop", "truncate"):
        _, rows = rows_of(directory, testing.group(long, short), **most, oversize=oversize)
        assert [row.trajectory_index for row in rows] == [1]
        with pytest.raises(InvalidInput, match="With feedback"):
            rows_of(directory, testing.group(long), **most, oversize=oversize)


def test_a_prompt_that_the_template_does_not_make_is_refused_by_name(
    directory: Path, room: Class
) -> None:
    """As with tools that the template showed; so is one without a question."""
    other = room.member("the sea", turn_of(COMMAS), prompt=room.ids("the tea"))
    system = [replace(message, role="system") for message in other.history]
    for member in (other, replace(other, history=other.history[:0].extend(system))):
        with pytest.raises(InvalidInput, match="Feedback has no place") as caught:
            rows_of(directory, testing.group(member))
        assert caught.value.reason == "PROMPT_NOT_RENDERED"


def test_a_job_that_teaches_itself_sets_aside_what_it_cannot_teach(
    directory: Path, tmp_path: Path, room: Class
) -> None:
    """Groups without feedback are dropped by name, uniform rewards are trained."""
    sea, moon = room.groups()
    unsaid = replace(sea, group_id="unsaid", trajectories=sea.trajectories[1:])
    other = room.member("the sun", turn_of(LOWER), prompt=room.ids("the son"))
    strange = testing.group(other, group_id="strange")
    job = real_job(tmp_path, directory, batch_of(unsaid, strange, moon), batch_of(sea), **SETTINGS)
    before = job.recorder.weights()
    job.run()
    job.world.records.close()
    (row,), (aside,) = job.rows("train"), job.rows("set_aside")
    assert job.queue.dropped == {"lease-unsaid": "no_feedback"}
    assert (aside["group_id"], aside["reason"]) == ("strange", "prompt_not_rendered")
    assert (row["num_with_feedback"], row["num_groups_trained"]) == (3, 2)
    assert row["num_groups_dropped"] == row["num_updates"] == 1
    assert row["num_trained_tokens"] == 5 + 10 + 8
    after = job.recorder.weights()
    assert any(not torch.equal(after[name], before[name]) for name in before)


async def test_a_job_whose_environment_gives_no_feedback_is_refused_by_name(
    tmp_path: Path,
) -> None:
    with worlds(tmp_path) as make:
        here = make(**SETTINGS)
        for number in range(9):
            here.offer(f"a{number}", f"b{number}")
        with pytest.raises(ExceptionGroup) as caught:
            await here.run()
        (error,) = caught.value.exceptions
        while isinstance(error, ExceptionGroup):
            (error,) = error.exceptions
        assert isinstance(error, InvalidConfig)
        assert (error.reason, here.learner.trained) == ("NO_FEEDBACK", [])
        assert "no reward of the first 6 groups" in error.message
        assert set(here.replay.dropped.values()) == {"no_feedback"}


async def test_a_job_that_has_trained_goes_on_without_feedback_for_a_while(
    tmp_path: Path, room: Class
) -> None:
    with worlds(tmp_path) as make:
        here = make(**SETTINGS | {"num_steps": 2})
        here.learner.needs_advantages = False
        here.replay.batches.append(lambda: leases_of(*room.groups()))
        for number in range(9):
            here.replay.batches.append(lambda n=number: [lease(f"a{n}", FIRST)])
        again = [replace(group, group_id=f"{group.group_id}2") for group in room.groups()]
        here.replay.batches.append(lambda: leases_of(*again))
        await here.run()
        rows = [row for row in here.rows if row["kind"] == "train"]
    assert [row["num_groups_dropped"] for row in rows] == [0, 9]


def test_a_kept_step_is_repeated_bit_for_bit_from_what_the_queue_holds(
    directory: Path, tmp_path: Path, room: Class
) -> None:
    held = [
        GROUP.from_proto(pb.Group.FromString(GROUP.to_proto(scored).SerializeToString()))
        for scored in map(with_advantages, room.groups())
    ]
    assert [t.feedback for t in held[1].trajectories] == [f"{COMMAS}\n{LOWER}", LOWER]
    job = real_job(tmp_path, directory, batch_of(*held), **SETTINGS, keep_steps=1)
    job.run()
    job.world.records.close()
    config = JobConfig.model_validate({"run": "x", "train": {"loss": "self_distillation"}})
    mark = {"run_id": "x", "config": config.model_dump(mode="json")}
    (tmp_path / "run.json").write_text(json.dumps(mark), "utf-8")
    (step,) = StepRepeater(tmp_path).replay(1, 1)
    assert (step.is_exact, step.difference) == (True, None)
    assert "prepared" in step.stages
