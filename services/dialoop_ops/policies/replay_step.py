"""Repeat train steps that a run has kept, and name the first number that differs.

A step begins from the weights of the newest checkpoint before it, with the steps since repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from dialoop.errors import InvalidInput, NotFound, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.trajectory import Group
from dialoop_learning.packing.rows import TokenRow
from dialoop_learning.rl.advantages import AdvantageSettings, with_advantages
from dialoop_learning.rl.monte_carlo import with_turn_advantages
from dialoop_learning.rl.selection import with_best_alone
from dialoop_services.config.job import JobConfig
from dialoop_services.trainer.data.batches import sequences_of
from dialoop_services.trainer.learner.learner import Learner, StepObserver
from dialoop_services.trainer.recovery.checkpoint import Checkpoints
from dialoop_services.trainer.settings import TrainerSettings
from dialoop_services.trainer.step_replay.columns import (
    advantage_columns,
    model_columns,
    reward_columns,
    row_columns,
)
from dialoop_services.trainer.step_replay.keeping import KeptStep, machine_of, read_step
from dialoop_services.trainer.step_replay.trace import StepTrace
from rich.console import Console
from rich.progress import Progress

from dialoop_ops.cli.console import say
from dialoop_ops.policies.step_differences import (
    ABSOLUTE,
    RELATIVE,
    Difference,
    first_difference,
    first_unlike_record,
)
from dialoop_ops.runs.run_config import find_run

_NO_FLOATS = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReplay:
    """One repeated step. is_exact: bits were compared. difference: the first one, None if equal.

    stages: those that were compared. notes: what was not, and why.
    """

    train_step: int
    is_exact: bool
    difference: Difference | None
    stages: tuple[str, ...]
    num_values: int
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return asdict(self)


class StepRepeater:
    """Repeats the kept steps of a run in order, on one learner."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._job = _job_of(run_dir)
        self._learner: Learner | None = None
        self._num_done: int | None = None

    def replay(self, first: int, last: int) -> Iterator[StepReplay]:
        """Yield each step from `first` to `last`, up to one that differs.

        Raises NotFound (STEP_NOT_KEPT), PreconditionFailed (READ_FAILED, and NO_CHECKPOINT after
        the stages that need no weights are compared and equal).
        """
        for number in range(first, last + 1):
            step = read_step(self._run_dir, number)
            result = self._without_weights(step)
            if result.difference is None:
                self._go_to(step)
                result = self._with_weights(step, result)
            yield result
            if result.difference is not None:
                return

    def _without_weights(self, step: KeptStep) -> StepReplay:
        """Compare trajectories.jsonl, rewards, advantages and rows."""
        learner = self._learner_for(step)
        is_exact, notes = self._exactness(step)
        notes += [f"{name} has other bytes than were written" for name in step.damaged]
        difference = first_unlike_record(self._run_dir, step.train_step, step.groups)
        stages, columns = ["trajectories.jsonl"], list(reward_columns(step.groups))
        difference = difference or self._compare(step, columns, is_exact=is_exact)
        stages.append("rewards")
        advantages, why_not = self._advantages(step)
        if why_not:
            notes.append(why_not)
        if advantages:
            # Rewards of the scorer's own had more digits than a group keeps.
            of_scorer = bool(self._job.scorer.rewards or self._job.scorer.kl_coefficient)
            if of_scorer:
                notes.append("the scorer adds rewards, so advantages have the tolerance")
            is_close = is_exact and not of_scorer
            new = list(advantage_columns(advantages))
            difference = difference or self._compare(step, new, is_exact=is_close)
            columns += new
            stages.append("advantages")
        if difference is None:
            rows = row_columns(step.groups, self._rows(step, learner))
            new = list(rows)
            difference = self._compare(step, new, is_exact=is_exact)
            columns += new
            stages.append("rows")
        return StepReplay(
            train_step=step.train_step,
            is_exact=is_exact,
            difference=difference,
            stages=tuple(stages),
            num_values=sum(len(column.values) for column in columns),
            notes=tuple(notes),
        )

    def _with_weights(self, step: KeptStep, result: StepReplay) -> StepReplay:
        """Take the step, and compare all that the model computes."""
        learner = self._learner_for(step)
        step.restore_random(learner.state.orders)
        trace = learner.observer = StepTrace()
        learner.train_step(self._rows(step, learner))
        learner.observer = StepObserver()
        self._num_done = step.train_step
        columns = list(model_columns(step.groups, trace))
        stages = tuple(dict.fromkeys(column.stage for column in columns))
        light = ("rewards", "advantages", "rows")
        names = [name for name in step.names if name.partition("/")[0] not in light]
        return replace(
            result,
            difference=first_difference(columns, step.columns, names, is_exact=result.is_exact),
            stages=(*result.stages, *stages),
            num_values=result.num_values + sum(len(column.values) for column in columns),
        )

    def _go_to(self, step: KeptStep) -> None:
        """Bring the learner to the weights before a step: restore, and repeat the steps since."""
        learner = self._learner_for(step)
        if self._num_done == step.train_step - 1:
            return
        before = Checkpoints(self._run_dir).before_step(step.train_step)
        damage = learner.damage_in(before[0]) if before else "none is kept"
        if before is None or damage:
            raise PreconditionFailed(
                f"Rewards, advantages and rows of step {step.train_step} are as they were. The "
                f"rest was not repeated, for want of a checkpoint before it: {damage}.",
                reason=Reason.NO_CHECKPOINT,
                remedy="Repeat a step after the oldest checkpoint. A run with keep_steps keeps "
                "the checkpoints of its newest steps.",
            )
        learner.restore(before[0])
        self._num_done = before[1]
        for number in range(before[1] + 1, step.train_step):
            earlier = read_step(self._run_dir, number)
            earlier.restore_random(learner.state.orders)
            learner.train_step(self._rows(earlier, learner))
            self._num_done = number

    def _learner_for(self, step: KeptStep) -> Learner:
        if self._learner is None:
            directory = Path(step.settings["model_dir"])
            if not directory.is_dir():  # the run's folder was moved, or this is another folder
                directory = self._run_dir / "model"
            values = {"run_dir": self._run_dir, "model_dir": directory, "keep_steps": 0}
            self._settings = TrainerSettings(**{**step.settings, **values})
            self._learner = Learner(self._settings)
        return self._learner

    def _exactness(self, step: KeptStep) -> tuple[bool, list[str]]:
        now = machine_of(self._settings)
        other = [k for k in {**now, **step.machine} if now.get(k) != step.machine.get(k)]
        notes = [
            f"{name} is {now.get(name)}, it was {step.machine.get(name)}: equal bits are not "
            f"promised, so floats may differ by {RELATIVE:g} of their size and {ABSOLUTE:g}"
            for name in sorted(other)
        ]
        return not other, notes

    def _rows(self, step: KeptStep, learner: Learner) -> list[TokenRow]:
        return learner.rows_to_train(sequences_of(step.groups), current=step.version)

    def _compare(
        self, step: KeptStep, columns: Sequence[Any], *, is_exact: bool
    ) -> Difference | None:
        stages = {column.stage for column in columns}
        names = [name for name in step.names if name.partition("/")[0] in stages]
        return first_difference(columns, step.columns, names, is_exact=is_exact)

    def _advantages(self, step: KeptStep) -> tuple[list[Group], str]:
        """Return the groups with advantages computed anew by the scorer's rule, or why not."""
        scorer, loss = self._job.scorer, str(step.settings["loss"])
        if scorer.advantage_estimator:
            return [], f"advantages were not repeated: {scorer.advantage_estimator} computes them"
        rule = AdvantageSettings(**scorer.advantage_rule(loss))
        plain = [_without_advantages(group) for group in step.groups]
        if scorer.top_k:
            k, aggregate = scorer.top_k, rule.aggregate
            return [with_best_alone(group, k=k, aggregate=aggregate) for group in plain], ""
        compute = with_turn_advantages if scorer.advantages_of == "turn" else with_advantages
        return [compute(group, rule) for group in plain], ""


