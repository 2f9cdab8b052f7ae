"""The version under which the weights are published."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from dialoop.errors import DeadlineExceeded
from dialoop.reasons import Reason

from dialoop_services.trainer.recovery.checkpoint import lineage_after_restore, published_policy

if TYPE_CHECKING:
    from dialoop.sequences import PolicyVersion

    from dialoop_services.trainer.data.batches import Batch
    from dialoop_services.trainer.job.checkpointer import Checkpointer
    from dialoop_services.trainer.job.parts import JobParts
    from dialoop_services.trainer.publish.publisher import Published
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

PUBLISH_WAITS = "PUBLISH_WAITS"
"""The alarm that a publish waits for replicas; it ends with the publish."""

_LATE_S = 20.0


class VersionedPublisher:
    """Publishes the learner's weights under a new version each time, between train steps."""

    def __init__(
        self, settings: TrainerSettings, parts: JobParts, checkpointer: Checkpointer
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._checkpointer = checkpointer
        self._state = checkpointer.state

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
        # Claimed before the publish: after a failure the number must not return with other weights.
        self._claim_next()
        trained = () if batch is None else batch.trained_lease_ids
        self._checkpointer.mark_trained(trained)
        self._checkpointer.record(batch)
        published = await self._publish(trained, is_requested=is_requested)
        self._state.num_policy_versions += 1
        self._record(published)
        return published

    def _claim_next(self) -> None:
        version = self._state.policy_version
        self._state.policy_version = replace(version, number=version.number + 1)

    async def _publish(self, trained: tuple[str, ...], *, is_requested: bool = False) -> Published:
        version, board = self._state.policy_version, self._parts.board
        late = asyncio.get_running_loop().call_later(
            min(_LATE_S, self._settings.publish_deadline_s / 4), self._raise_late, version
        )
        try:
            await self._checkpointer.restore_cursor()
            while True:
                try:
                    return await self._parts.publisher.publish(version, trained_lease_ids=trained)
                except DeadlineExceeded as error:
                    is_late = error.reason == Reason.PUBLISH_TIMED_OUT
                    if not is_late or is_requested or board.is_stopping:
                        raise
                    log.error("A publish is late: %s", error)
        finally:
            late.cancel()
            board.raise_alarm(PUBLISH_WAITS, on=False)

    def _raise_late(self, version: PolicyVersion) -> None:
        self._parts.board.raise_alarm(PUBLISH_WAITS, on=True)
        log.error("A publish waits for replicas.", extra={"policy_version": str(version)})

    def _record(self, published: Published) -> None:
        state = self._state
        state.max_logprob_difference = max(
            state.max_logprob_difference, published.max_logprob_difference
        )
        self._parts.board.announce(published)
        self._parts.records.metric(
            "publish",
            train_step=state.num_train_steps,
            policy_version=published.policy_version,
            publish_s=published.publish_s,
            max_logprob_difference=published.max_logprob_difference,
            num_replicas=published.num_replicas,
            num_bytes=published.weights.num_bytes,
        )
