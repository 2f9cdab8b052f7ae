"""Checkpoints: whole or not at all, and only one version per number."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from dialoop.errors import InvalidConfig, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.parallel.ranks import Ranks
from dialoop_services.trainer.job.state import JobState
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.learner.learner_state import LearnerState
from dialoop_services.trainer.recovery.checkpoint import (
    Checkpoints,
    Journal,
    JournalEntry,
    published_policy,
)
from dialoop_services.trainer.settings import TrainerSettings

VERSION = PolicyVersion(lineage="main", number=3)


class FakeLearner:
    """Its weights are one line of text; `killed` dies while it writes them."""

    def __init__(
        self, weights: str = "", *, killed: bool = False, not_loaded: Exception | None = None
    ) -> None:
        self.weights = weights
        self._killed = killed
        self._not_loaded = not_loaded

    def snapshot(self, directory: Path) -> Callable[[], None]:
        (directory / "weights").write_text("" if self._killed else f"{self.weights}\n")
        if self._killed:
            raise KeyboardInterrupt
        return lambda: None

    def damage_in(self, directory: Path) -> str:
        is_whole = (directory / "weights").read_text().endswith("\n")
        return "" if is_whole else "weights is cut"

    def restore(self, directory: Path) -> None:
        if self._not_loaded is not None:
            raise self._not_loaded
        self.weights = (directory / "weights").read_text().rstrip()


def learner(weights: str = "", **options: Any) -> Learner:
    return cast("Learner", FakeLearner(weights, **options))


def test_a_kill_while_the_same_step_is_saved_again_leaves_the_first_checkpoint(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path)
    progress = JobState(policy_version=VERSION, num_train_steps=10)
    checkpoints.save(learner("first"), progress)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(learner("second", killed=True), progress)
    restored = learner()
    assert checkpoints.restore(restored) == progress
    assert cast("FakeLearner", restored).weights == "first"


def test_the_newest_two_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    progress = JobState(policy_version=VERSION, num_train_steps=10)
    for weights in "abcd":
        checkpoints.save(learner(weights), progress)
    assert len([d for d in (tmp_path / "checkpoints").iterdir() if d.is_dir()]) == 2
    restored = learner()
    checkpoints.restore(restored)
    assert cast("FakeLearner", restored).weights == "d"


def test_what_a_kill_left_behind_does_not_push_out_a_good_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    good = checkpoints.save(learner("good"), JobState(policy_version=VERSION, num_train_steps=10))
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(
            learner("cut short", killed=True), JobState(policy_version=VERSION, num_train_steps=20)
        )
    again = Checkpoints(tmp_path)
    again.restore(learner())
    newest = again.save(learner("new"), JobState(policy_version=VERSION, num_train_steps=30))
    assert {d for d in (tmp_path / "checkpoints").iterdir() if d.is_dir()} == {good, newest}


def two_checkpoints(folder: Path) -> tuple[Path, Path]:
    """The folders of an older and of the newest checkpoint, of steps 10 and 20."""
    checkpoints = Checkpoints(folder)
    paths = [
        checkpoints.save(learner(weights), JobState(policy_version=VERSION, num_train_steps=step))
        for weights, step in (("older", 10), ("newest", 20))
    ]
    return paths[0], paths[1]


def cut(path: Path) -> None:
    """Leave the first half of a file, as a power loss may."""
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize("damaged", ["progress.json", "weights"])
def test_a_damaged_checkpoint_is_passed_over_for_the_older_one(
    tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    older, newest = two_checkpoints(tmp_path)
    cut(newest / damaged)
    restored, checkpoints = learner(), Checkpoints(tmp_path)
    state = checkpoints.restore(restored)
    assert state is not None
    assert state.num_train_steps == 10
    assert cast("FakeLearner", restored).weights == "older"
    assert checkpoints.newest == older
    sentence = f"{newest.name} cannot be read, so the trainer continues from the checkpoint "
    assert sentence + older.name in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_damaged_pointer_loses_no_checkpoint(tmp_path: Path, content: str) -> None:
    two_checkpoints(tmp_path)
    (tmp_path / "checkpoints" / "latest.json").write_text(content)
    restored = learner()
    state = Checkpoints(tmp_path).restore(restored)
    assert state is not None
    assert state.num_train_steps == 20
    assert cast("FakeLearner", restored).weights == "newest"


def test_where_no_checkpoint_can_be_read_the_run_does_not_start_again_from_nothing(
    tmp_path: Path,
) -> None:
    for path in two_checkpoints(tmp_path):
        cut(path / "weights")
    with pytest.raises(InvalidConfig, match=r"No checkpoint in .* can be read"):
        Checkpoints(tmp_path).restore(learner())


NOT_LOADED = (
    PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
    OSError(errno.EIO, os.strerror(errno.EIO)),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
)


@pytest.mark.parametrize("error", NOT_LOADED, ids=lambda error: type(error).__name__)
def test_what_is_no_damage_takes_back_no_train_step(tmp_path: Path, error: Exception) -> None:
    _, newest = two_checkpoints(tmp_path)
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(PreconditionFailed, match=newest.name) as caught:
        checkpoints.restore(learner(not_loaded=error))
    assert caught.value.reason is Reason.READ_FAILED
    assert "memory" in caught.value.remedy
    assert checkpoints.newest == newest


@pytest.mark.parametrize("name", ["latest.json", "progress.json"])
def test_a_checkpoints_json_that_may_not_be_read_is_not_a_damaged_one(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_checkpoints(tmp_path)
    refuse_to_read(name, monkeypatch)
    with pytest.raises(PreconditionFailed, match=name + " could not be read: Permission denied"):
        Checkpoints(tmp_path).restore(learner())


def refuse_to_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file system refuse every file of that name, as it cannot refuse root."""
    open_path = Path.open

    def refuse(path: Path, *args: Any, **named: Any) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_path(path, *args, **named)

    monkeypatch.setattr(Path, "open", refuse)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("real") / "model", seed=0)


