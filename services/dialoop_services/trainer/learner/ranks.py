"""This process's rank among the trainer's, as torchrun or `launch.py` says it, and its learner."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil  # type: ignore[import-untyped]
import torch
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop_learning.parallel.group_commands import RankGroup
from dialoop_learning.parallel.ranks import Ranks, join_ranks
from pydantic import Field

from dialoop_services.runtime.process import die_at_once_with_parent
from dialoop_services.runtime.settings import StrictSettings
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.learner.meeting import RENDEZVOUS_VARIABLE
from dialoop_services.trainer.learner.policies import require_cuda_devices
from dialoop_services.trainer.settings import TrainerSettings

_LAST_WORDS_S = 5.0


class RankSettings(StrictSettings):
    """The variables of torchrun. Without them this process trains alone."""

    rank: int = Field(default=0, ge=0)
    """Number of this process among all."""
    world_size: int = Field(default=1, ge=1)
    """Number of processes in all."""
    local_rank: int = Field(default=0, ge=0)
    """Number of this process on its machine, and of its CUDA device."""
    local_world_size: int = Field(default=1, ge=1)
    """Number of processes on its machine."""
    rendezvous: str = Field(default="env://", validation_alias=RENDEZVOUS_VARIABLE)
    """Meeting point of the processes: env:// as torchrun sets it, or file:///... on one machine."""


@contextmanager
def join_trainer_ranks(rank: RankSettings, settings: TrainerSettings) -> Iterator[Ranks]:
    """Join the other processes, and leave them on every path.

    Raises InvalidConfig before that for a device that does not exist, or that is shared, and for a
    mesh of another number of processes.
    """
    device = settings.device
    if device == "cuda":
        require_cuda_devices(rank.local_rank + 1)
    if rank.world_size > 1 and settings.device_lock is not None:
        raise InvalidConfig(
            f"{rank.world_size} processes train on a device that is shared with the engine.",
            reason=Reason.SHARED_DEVICE,
            remedy="Set num_processes to 1, or give the trainer devices of its own.",
        )
    if rank.world_size > 1 and settings.keep_steps:
        raise InvalidConfig(
            f"keep_steps is {settings.keep_steps}, and {rank.world_size} processes train.",
            remedy="Set num_processes to 1, or keep_steps to 0, in [train].",
        )
    try:
        dp_replicate, _, cp = settings.mesh.sizes(rank.world_size)
    except ValueError as error:
        raise InvalidConfig(
            f"In [train], {error}.", remedy="Correct [train.mesh], num_nodes or num_processes."
        ) from error
    if device == "cuda" and rank.world_size > 1:
        device = f"cuda:{rank.local_rank}"  # type: ignore[assignment]
    if rank.world_size > 1:
        die_at_once_with_parent()  # two would train this run if one drained while all start anew
    with join_ranks(
        rank=rank.rank,
        size=rank.world_size,
        num_local=rank.local_world_size,
        device=torch.device(device),
        dp_replicate=dp_replicate,
        cp=cp,
        init_method=rank.rendezvous,
    ) as ranks:
        yield ranks


def learners_of(ranks: Ranks) -> RankGroup[Learner]:
    """Return the group of learners, one per rank; `make_learner` on the first rank makes them."""

    def make(facts: str, group: RankGroup[Learner]) -> Learner:
        return Learner(TrainerSettings(**json.loads(facts)), group)

    return RankGroup(ranks, make)


def make_learner(settings: TrainerSettings, group: RankGroup[Learner] | None = None) -> Learner:
    """Load the model on every rank with the first rank's settings; return the first's learner."""
    if group is None or group.ranks.size == 1:
        return Learner(settings, group)
    # The other ranks call no service, so they do not need the bearer token.
    return group.make(settings.model_dump_json(exclude={"token", "admin_token", "ticket"}))


def leave_stopping_to_the_first(rank: RankSettings) -> None:
    """Ignore SIGTERM and SIGINT: the first rank ends its step, saves, and closes the others.

    Where a rank of this machine has died, torchrun sends the signal, and waits long: leave soon.
    """

    def heed(number: int, frame: FrameType | None) -> None:
        if len(psutil.Process(os.getppid()).children()) < rank.local_world_size:
            leave = threading.Timer(_LAST_WORDS_S, os._exit, (1,))
            leave.daemon = True
            leave.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, heed)
