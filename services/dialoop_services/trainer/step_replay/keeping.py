"""Keep a train step on disk, and read it again.

    runs/demo/kept_steps/000007/groups/0000.binpb      the groups as they were trained
                               /columns.safetensors    every number of the step
                               /step.json              what the rest is; written last

A step without step.json was interrupted and does not count.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from dialoop.errors import InvalidInput, NotFound, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion
from dialoop.v1 import trajectory_pb2 as pb
from dialoop.wire.records import GROUP
from dialoop_learning.model.products import library_of
from google.protobuf.message import DecodeError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dialoop_services.runtime.durable import named_failures, sync_tree, write_json
from dialoop_services.runtime.settings import ServerSettings
from dialoop_services.trainer.recovery.checkpoint import Checkpoints
from dialoop_services.trainer.step_replay.columns import (
    advantage_columns,
    model_columns,
    reward_columns,
    row_columns,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from dialoop.trajectory import Group
    from torch import Tensor

    from dialoop_services.trainer.settings import TrainerSettings
    from dialoop_services.trainer.step_replay.columns import StepColumn
    from dialoop_services.trainer.step_replay.trace import StepTrace

FOLDER = "kept_steps"
_FORMAT = 1
_STEP, _COLUMNS, _GROUPS, _RANDOM = "step.json", "columns.safetensors", "groups", "torch_random"
# Tokens are secrets, and addresses and folders are of the process that trained.
_ADDRESSES = ("replay_address", "environment_address", "inference_addresses")
_NOT_OF_THE_STEP = {
    *ServerSettings.model_fields,
    *_ADDRESSES,
    *("trackers", "run_dir", "shared_memory_dir", "device_lock"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStep:
    """A train step as it was. version: the policy's before it. damaged: files with other bytes."""

    train_step: int
    version: PolicyVersion
    groups: tuple[Group, ...]
    columns: dict[str, Tensor]
    names: tuple[str, ...]
    settings: dict[str, Any]
    machine: dict[str, Any]
    python_random: str
    torch_random: Tensor
    damaged: tuple[str, ...]

    def restore_random(self, orders: random.Random) -> None:
        """Continue from the random states from which the step began."""
        orders.setstate(ast.literal_eval(self.python_random))
        torch.set_rng_state(self.torch_random)


def keep_step(
    settings: TrainerSettings,
    train_step: int,
    version: PolicyVersion,
    groups: Sequence[Group],
    trace: StepTrace,
) -> None:
    """Write a step, and delete those that come after it or that no longer count.

    The newest `keep_steps` count, and those that lead there from a checkpoint. Later ones are of a
    run that was restored since. Raises PreconditionFailed (WRITE_FAILED).
    """
    root = settings.run_dir / FOLDER
    directory = root / f"{train_step:06d}"
    with named_failures(directory):
        shutil.rmtree(directory, ignore_errors=True)
        (directory / _GROUPS).mkdir(parents=True)
        for number, group in enumerate(groups):
            data = GROUP.to_proto(group).SerializeToString(deterministic=True)
            (directory / _GROUPS / f"{number:04d}.binpb").write_bytes(data)
        columns = columns_of(groups, trace)
        values = {column.key: column.values.contiguous() for column in columns}
        save_file({**values, _RANDOM: trace.torch_random}, directory / _COLUMNS)
        sync_tree(directory)
    write_json(
        directory / _STEP,
        {
            "format": _FORMAT,
            "train_step": train_step,
            "lineage": version.lineage,
            "policy_version": version.number,
            "machine": machine_of(settings),
            "settings": settings.model_dump(mode="json", exclude=_NOT_OF_THE_STEP),
            "columns": [column.key for column in columns],
            "python_random": trace.python_random,
            "digests": _digests(directory),
        },
    )
    first = train_step - settings.keep_steps + 1
    before = Checkpoints(settings.run_dir).before_step(first)
    start = before[1] + 1 if before else first
    for other in kept_steps(settings.run_dir):
        if not start <= other <= train_step:
            shutil.rmtree(root / f"{other:06d}", ignore_errors=True)


def columns_of(groups: Sequence[Group], trace: StepTrace) -> list[StepColumn]:
    """Return all columns of a step, in the order of its stages."""
    return [
        *reward_columns(groups),
        *advantage_columns(groups),
        *row_columns(groups, trace.rows),
        *model_columns(groups, trace),
    ]


def kept_steps(run_dir: Path) -> list[int]:
    """Return the numbers of the train steps that a run has kept, in order."""
    marks = (run_dir / FOLDER).glob(f"[0-9]*/{_STEP}")
    return sorted(int(mark.parent.name) for mark in marks)


def read_step(run_dir: Path, train_step: int) -> KeptStep:
    """Return a kept step; NotFound where the run has not kept it.

    Raises PreconditionFailed (READ_FAILED) for files that cannot be read. Files with other bytes
    than were written, which can be read, are named in `damaged`.
    """
    directory = run_dir / FOLDER / f"{train_step:06d}"
    if not (directory / _STEP).is_file():
        steps = kept_steps(run_dir)
        listed = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise NotFound(
            f"{run_dir} has not kept train step {train_step}.",
            reason=Reason.STEP_NOT_KEPT,
            remedy=f"Steps that it kept: {listed}. Set keep_steps in [train] before a run, to as "
            "many steps as you want to repeat.",
        )
    try:
        facts: dict[str, Any] = json.loads((directory / _STEP).read_bytes())
        columns = load_file(directory / _COLUMNS)
        torch_random = columns.pop(_RANDOM)
        groups = tuple(_read_group(path) for path in sorted((directory / _GROUPS).iterdir()))
        now, then = _digests(directory), facts["digests"]
        return KeptStep(
            train_step=facts["train_step"],
            version=PolicyVersion(lineage=facts["lineage"], number=facts["policy_version"]),
            groups=groups,
            columns=columns,
            names=tuple(facts["columns"]),
            settings=facts["settings"],
            machine=facts["machine"],
            python_random=facts["python_random"],
            torch_random=torch_random,
            damaged=tuple(n for n in sorted({*now, *then}) if now.get(n) != then.get(n)),
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise PreconditionFailed(
            f"{directory} cannot be read: {type(error).__name__}: {error}.",
            reason=Reason.READ_FAILED,
            remedy="Restore the folder from a copy, or repeat another step.",
        ) from error


def machine_of(settings: TrainerSettings) -> dict[str, Any]:
    """Return what must be equal for equal bits, beside the code and the settings."""
    device = torch.device(settings.device)
    return {
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "matrix_products": library_of(device),
        "logprob_kernel": settings.logprob_kernel,
    }


def _read_group(path: Path) -> Group:
    try:
        return GROUP.from_proto(pb.Group.FromString(path.read_bytes()))
    except (DecodeError, InvalidInput) as error:
        raise ValueError(f"{path.name}: {error}") from error


def _digests(directory: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != _STEP:
            with path.open("rb") as file:
                name = path.relative_to(directory).as_posix()
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
