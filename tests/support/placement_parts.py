"""A reward that always tells members apart, and a loss that a test can hold up."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from dialoop_learning.loss.losses import grpo
from dialoop_services.runtime.device_lock import is_owned

if TYPE_CHECKING:
    from dialoop.trajectory import Group
    from dialoop_learning.loss.losses import LossInputs, LossOutput

HOLD = "TEST_HOLD"
"""Variable with a file's path: while it exists, a train step stands in the middle of its loss."""


def token_sum(group: Group) -> list[float]:
    """A reward that differs within a group, however bad its policy is."""
    return [
        float(trajectory.sequences[0].token_ids.sum() % 101) for trajectory in group.trajectories
    ]


def slow_loss(inputs: LossInputs) -> LossOutput:
    """GRPO, in the trainer's process, which owns the device by now."""
    if not torch.is_grad_enabled():
        return grpo(inputs)  # what is tried on the host before a batch is taken
    assert is_owned(Path(os.environ["DIALOOP_TRAINER_DEVICE_LOCK"]))
    hold = Path(os.environ[HOLD])
    while hold.exists():
        hold.with_suffix(".inside").touch()
        time.sleep(0.02)
    return grpo(inputs)