def _without_advantages(group: Group) -> Group:
    trajectories = (
        replace(
            trajectory,
            sequences=tuple(
                replace(s, advantage=None, token_advantages=_NO_FLOATS)
                for s in trajectory.sequences
            ),
        )
        for trajectory in group.trajectories
    )
    return replace(group, trajectories=tuple(trajectories))


def _job_of(run_dir: Path) -> JobConfig:
    mark = run_dir / "run.json"
    if not mark.is_file():
        raise NotFound(
            f"{run_dir} is not a run of Dialoop (it has no run.json).",
            reason=Reason.RUN_NOT_FOUND,
            remedy="Name a run, such as demo for runs/demo.",
        )
    try:
        return JobConfig.model_validate(json.loads(mark.read_bytes())["config"])
    except (ValueError, KeyError, TypeError) as error:
        raise PreconditionFailed(
            f"{mark} cannot be read: {error}.",
            reason=Reason.READ_FAILED,
            remedy="Restore it from a copy.",
        ) from error


def steps_of(text: str) -> tuple[int, int]:
    """Return the first and the last step that `7` or `7..9` names; InvalidInput for others."""
    first, _, last = text.partition("..")
    numbers = [first, last or first]
    if not all(number.isascii() and number.isdecimal() for number in numbers) or not (
        1 <= int(numbers[0]) <= int(numbers[1])
    ):
        raise InvalidInput(
            f"{text} names no train steps.",
            reason=Reason.OUT_OF_RANGE,
            remedy="Write one as 7, or several as 7..9. The first step is 1.",
        )
    return int(numbers[0]), int(numbers[1])


def replay_step(arguments: argparse.Namespace) -> int:
    """Do what `dialoop replay-step` says; return 0 if all steps are equal, 1 if one differs."""
    differs = False
    first, last = steps_of(arguments.steps)
    repeater = StepRepeater(find_run(arguments.run, arguments.root))
    with _progress() as progress:
        bar = progress.add_task("train steps", total=last - first + 1)
        for result in repeater.replay(first, last):
            say(json.dumps(result.as_json()) if arguments.json else _line(result))
            progress.advance(bar)
            differs = differs or result.difference is not None
    return int(differs)


def _progress() -> Progress:
    """Return a bar with the time left on the standard error, where that is a terminal."""
    console = Console(stderr=True)
    # Redirected, lines would go to the bar's stream: right only where both are the terminal.
    to_terminal = sys.stdout.isatty()
    return Progress(
        console=console,
        disable=not console.is_terminal,
        redirect_stdout=to_terminal,
        transient=True,
    )


def _line(result: StepReplay) -> str:
    how = "bit for bit" if result.is_exact else "within the tolerance"
    verdict = (
        f"step {result.train_step}: equal {how}, {result.num_values} values in "
        f"{len(result.stages)} stages"
        if result.difference is None
        else f"step {result.train_step} differs: {result.difference}"
    )
    return "\n".join([verdict, *(f"  note: {note}" for note in result.notes)])
