"""What the driver says of this machine's GPUs, and which stack has which of them.

The driver's own program is asked: a process that had asked CUDA could not be forked any more. Where
there is no such program, nothing is known and nothing is refused.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

from dialoop_ops.stack.processes.ports import private_folder

_PROGRAM, _ANSWERS_IN_S = "nvidia-smi", 20.0
_GIB, _MIB = 2**30, 2**20
_FOLDER = Path(tempfile.gettempdir())


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as the driver lists it; total and free are bytes, None where it does not say."""

    index: str
    uuid: str
    name: str
    total: int | None
    free: int | None

    def is_called(self, name: str) -> bool:
        """Return whether an entry of CUDA_VISIBLE_DEVICES means it: an index, or a UUID's start."""
        return name == self.index or (name.startswith("GPU-") and self.uuid.startswith(name))

    @property
    def room(self) -> str:
        """Return how much is free, as text; empty where the driver does not say."""
        if self.free is None or self.total is None:
            return ""
        return f"{self.free / _GIB:.1f} of its {self.total / _GIB:.1f} GiB are free"

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


def driver_lists() -> tuple[Gpu, ...] | None:
    """Return the GPUs that the driver lists; None where it cannot be asked.

    Raise InvalidConfig (NO_DEVICE) where it is installed and has no device.
    """
    if shutil.which(_PROGRAM) is None:
        return None
    code, text = _ask("--query-gpu=index,uuid,name,memory.total,memory.free")
    rows = [_cells(line) for line in text.splitlines()]
    gpus = tuple(
        Gpu(index=index, uuid=uuid, name=name, total=_bytes(total), free=_bytes(free))
        for index, uuid, name, total, free in (row for row in rows if len(row) == 5)
    )
    if code or not gpus:
        words = " ".join(text.split()) or f"it ended with {code} and said nothing"
        raise InvalidConfig(
            f"There is an NVIDIA driver, and no GPU that it has: {_PROGRAM} says {words:.200}.",
            reason=Reason.NO_DEVICE,
            remedy=f"Run {_PROGRAM} until it lists the GPU (a container needs --gpus all), or set "
            "devices to the CPU.",
        )
    return gpus


def users_of(gpu: Gpu) -> str:
    """Return who has memory of the GPU, as text: "process 4711 with 60.1 GiB"; empty for nobody."""
    _, text = _ask("--query-compute-apps=gpu_uuid,pid,used_memory")
    rows = [row for row in map(_cells, text.splitlines()) if len(row) == 3 and row[0] == gpu.uuid]
    sizes = [(pid, _bytes(used)) for _, pid, used in rows]
    return ", ".join(
        f"process {pid}" + (f" with {used / _GIB:.1f} GiB" if used else "") for pid, used in sizes
    )


def require_room(needs: Mapping[str, Mapping[str, float]], gpus: Sequence[Gpu]) -> None:
    """Raise InvalidConfig where a GPU lacks the memory that processes need on it.

    needs: for each entry of CUDA_VISIBLE_DEVICES the bytes of each process there. NO_DEVICE for an
    entry that the driver does not list, GPU_MEMORY_TAKEN for too little free memory.
    """
    for entry, processes in needs.items():
        if entry.startswith("MIG-"):
            continue  # a part of a GPU, which is not listed so
        gpu = next((gpu for gpu in gpus if gpu.is_called(entry)), None)
        if gpu is None:
            raise InvalidConfig(
                f"CUDA_VISIBLE_DEVICES names GPU {entry}, and the driver lists "
                f"{', '.join(map(str, gpus))}.",
                reason=Reason.NO_DEVICE,
                remedy="Correct CUDA_VISIBLE_DEVICES, or unset it to use all of them.",
            )
        needed = sum(processes.values())
        if gpu.free is None or needed <= gpu.free:
            continue
        parts = " + ".join(f"{name} {size / _GIB:.1f}" for name, size in processes.items())
        users = users_of(gpu)
        raise InvalidConfig(
            f"The job needs {needed / _GIB:.1f} GiB of {gpu}: {parts}; {gpu.room}."
            + (f" It is used by {users}." if users else ""),
            reason=Reason.GPU_MEMORY_TAKEN,
            remedy="End what uses it, name another GPU in CUDA_VISIBLE_DEVICES, or take a smaller "
            "model, max_row_tokens in [train] or kv_cache_mib in [inference].",
        )


@contextmanager
def hold(
    entries: Iterable[str],
    gpus: Sequence[Gpu],
    *,
    run: str,
    shares: bool,
    folder: Path | None = None,
) -> Iterator[None]:
    """Keep GPUs for a stack of this user until the context is left.

    entries: as CUDA_VISIBLE_DEVICES has them. With `shares` other stacks that share may have them
    too. Raise InvalidConfig (GPU_IN_USE) where another stack has one.
    """
    mode = (fcntl.LOCK_SH if shares else fcntl.LOCK_EX) | fcntl.LOCK_NB
    with ExitStack() as stack:
        for entry in sorted(set(entries)):
            gpu = next((gpu for gpu in gpus if gpu.is_called(entry)), None)
            name = gpu.uuid if gpu else entry
            path = private_folder(folder or _FOLDER) / f"{name.replace('/', '-')}.lock"
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            file = stack.enter_context(os.fdopen(number, "r+", encoding="utf-8"))
            try:
                fcntl.flock(file, mode)
            except BlockingIOError:
                raise _in_use(entry, gpu, file.read()) from None
            file.truncate()
            file.write(f"run {run} of process {os.getpid()}")
            file.flush()
        yield


def _in_use(entry: str, gpu: Gpu | None, holder: str) -> InvalidConfig:
    return InvalidConfig(
        f"{gpu or f'GPU {entry}'} is in use by {holder or 'another stack'}"
        + (f", and {gpu.room}." if gpu and gpu.room else "."),
        reason=Reason.GPU_IN_USE,
        remedy="Wait for that run, name another GPU in CUDA_VISIBLE_DEVICES, or set overlap = true "
        "in [resources] of both.",
    )


def _ask(query: str) -> tuple[int, str]:
    """Return the exit code and the answer of the driver's program."""
    try:
        answer = subprocess.run(
            [_PROGRAM, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_ANSWERS_IN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return answer.returncode, answer.stdout + (answer.stderr if answer.returncode else "")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _bytes(mebibytes: str) -> int | None:
    return int(mebibytes) * _MIB if mebibytes.isdecimal() else None
