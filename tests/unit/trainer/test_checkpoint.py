"""Checkpoints: whole or not at all, and only one version per number."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from dialoop.sequences import PolicyVersion
from dialoop_services.trainer.job.state import JobState
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.recovery.checkpoint import Checkpoints

VERSION = PolicyVersion(lineage="main", number=3)


class FakeLearner:
    """Its weights are one line of text; `killed` dies while it writes them."""

    def __init__(self, weights: str = "", *, killed: bool = False) -> None:
        self.weights = weights
        self._killed = killed

    def snapshot(self, directory: Path) -> None:
        (directory / "weights").write_text("" if self._killed else self.weights, "utf-8")
        if self._killed:
            raise KeyboardInterrupt

    def restore(self, directory: Path) -> None:
        self.weights = (directory / "weights").read_text("utf-8")


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
