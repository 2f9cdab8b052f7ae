"""A scorer's worker beside a queue, and groups that are put into the queue as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from dialoop.clients.replay import Appended
from dialoop.trajectory import Group, Stage
from dialoop_services.scorer.scoring import Scoring
from dialoop_services.scorer.servicer import Scorer
from dialoop_services.scorer.settings import ScorerSettings
from dialoop_services.scorer.worker import ScorerWorker

from tests.support.collector_world import RUN, World
from tests.support.waiting import PATIENCE_S


def with_names(group: Group) -> Group:
    """The group with trajectories that are named after its task."""
    task_id = group.task.task_id
    members = (
        replace(t, trajectory_id=f"{task_id}.{n}", group_id=group.group_id)
        for n, t in enumerate(group.trajectories)
    )
    return replace(group, trajectories=tuple(members))


async def append(w: World, *groups: Group) -> list[Appended]:
    """What the queue says to each of the groups."""
    await w.allow(len(groups))
    await w.replay.offer_tasks(RUN, [group.task for group in groups])
    leased = await w.replay.lease_tasks(RUN, worker="c", max_tasks=len(groups))
    leases = {lease.task.task_id: lease.lease_id for lease in leased.leases}
    return [
        await w.replay.append_group(RUN, Stage.UNSCORED, group, lease_id=leases[group.task.task_id])
        for group in groups
    ]


@asynccontextmanager
async def scoring(w: World, scorer: Scorer | None = None, **options: Any) -> AsyncIterator[None]:
    """A worker that scores the queue's groups until the context ends."""
    settings = ScorerSettings(**{"run": RUN, "worker": "s", "wait_s": 0.2} | options)
    stopping = asyncio.Event()
    worker = ScorerWorker(settings, w.replay, scorer or Scorer(Scoring()))
    running = asyncio.create_task(worker.run(stopping))
    try:
        yield
    finally:
        stopping.set()
        await asyncio.wait_for(running, PATIENCE_S)