@pytest.fixture(scope="module")
def real(model_dir: Path) -> Learner:
    """A learner whose every restore is from what it saved itself."""
    return Learner(TrainerSettings(model_dir=model_dir))


@pytest.mark.parametrize("damaged", ["model.safetensors", "learner.pt"])
@pytest.mark.parametrize("damage", ["zeros", "one bit", "shorter"])
def test_a_real_learner_passes_over_files_that_the_disk_damaged(
    real: Learner, tmp_path: Path, damaged: str, damage: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (10, 20):
        path = checkpoints.save(real, JobState(policy_version=VERSION, num_train_steps=step))
    data = bytearray((path / damaged).read_bytes())
    data[-100] ^= damage == "one bit"
    damages = {"zeros": bytes(len(data)), "shorter": data[:100], "one bit": data}
    (path / damaged).write_bytes(damages[damage])
    state = Checkpoints(tmp_path).restore(real)
    assert state is not None
    assert state.num_train_steps == 10


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_holds_what_was_there_when_it_began(
    model_dir: Path, tmp_path: Path, sharded: bool
) -> None:
    ours = Learner(TrainerSettings(model_dir=model_dir, sharded_checkpoints=sharded))
    head = ours.state.policy.causal_lm.get_output_embeddings().weight.detach()
    before, wait = head.clone(), ours.snapshot(tmp_path)
    head.zero_()  # a train step changes weights in place
    wait()
    assert ours.damage_in(tmp_path) == ""
    ours.restore(tmp_path)
    assert torch.equal(head, before)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(
    model_dir: Path, tmp_path: Path, sharded: bool
) -> None:
    ours = Learner(TrainerSettings(model_dir=model_dir, sharded_checkpoints=sharded))
    checkpoints, state = Checkpoints(tmp_path), JobState(policy_version=VERSION)
    good, limits = checkpoints.save(ours, state), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(PreconditionFailed, match="File too large") as caught:
            checkpoints.save(ours, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.reason is Reason.WRITE_FAILED
    assert [path for path in good.parent.iterdir() if path.is_dir()] == [good]
    checkpoints.save(ours, state)


def test_a_file_that_may_not_be_read_is_not_a_damaged_one(
    real: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real.snapshot(tmp_path)()
    assert real.damage_in(tmp_path) == ""
    refuse_to_read("model.safetensors", monkeypatch)
    with pytest.raises(PreconditionFailed, match="could not be read: Permission denied") as caught:
        real.damage_in(tmp_path)
    assert caught.value.reason is Reason.READ_FAILED


@pytest.mark.parametrize(
    ("others", "failure"), [(["torn", ""], ""), (["", "No route to host"], "No route to host")]
)
def test_every_rank_hears_of_what_another_one_cannot_read(
    real: Learner, tmp_path: Path, others: list[str], failure: str
) -> None:
    class TwoRanks(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value, others]

    real.snapshot(tmp_path)()
    state = LearnerState(
        real.state.policy, {}, random.Random(0), model_dir=tmp_path, ranks=TwoRanks()
    )
    if failure:
        with pytest.raises(PreconditionFailed, match=failure):
            state.find_damage(tmp_path)
    else:
        assert state.find_damage(tmp_path) == "torn"


def test_all_of_a_checkpoint_is_on_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power loss would leave is what was fsynced; the pointer's rename comes after it."""
    synced: set[int] = set()
    sync, rename = os.fsync, Path.replace
    at_rename: dict[str, set[int]] = {}

    def record(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def replace(path: Path, target: Path) -> Path:
        at_rename[target.name] = set(synced)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "replace", replace)
    checkpoints = Checkpoints(tmp_path)
    directory = checkpoints.save(learner("w"), JobState(policy_version=VERSION))
    Journal(checkpoints).add(JournalEntry(train_step=1, policy_version=VERSION))
    pointer, journal = tmp_path / "checkpoints" / "latest.json", directory / "journal.jsonl"
    needed = (directory / "weights", directory / "progress.json", directory, pointer)
    assert {path.stat().st_ino for path in needed} <= at_rename["latest.json"]
    assert {path.stat().st_ino for path in (pointer.parent, journal)} <= synced


def test_a_damaged_journal_counts_up_to_the_damage(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    directory = checkpoints.save(learner("w"), JobState(policy_version=VERSION))
    journal = Journal(checkpoints)
    for step in (1, 2, 3):
        journal.add(JournalEntry(train_step=step, policy_version=VERSION))
    lines = (directory / "journal.jsonl").read_bytes().split(b"\n")
    lines[1] = b"\0" * len(lines[1])
    (directory / "journal.jsonl").write_bytes(b"\n".join(lines))
    assert [entry.train_step for entry in journal.entries()] == [1]


def test_a_damaged_policy_pointer_gives_the_newest_policy_on_the_disk(tmp_path: Path) -> None:
    for number in (8, 9, 10):
        path = tmp_path / "policies" / f"main.1-{number}" / "model.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"%d" % number)
        os.utime(path, (-number, -number))  # the clock was set back
    (tmp_path / "policies" / "latest.json").write_text('{"lineage": ')
    live = published_policy(tmp_path)
    assert live is not None
    assert str(live.version) == "main.1-10"
    assert live.sha256 == hashlib.sha256(b"10").hexdigest()
