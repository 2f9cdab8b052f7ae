"""Keeping tasks on offer: pages of task keys from the environment into replay's ledger."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dialoop.errors import Busy, DialoopError
from dialoop.trajectory import Purpose, Task

from services.runtime.patience import Patience, patiently

if TYPE_CHECKING:
    from dialoop.clients.environment import EnvironmentClient, TaskPage
    from dialoop.clients.replay import ReplayClient

    from services.collector.settings import CollectorSettings

log = logging.getLogger(__name__)


class Offers:
    """Offers the next page of training tasks whenever less than a page is waiting.

    The ledger owns the data position: a page is offered together with a compare-and-set of the
    cursor, so any number of collectors read the source once and a restart repeats nothing.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        replay: ReplayClient,
        environment: EnvironmentClient,
        patience: Patience,
    ) -> None:
        self._settings = settings
        self._replay = replay
        self._environment = environment
        self._patience = patience
        self._wanted = asyncio.Event()
        self._wanted.set()

    def look(self) -> None:
        """Say that tasks were taken: `run` looks whether a page is due."""
        self._wanted.set()

    async def run(self) -> None:
        """Top up until cancelled; an environment that is away is asked again later."""
        attempt = 0
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await patiently(self.top_up, self._patience)
                attempt = 0
            except DialoopError as error:
                attempt += 1
                log.warning("No tasks to offer.", extra={"reason": error.reason})
                await asyncio.sleep(self._patience.pause_s(attempt))
                self._wanted.set()

    async def top_up(self) -> None:
        """Offer pages until one is waiting; another collector's page is as good as ours."""
        while True:
            stats = await self._replay.get_stats(self._settings.run)
            if stats.training.num_tasks_offered >= self._settings.page_size:
                return
            page = await self._page(stats.cursor)
            if not page.tasks:
                return
            try:
                await self._replay.offer_tasks(
                    self._settings.run,
                    [self._task(ref.key, ref.epoch, ref.seed) for ref in page.tasks],
                    expected_cursor=stats.cursor,
                    next_cursor=page.next_page_token,
                )
            except Busy as error:
                log.debug("Somebody else offered that page.", extra={"reason": error.reason})

    async def _page(self, cursor: str) -> TaskPage:
        settings = self._settings
        return await self._environment.list_tasks(
            settings.environment,
            split=settings.train_split,
            page_size=settings.page_size,
            page_token=cursor,
            shuffle_seed=settings.shuffle_seed,
        )

    def _task(self, key: str, epoch: int, seed: int) -> Task:
        environment, split = self._settings.environment, self._settings.train_split
        return Task(
            task_id=f"{environment}/{split}/{epoch}/{key}",
            environment=environment,
            split=split,
            key=key,
            epoch=epoch,
            seed=seed,
            purpose=Purpose.TRAINING,
            num_trajectories=self._settings.group_size,
        )
