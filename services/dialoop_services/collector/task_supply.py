"""The supply of tasks: pages of task keys from the environment into replay's ledger."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING

from dialoop.clients.retry import RetryPolicy, retry
from dialoop.errors import Busy, DialoopError
from dialoop.trajectory import Purpose, Task

from dialoop_services.collector.mixture import Cursor, Ingredient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dialoop.clients.environment import EnvironmentClient, TaskPage, TaskRef
    from dialoop.clients.replay import ReplayClient

    from dialoop_services.collector.settings import CollectorSettings

log = logging.getLogger(__name__)


class TaskSupply:
    """Offers the next page of training tasks whenever less than a page is waiting.

    The ledger owns the data position: a page is offered together with a compare-and-set of the
    cursor, so any number of collectors read the source once and a restart repeats nothing.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        replay: ReplayClient,
        environment: EnvironmentClient,
        retry_policy: RetryPolicy,
    ) -> None:
        self._settings = settings
        self._replay = replay
        self._environment = environment
        self._retry_policy = retry_policy
        self._mixture = settings.mixture
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
                await retry(self.top_up, self._retry_policy)
                attempt = 0
            except DialoopError as error:
                attempt += 1
                log.warning("No tasks to offer.", extra={"reason": error.reason})
                await asyncio.sleep(self._retry_policy.wait_s(attempt))
                self._wanted.set()

    async def top_up(self) -> None:
        """Offer pages until one is waiting; another collector's page is as good as ours."""
        while True:
            stats = await self._replay.get_stats(self._settings.run)
            if stats.training.num_tasks_offered >= self._settings.page_size:
                return
            tasks, following = await self._page(stats.cursor)
            if not tasks:
                return
            try:
                await self._replay.offer_tasks(
                    self._settings.run,
                    tasks,
                    expected_cursor=stats.cursor,
                    next_cursor=following,
                )
            except Busy as error:
                log.debug("Somebody else offered that page.", extra={"reason": error.reason})

    async def _page(self, cursor: str) -> tuple[list[Task], str]:
        """The next tasks, and the cursor after them."""
        ingredients, size = self._mixture.ingredients, self._settings.page_size
        stands = Cursor.read(cursor, ingredients[0])
        if len(ingredients) == 1:
            token = stands.tokens.get(ingredients[0].name, "")
            page = await self._listed(ingredients[0], token, size)
            return [self._task(ingredients[0], ref) for ref in page.tasks], page.next_page_token
        draws = self._mixture.draws(stands.position, size)
        refs: dict[int, Iterator[TaskRef]] = {}
        tokens = dict(stands.tokens)
        for number, count in Counter(draws).items():
            ingredient = ingredients[number]
            page = await self._listed(ingredient, tokens.get(ingredient.name, ""), count)
            refs[number], tokens[ingredient.name] = iter(page.tasks), page.next_page_token
        drawn = [(ingredients[number], next(refs[number], None)) for number in draws]
        tasks = [self._task(ingredient, ref) for ingredient, ref in drawn if ref is not None]
        return tasks, str(Cursor(position=stands.position + size, tokens=tokens))

    async def _listed(self, ingredient: Ingredient, token: str, size: int) -> TaskPage:
        return await self._environment.list_tasks(
            ingredient.environment,
            split=ingredient.split,
            page_size=size,
            page_token=token,
            shuffle_seed=self._settings.shuffle_seed,
        )

    def _task(self, ingredient: Ingredient, ref: TaskRef) -> Task:
        return Task(
            task_id=f"{ingredient.name}/{ref.epoch}/{ref.key}",
            environment=ingredient.environment,
            split=ingredient.split,
            key=ref.key,
            epoch=ref.epoch,
            seed=ref.seed,
            purpose=Purpose.TRAINING,
            num_trajectories=self._settings.group_size,
        )
