"""Offer tasks: pages of task keys go from the environment to replay's ledger."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from dialoop.clients.retry import RetryPolicy, retry
from dialoop.errors import Busy, DialoopError

from dialoop_services.collector.mixture import Cursor, TaskStream
from dialoop_services.config.tables import turns_spent
from dialoop_services.runtime.exit_reason import is_mistake

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dialoop.clients.environment import EnvironmentClient, TaskPage, TaskRef
    from dialoop.clients.replay import ReplayClient
    from dialoop.trajectory import Task

    from dialoop_services.collector.settings import CollectorSettings

log = logging.getLogger(__name__)

_NO_POLICY_S = 0.5


class TaskSupply:
    """Offers the next page of training tasks whenever less than a page is waiting.

    The ledger owns the position in the data. A page is offered together with a compare-and-set of
    the cursor, so that many collectors read the source once and a restart repeats nothing.
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
        self._is_check_due = asyncio.Event()
        self._is_check_due.set()

    def check_soon(self) -> None:
        """Make `run` check whether a page is due, because tasks were leased."""
        self._is_check_due.set()

    async def run(self) -> None:
        """Top up until cancelled; retry later while the environment is away.

        Raises NotFound for an environment or split that does not exist, which no wait mends.
        """
        attempt = 0
        while True:
            await self._is_check_due.wait()
            self._is_check_due.clear()
            try:
                has_policy = await retry(self.top_up, self._retry_policy)
                attempt = 0
                if not has_policy:
                    await asyncio.sleep(_NO_POLICY_S)
                    self._is_check_due.set()
            except DialoopError as error:
                if is_mistake(error):
                    raise
                attempt += 1
                log.warning("No tasks to offer.", extra={"reason": error.reason})
                await asyncio.sleep(self._retry_policy.wait_s(attempt))
                self._is_check_due.set()

    async def top_up(self) -> bool:
        """Offer pages until a page of tasks is waiting, from whichever collector.

        None is offered any more once a collector has played `total_turns`.

        Return False, and offer nothing, while the queue knows no policy: the trainer gives a queue
        that has lost its state the position in the data before it announces a policy.
        """
        while True:
            stats = await self._replay.get_stats(self._settings.run)
            if stats.policy_version is None:
                return False
            if turns_spent(self._settings.total_turns) in stats.training.num_groups_dropped:
                return True
            if stats.training.num_tasks_offered >= self._settings.page_size:
                return True
            tasks, next_cursor = await self._page(stats.cursor)
            if not tasks:
                return True
            try:
                await self._replay.offer_tasks(
                    self._settings.run,
                    tasks,
                    expected_cursor=stats.cursor,
                    next_cursor=next_cursor,
                )
            except Busy as error:
                log.debug("Another collector offered the page.", extra={"reason": error.reason})

    async def _page(self, cursor: str) -> tuple[list[Task], str]:
        """Return the next tasks, and the cursor after them."""
        streams, size = self._mixture.streams, self._settings.page_size
        start = Cursor.read(cursor, streams[0])
        if len(streams) == 1:
            token = start.tokens.get(streams[0].name, "")
            page = await self._list_tasks(streams[0], token, size)
            return [self._task(streams[0], ref) for ref in page.tasks], page.next_page_token
        draws = self._mixture.draws(start.position, size)
        refs: dict[int, Iterator[TaskRef]] = {}
        tokens = dict(start.tokens)
        for number, count in Counter(draws).items():
            stream = streams[number]
            page = await self._list_tasks(stream, tokens.get(stream.name, ""), count)
            refs[number], tokens[stream.name] = iter(page.tasks), page.next_page_token
        pairs = [(streams[number], next(refs[number], None)) for number in draws]
        tasks = [self._task(stream, ref) for stream, ref in pairs if ref is not None]
        return tasks, str(Cursor(position=start.position + size, tokens=tokens))

    async def _list_tasks(self, stream: TaskStream, token: str, size: int) -> TaskPage:
        return await self._environment.list_tasks(
            stream.environment,
            split=stream.split,
            page_size=size,
            page_token=token,
            shuffle_seed=self._settings.shuffle_seed,
        )

    def _task(self, stream: TaskStream, ref: TaskRef) -> Task:
        size = self._settings.group_size
        task = ref.task(stream.environment, stream.split, num_trajectories=size)
        return replace(task, min_trajectories=min(self._settings.min_group_size, size))
