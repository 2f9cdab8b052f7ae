"""The folder of an evaluation: a run that only evaluated, so that the console shows it too.

run.json has its specification, trajectories.jsonl a line for each episode, evaluation.json the
results.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dialoop.errors import InvalidInput, NotFound
from dialoop.reasons import Reason
from dialoop.trajectory import Owner, SamplingParams, Trajectory
from dialoop_services.trainer.records.rows import as_row

_RUN, _LINES = "run.json", "trajectories.jsonl"
LABEL = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """Which tasks are played, by which policy and how.

    policy: how the caller named it. num_tasks: the split's first tasks; 0: all of them.
    num_samples: episodes of each task. sampling: its stop texts are those of the environment.
    Raises InvalidInput (OUT_OF_RANGE) for impossible numbers.
    """

    environment: str
    policy: str
    split: str = "heldout"
    num_tasks: int = 64
    num_samples: int = 1
    max_turns: int = 64
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))

    def __post_init__(self) -> None:
        for name, least in (("num_tasks", 0), ("num_samples", 1), ("max_turns", 1)):
            if getattr(self, name) < least:
                raise InvalidInput(
                    f"{name} is {getattr(self, name)}.",
                    reason=Reason.OUT_OF_RANGE,
                    remedy=f"Give at least {least}.",
                )


class EvaluationRecords:
    """Writes an evaluation's folder; each line is flushed, so a kill loses no episode before it."""

    def __init__(self, run_dir: Path, spec: EvaluationSpec) -> None:
        self.run_dir = run_dir
        self.spec = spec
        self.done = _cut_and_count(run_dir / _LINES)
        """Task key and sample of each episode that was scored."""
        self._lines = (run_dir / _LINES).open("a", encoding="utf-8")

    @classmethod
    def open(
        cls, run_dir: Path, spec: EvaluationSpec, *, model_dir: str = "", fresh: bool = False
    ) -> Self:
        """Make the folder, or go on with the same evaluation in it.

        `model_dir` has the tokenizer, by which the console shows tokens. Raises InvalidInput
        (RUN_EXISTS) where the folder is another run or was evaluated otherwise, unless `fresh`.
        """
        if run_dir.exists() and any(run_dir.iterdir()):
            before = read_spec(run_dir) if (run_dir / "evaluation.json").is_file() else None
            if before is None or (before != spec and not fresh):
                raise InvalidInput(
                    f"{run_dir} exists and is "
                    f"{'no evaluation' if before is None else 'another evaluation'}.",
                    reason=Reason.RUN_EXISTS,
                    remedy="Choose another name with --run"
                    + ("." if before is None else ", or replace it with --fresh."),
                )
            if fresh:
                shutil.rmtree(run_dir)
        # As the stack's own runs: it holds all conversations. One that is there keeps its mode.
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = {
            "run": run_dir.name,
            "model": {"directory": model_dir},
            "evaluation": asdict(spec),
        }
        mark = {"run_id": f"{run_dir.name}-eval", "started": time.time(), "config": config}
        _write(run_dir / "evaluation.json", {})
        _write(run_dir / _RUN, mark)
        return cls(run_dir, spec)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lines.close()

    def add(self, trajectory: Trajectory, sample: int) -> None:
        """Write an episode that has ended. `sample` counts a task's episodes from 0."""
        fate = {"outcome": "evaluation", "label": LABEL, "train_step": 0}
        own = {
            "sample": sample,
            "is_scored": is_scored(trajectory),
            "is_success": is_success(trajectory),
        }
        line = json.dumps({**fate, **as_row(trajectory), **own}, ensure_ascii=False)
        self._lines.write(line + "\n")
        self._lines.flush()
        if own["is_scored"]:
            self.done.add((trajectory.task_key, sample))

    def conclude(self, results: dict[str, Any], *, mean_reward: float | None) -> None:
        """Write evaluation.json, and the row of metrics.jsonl that the console draws."""
        _write(self.run_dir / "evaluation.json", results)
        row = {
            "time": time.time(),
            "kind": "evaluation",
            "train_step": 0,
            "label": LABEL,
            "mean_reward": mean_reward,
        }
        (self.run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")


def is_scored(trajectory: Trajectory) -> bool:
    """Return whether it has a reward and nothing but the policy failed."""
    return not trajectory.is_unrewarded and all(
        failure.owner is Owner.POLICY for failure in trajectory.failures
    )


def is_success(trajectory: Trajectory) -> bool:
    """Return whether its rewards that state a success all state one; else, if the reward is 1."""
    return trajectory.reward >= 1 if trajectory.success is None else trajectory.success


def read_spec(run_dir: Path) -> EvaluationSpec:
    """Return the plan of an evaluation; NotFound (RUN_NOT_FOUND) where there is none."""
    try:
        values = json.loads((run_dir / _RUN).read_text("utf-8"))["config"]["evaluation"]
        sampling = SamplingParams(**values["sampling"])
        sampling = replace(sampling, stop=tuple(sampling.stop))
        return EvaluationSpec(**values | {"sampling": sampling})
    except (OSError, ValueError, KeyError, TypeError):
        raise NotFound(
            f"{run_dir} is no evaluation.",
            reason=Reason.RUN_NOT_FOUND,
            remedy="Name what `dialoop eval --run NAME` has made.",
        ) from None


def scored_rows(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of the episodes, those that were not scored too."""
    with (run_dir / _LINES).open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def _cut_and_count(path: Path) -> set[tuple[str, int]]:
    """Cut off a last line that a kill left incomplete; return the episodes that were scored."""
    if not path.is_file():
        return set()
    with path.open("rb+") as file:
        end = 0
        for line in file:
            if line.endswith(b"\n"):
                end += len(line)
        file.truncate(end)
    rows = scored_rows(path.parent)
    return {(row["task_key"], row["sample"]) for row in rows if row["is_scored"]}


def _write(path: Path, content: dict[str, Any]) -> None:
    fresh = path.with_name(f"{path.name}.tmp")
    fresh.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)
