"""Play the tasks of an evaluation: some at a time, each as often as the plan says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dialoop.environments.tasks.source import first_refs
from dialoop.errors import NotFound
from dialoop.reasons import Reason
from dialoop.rollout import play
from dialoop.trajectory import Purpose, Task, Trajectory
from dialoop.user_functions import resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from dialoop.collection import TaskSessions
    from dialoop.episode import Policy

    from dialoop_ops.evaluation.records import EvaluationRecords, EvaluationSpec


async def evaluate(
    spec: EvaluationSpec,
    *,
    sessions: TaskSessions,
    policy: Policy,
    records: EvaluationRecords,
    concurrency: int = 32,
    on_progress: Callable[[int, int], Any] | None = None,
) -> None:
    """Play what `records` does not have yet, and write each trajectory to it when it ends.

    An episode that something else than the policy made fail is written with its failure and not
    scored; evaluating again plays it again. `on_progress`, sync or async, gets the number of
    episodes that have ended and of all. Raises NotFound (NO_TASKS) for an empty split.
    """
    tasks = await _tasks(spec, sessions)
    todo = [
        (task, sample)
        for task in tasks
        for sample in range(spec.num_samples)
        if (task.key, sample) not in records.done
    ]
    total = len(tasks) * spec.num_samples
    free = asyncio.Semaphore(concurrency)
    num_ended = total - len(todo)

    async def play_one(task: Task, sample: int) -> None:
        nonlocal num_ended
        async with free:
            trajectory = await play(
                task,
                sessions=sessions,
                policy=policy,
                group_id=f"{task.task_id}#{sample}",
                max_turns=spec.max_turns,
            )
        records.add(_without_empty_sequences(trajectory), sample)
        num_ended += 1
        await report()

    async def report() -> None:
        if on_progress is not None:
            await resolve(on_progress(num_ended, total))

    await report()
    async with asyncio.TaskGroup() as players:
        for task, sample in todo:
            players.create_task(play_one(task, sample))


async def _tasks(spec: EvaluationSpec, sessions: TaskSessions) -> list[Task]:
    info = await sessions.get_environment(spec.environment)
    sampling = replace(spec.sampling, stop=info.stop)
    listing = partial(sessions.list_tasks, spec.environment, split=spec.split, one_epoch=True)
    tasks = [
        Task(
            task_id=f"evaluation/{ref.key}",
            environment=spec.environment,
            split=spec.split,
            key=ref.key,
            seed=ref.seed,
            purpose=Purpose.EVALUATION,
            sampling=sampling,
        )
        for ref in await first_refs(listing, spec.num_tasks or None)
    ]
    if not tasks:
        raise NotFound(
            f"Split {spec.split} of {spec.environment} is empty.",
            reason=Reason.NO_TASKS,
            remedy=f"Its splits: {', '.join(split.name for split in info.splits)}.",
        )
    return tasks


def _without_empty_sequences(trajectory: Trajectory) -> Trajectory:
    """Return it without the sequences of an endpoint, which have no tokens."""
    kept = tuple(sequence for sequence in trajectory.sequences if len(sequence))
    return replace(trajectory, sequences=kept)
