"""`dialoop replay-step` repeats kept train steps bit for bit, and names the first difference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from dialoop import testing
from dialoop.errors import InvalidConfig, InvalidInput, NotFound, PreconditionFailed
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.trajectory import Group, Reward, Turn
from dialoop.v1 import trajectory_pb2 as pb
from dialoop.wire.records import GROUP
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.rl.advantages import with_advantages
from dialoop_ops.cli.main import main
from dialoop_ops.policies.replay_step import StepRepeater, StepReplay, steps_of
from dialoop_services.config.job import JobConfig
from dialoop_services.trainer.data.batches import Batch
from dialoop_services.trainer.job.state import JobState
from dialoop_services.trainer.job.status import StatusBoard
from dialoop_services.trainer.job.train_steps import TrainSteps
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.learner.ranks import RankSettings, join_trainer_ranks
from dialoop_services.trainer.records.records import RunRecords
from dialoop_services.trainer.recovery.checkpoint import Checkpoints
from dialoop_services.trainer.settings import TrainerSettings
from dialoop_services.trainer.step_replay.keeping import kept_steps
from safetensors.torch import load_file, save_file

VERSION = PolicyVersion(lineage="main", number=3)
NUM_STEPS = 4


def groups_of(step: int) -> tuple[Group, ...]:
    """Two scored groups of three, each answer with two sampled runs around a tool's token."""
    generator = np.random.default_rng(step)
    groups = []
    for number in range(2):
        members = []
        for member in range(3):
            prompt, tool, *sampled = (
                generator.integers(10, 250, size=n).tolist() for n in (4, 2, 3, 3 + member)
            )
            policy = {"source": Source.MODEL, "policy_version": VERSION}
            pieces: list[tuple[list[int], dict[str, Any]]] = [
                (prompt, {"source": Source.PROMPT}),
                (sampled[0], policy),
                (tool, {"source": Source.TOOL}),
                (sampled[1], policy),
            ]
            row = sequence_of(pieces, logprobs=generator.uniform(-6, -5, size=6 + member))
            reward = Reward(name="r", value=float(np.float32(0.1 * member + 0.3 * step)))
            turn = Turn(message_start=1, num_messages=1, rewards=(reward,))
            members.append(
                testing.trajectory(
                    trajectory_id=f"s{step}g{number}t{member}", sequences=(row,), turns=(turn,)
                )
            )
        group = testing.group(*members, group_id=f"s{step}#{number}")
        scored = with_advantages(group)
        # As the queue hands it over: the wire rounds to float32.
        data = GROUP.to_proto(scored).SerializeToString()
        groups.append(GROUP.from_proto(pb.Group.FromString(data)))
    return tuple(groups)


async def train(run_dir: Path, **settings: Any) -> None:
    """Take the train steps through the job's own code, with a checkpoint before 1 and 3."""
    values: dict[str, Any] = {
        "run_dir": run_dir,
        "model_dir": run_dir / "model",
        "loss": "grpo",
        "num_minibatches": 2,
        "learning_rate": 1e-3,
        "num_threads": 1,
        "keep_steps": NUM_STEPS,
        "objective": {"proximal": True},
    }
    here = TrainerSettings(**(values | settings))
    learner, state, records = Learner(here), JobState(policy_version=VERSION), RunRecords(run_dir)
    checkpoints = Checkpoints(run_dir, keep_steps=here.keep_steps)
    parts = SimpleNamespace(
        learner=learner, replay=None, publisher=None, records=records, board=StatusBoard()
    )
    checkpointer = SimpleNamespace(held=None, state=state)
    steps = TrainSteps(here, cast(Any, parts), cast(Any, checkpointer), cast(Any, None))
    for number in range(1, NUM_STEPS + 1):
        if number % 2:
            checkpoints.save(learner, state)
        leases = tuple(SimpleNamespace(group=group, lease_id="") for group in groups_of(number))
        batch = Batch(train=cast(Any, leases), already_consumed=(), dropped={})
        await steps.learn(batch)
        trajectories = [t for group in batch.groups for t in group.trajectories]
        records.trajectories(trajectories, outcome="trained", label="training", train_step=number)
    records.close()
    job = JobConfig(run="x", train={"loss": "grpo"})  # type: ignore[arg-type]
    mark = {"run_id": "x", "config": job.model_dump(mode="json")}
    (run_dir / "run.json").write_text(json.dumps(mark), "utf-8")


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import asyncio

    run_dir = tmp_path_factory.mktemp("trained_run")
    make_tiny_model(run_dir / "model", seed=0)
    asyncio.run(train(run_dir))
    return run_dir


