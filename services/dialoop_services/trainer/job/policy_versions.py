"""The version under which the weights are published."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from dialoop.errors import DeadlineExceeded
from dialoop.reasons import Reason
from dialoop.waits import waiting_for

from dialoop_services.trainer.recovery.checkpoint import lineage_after_restore, published_policy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dialoop.sequences import PolicyVersion

    from dialoop_services.trainer.data.batches import Batch
    from dialoop_services.trainer.job.checkpointer import Checkpointer
    from dialoop_services.trainer.job.parts import JobParts
    from dialoop_services.trainer.publish.publisher import CapturedPolicy, Published
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

PUBLISH_WAITS = "PUBLISH_WAITS"
"""The alarm that a publish waits for replicas; it ends with the publish."""
REPLICA_BEHIND = "REPLICA_BEHIND"
"""The alarm that a replica missed a publish; it ends with the first publish after it caught up."""

_LATE_S = 20.0
_FIRST_IS_SLOWER = 10.0  # a replica that starts with the job may load and compile for minutes


class VersionedPublisher:
    """Publishes the learner's weights under a new version each time.

    A publish of a train step runs beside the next one where data may be a version older. At most
    one does: whatever else reads or writes the job's state first calls `wait_for_publish`.
    """

    def __init__(
        self, settings: TrainerSettings, parts: JobParts, checkpointer: Checkpointer
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._checkpointer = checkpointer
        self._state = checkpointer.state
        self._runs_behind = (
            settings.mode == "rl"
            and settings.first_depth > 0
            and not parts.placement.is_shared  # the engines have no device before it is given up
        )
        self._pending: asyncio.Task[None] | None = None
        self._has_published = False
        checkpointer.before_saving = self.wait_for_publish

    def resume(self, announced: PolicyVersion | None) -> None:
        """Continue under a version that was never published with other weights.

        `announced` is the newest version that the queue knows.
        """
        state, live = self._state, published_policy(self._settings.run_dir)
        state.policy_version = lineage_after_restore(
            state.policy_version, None if live is None else live.version, announced
        )
        self._parts.records.rewind(
            num_train_steps=state.num_train_steps,
            num_warm_start_steps=state.num_warm_start_steps,
            evaluations=state.evaluations,
        )
        log.info(
            "Resuming.",
            extra={"train_step": state.num_train_steps, "policy": str(state.policy_version)},
        )

    async def publish_first(self) -> None:
        """Save the run's first policy in a checkpoint, then publish it."""
        self._claim_next()
        self._state.num_policy_versions = 1
        await self._checkpointer.checkpoint()
        await self.publish_again()

    async def publish_again(self) -> None:
        """Publish the weights under the version that they have."""
        self._record(await self._publish(tuple(self._state.consumed_lease_ids)))

    async def publish_next(
        self, batch: Batch | None = None, *, is_requested: bool = False
    ) -> Published:
        """Publish the current weights, of a batch just trained, as a new version.

        The job waits for a replica as long as it takes, with an alarm. A publish that a caller
        requested raises DeadlineExceeded (PUBLISH_TIMED_OUT) after `publish_deadline_s`.
        """
        await self.wait_for_publish()
        trained = self._begin(batch)
        published = await self._publish(trained, is_requested=is_requested)
        self._state.num_policy_versions += 1
        self._record(published)
        return published

    async def publish_trained(
        self, batch: Batch, then: Callable[[Published, int, PolicyVersion], Awaitable[None]]
    ) -> None:
        """Publish the weights of a batch just trained, then call `then`.

        `then` also gets the batch's train step and version. Where data may be a version older, the
        weights are captured here, and the rest runs beside the next train step.
        """
        state = self._state
        if not self._runs_behind:
            published = await self.publish_next(batch)
            await then(published, state.num_train_steps, state.policy_version)
            return
        await self.wait_for_publish()
        trained, version, step = self._begin(batch), state.policy_version, state.num_train_steps
        captured = await self._parts.publisher.capture(version)
        # Counted now, so that the next step's groups are numbered as when it is repeated.
        state.num_policy_versions += 1

        async def publish() -> None:
            published = await self._publish(trained, captured=captured)
            self._record(published, step)
            await then(published, step, version)

        self._pending = asyncio.create_task(publish())

    async def wait_for_publish(self) -> None:
        """Wait for the publish that runs beside a train step; raise its error, also when repeated.

        A publish that failed stays here, so that the job learns of it whoever asked first.
        """
        pending = self._pending
        if pending is None or asyncio.current_task() is pending:
            return
        await asyncio.shield(pending)
        if self._pending is pending:
            self._pending = None

    async def close(self) -> None:
        """Cancel a publish that still runs, since its job has failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.cancel()
        await asyncio.wait({pending})
        if not pending.cancelled() and (error := pending.exception()) is not None:
            log.error("The last publish failed.", exc_info=error)

    def _begin(self, batch: Batch | None) -> tuple[str, ...]:
        """Claim the next version and write the journal; return the leases that were trained.

        Claimed before the publish: after a failure the number must not return with other weights.
        """
        self._claim_next()
        trained = () if batch is None else batch.trained_lease_ids
        self._checkpointer.mark_trained(trained)
        self._checkpointer.record(batch)
        return trained

    def _claim_next(self) -> None:
        version = self._state.policy_version
        self._state.policy_version = replace(version, number=version.number + 1)

    async def _publish(
        self,
        trained: tuple[str, ...],
        *,
        is_requested: bool = False,
        captured: CapturedPolicy | None = None,
    ) -> Published:
        version, board = self._state.policy_version, self._parts.board
        late_s = min(_LATE_S, self._settings.publish_deadline_s / 4)
        late_s *= 1.0 if self._has_published else _FIRST_IS_SLOWER
        late = asyncio.get_running_loop().call_later(late_s, self._raise_late, version)
        try:
            await self._checkpointer.restore_cursor()
            with waiting_for("inference", "a publish"):
                while True:
                    try:
                        published = await self._parts.publisher.publish(
                            version, trained_lease_ids=trained, captured=captured
                        )
                        self._has_published = True
                        return published
                    except DeadlineExceeded as error:
                        is_late = error.reason == Reason.PUBLISH_TIMED_OUT
                        if not is_late or is_requested or board.is_stopping:
                            raise
                        level = logging.ERROR if self._has_published else logging.INFO
                        log.log(level, "A publish is late: %s", error)
        finally:
            late.cancel()
            board.raise_alarm(PUBLISH_WAITS, on=False)

    def _raise_late(self, version: PolicyVersion) -> None:
        self._parts.board.raise_alarm(PUBLISH_WAITS, on=True)
        log.error("A publish waits for replicas.", extra={"policy_version": str(version)})

    def _record(self, published: Published, train_step: int | None = None) -> None:
        """Announce and record a publish, of the newest train step or an earlier one."""
        state = self._state
        state.max_logprob_difference = max(
            state.max_logprob_difference, published.max_logprob_difference
        )
        self._parts.board.announce(published)
        self._parts.board.raise_alarm(REPLICA_BEHIND, on=published.num_behind > 0)
        self._parts.records.metric(
            "publish",
            train_step=state.num_train_steps if train_step is None else train_step,
            policy_version=published.policy_version,
            publish_s=published.publish_s,
            max_logprob_difference=published.max_logprob_difference,
            num_replicas=published.num_replicas,
            num_bytes=published.weights.num_bytes,
            delta_bytes=published.delta_bytes,
        )