@pytest.fixture
def run_dir(trained_run: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "run"
    shutil.copytree(trained_run, copy)
    return copy


def replay(run_dir: Path, first: int, last: int | None = None) -> list[StepReplay]:
    return list(StepRepeater(run_dir).replay(first, last or first))


def change_group(run_dir: Path, step: int, change: Callable[[pb.Group], None]) -> None:
    """Change the first kept group of a step."""
    path = run_dir / "kept_steps" / f"{step:06d}" / "groups" / "0000.binpb"
    group = pb.Group.FromString(path.read_bytes())
    change(group)
    path.write_bytes(group.SerializeToString())


def change_record(run_dir: Path, trajectory_id: str, change: Callable[[Any], None]) -> None:
    """Change the line of a trajectory in trajectories.jsonl."""
    path = run_dir / "trajectories.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    change(next(row for row in rows if row["trajectory_id"] == trajectory_id))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def test_every_kept_step_is_repeated_bit_for_bit(run_dir: Path) -> None:
    results = replay(run_dir, 1, NUM_STEPS)
    assert [(r.train_step, r.difference, r.is_exact) for r in results] == [
        (number, None, True) for number in range(1, NUM_STEPS + 1)
    ]
    assert results[0].notes == ()
    assert results[0].stages == (
        "trajectories.jsonl",
        *("rewards", "advantages", "rows", "prepared"),
        *(f"update {k} {name}" for k in (0, 1) for name in STAGES),
    )


STAGES = ("packing", "forward", "loss", "gradient")


def test_a_step_between_checkpoints_is_reached_by_repeating_those_before(run_dir: Path) -> None:
    assert replay(run_dir, NUM_STEPS)[0].difference is None


def test_a_flipped_mask_bit_of_the_record_is_named(run_dir: Path) -> None:
    def flip(row: Any) -> None:
        segments = row["sequences"][0]["segments"]
        segments[1]["length"] -= 1  # the last sampled token of the first run is the tool's now
        segments[2]["start"] -= 1
        segments[2]["length"] += 1

    change_record(run_dir, "s3g1t2", flip)
    (result,) = replay(run_dir, 3)
    assert result.difference is not None
    assert str(result.difference) == (
        "stage trajectories.jsonl, mask at trajectory s3g1t2, sequence 0, token 6: "
        "kept 'MODEL', repeated 'TOOL'"
    )
    assert replay(run_dir, 2)[0].difference is None


def test_a_flipped_mask_bit_of_the_kept_columns_is_named(run_dir: Path) -> None:
    path = run_dir / "kept_steps" / "000002" / "columns.safetensors"
    columns = load_file(path)
    mask = columns["rows/response_mask"]
    first = int((~mask).nonzero()[0])
    assert first == 0
    mask[5] = ~mask[5]
    save_file(columns, path)
    (result,) = replay(run_dir, 2)
    assert result.difference is not None
    assert (result.difference.stage, result.difference.column) == ("rows", "response_mask")
    place = result.difference.place
    assert (place.trajectory_id, place.sequence, place.token) == ("s2g0t0", 0, 5)
    assert result.notes == ("columns.safetensors has other bytes than were written",)


def test_a_flipped_reward_is_named(run_dir: Path) -> None:
    def flip(group: pb.Group) -> None:
        group.trajectories[1].turns[0].rewards[0].value += 0.25

    change_group(run_dir, 2, flip)
    change_record(run_dir, "s2g0t1", _add_to_reward)
    (result,) = replay(run_dir, 2)
    assert result.difference is not None
    assert (result.difference.stage, result.difference.place.trajectory_id) == (
        "rewards",
        "s2g0t1",
    )


def _add_to_reward(row: Any) -> None:
    value = float(np.float32(np.float32(row["reward"]) + np.float32(0.25)))
    row["reward"] = row["turns"][0]["rewards"]["r"] = value


def test_an_advantage_that_the_rule_does_not_give_is_named(run_dir: Path) -> None:
    path = run_dir / "run.json"
    mark = json.loads(path.read_text("utf-8"))
    mark["config"]["scorer"]["leave_one_out"] = True  # the run was scored by another rule
    path.write_text(json.dumps(mark), "utf-8")
    (result,) = replay(run_dir, 2)
    assert result.difference is not None
    place = result.difference.place
    assert (result.difference.stage, place.trajectory_id, place.token) == (
        "advantages",
        "s2g0t0",
        4,
    )


def test_a_loss_that_is_one_bit_off_at_one_token_is_named(run_dir: Path) -> None:
    folder = run_dir / "kept_steps" / "000003"
    columns = load_file(folder / "columns.safetensors")
    slope = columns["update 1 loss/slope"]
    slope[4] = torch.nextafter(slope[4], torch.tensor(torch.inf))
    save_file(columns, folder / "columns.safetensors")
    (result,) = replay(run_dir, 3)
    assert result.difference is not None
    assert (result.difference.stage, result.difference.column) == ("update 1 loss", "slope")
    assert result.difference.place.trajectory_id.startswith("s3g")


def test_another_learning_rate_shows_in_the_first_gradient(run_dir: Path) -> None:
    path = run_dir / "kept_steps" / "000001" / "step.json"
    facts = json.loads(path.read_text("utf-8"))
    facts["settings"]["learning_rate"] = 5e-4
    path.write_text(json.dumps(facts), "utf-8")
    (result,) = replay(run_dir, 1)
    assert result.difference is not None
    assert str(result.difference.place) == "learning rate"
    assert result.difference.stage == "update 0 gradient"


def test_another_machine_gets_a_tolerance_and_is_told(run_dir: Path) -> None:
    path = run_dir / "kept_steps" / "000001" / "step.json"
    facts = json.loads(path.read_text("utf-8"))
    facts["machine"]["processor"] = "another"
    path.write_text(json.dumps(facts), "utf-8")
    (result,) = replay(run_dir, 1)
    assert result.difference is None
    assert not result.is_exact
    assert "it was another: equal bits are not promised" in result.notes[0]


def test_without_a_checkpoint_the_stages_before_are_compared(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(PreconditionFailed, match="for want of a checkpoint before it"):
        replay(run_dir, 2)
    assert main(["replay-step", str(run_dir), "2"]) == 1
    assert "Repeat a step after the oldest checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["step.json", "columns.safetensors", "groups/0001.binpb"])
def test_a_torn_file_is_an_error_that_names_the_step(run_dir: Path, name: str) -> None:
    path = run_dir / "kept_steps" / "000002" / name
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(PreconditionFailed, match="000002 cannot be read"):
        replay(run_dir, 2)


def test_a_torn_line_of_the_record_is_named(run_dir: Path) -> None:
    path = run_dir / "trajectories.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    (result,) = replay(run_dir, NUM_STEPS)
    assert result.difference is not None
    assert result.difference.place.trajectory_id == f"s{NUM_STEPS}g1t2"


def test_a_step_that_is_not_kept_and_bad_words(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotFound, match="has not kept train step 9") as raised:
        replay(run_dir, 9)
    assert "Steps that it kept: 1 to 4" in str(raised.value)
    assert steps_of("7..9") == (7, 9)
    for text in ("", "0", "x", "3..2", "-1"):
        with pytest.raises(InvalidInput):
            steps_of(text)
    with pytest.raises(NotFound, match=r"no run\.json"):
        StepRepeater(run_dir / "policies")
    assert main(["replay-step", str(run_dir), "1..2", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["difference"] for line in lines] == [None, None]


async def test_only_the_newest_steps_and_their_checkpoints_stay(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", seed=0)
    await train(tmp_path, keep_steps=1)
    # The checkpoint before step 4 is of 2 steps, so step 3 leads there.
    assert kept_steps(tmp_path) == [3, 4]
    assert replay(tmp_path, 4)[0].difference is None
    settings = json.loads((tmp_path / "kept_steps" / "000004" / "step.json").read_text())
    assert not {"token", "admin_token"} & set(settings["settings"])


def test_several_processes_keep_no_steps(trained_run: Path) -> None:
    settings = TrainerSettings(model_dir=trained_run / "model", keep_steps=1)
    ranks = join_trainer_ranks(RankSettings(rank=0, world_size=2), settings)
    with pytest.raises(InvalidConfig, match="keep_steps is 1, and 2 processes train"), ranks:
        pass
