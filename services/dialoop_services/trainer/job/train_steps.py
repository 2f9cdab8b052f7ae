"""RL's train steps: lease groups until a batch has a signal, train on it, publish.

A group that cannot be trained is dropped as soon as it is leased. That gives its credit back, and
another group is played in its place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dialoop.clients.replay import (
    GroupLease,
    LedgerCounts,
    ReturnItem,
    Selection,
)
from dialoop.errors import InvalidConfig, PreconditionFailed
from dialoop.reasons import DropReason, Reason
from dialoop.trajectory import Group, Stage
from dialoop.waits import OpenWait, waiting_for
from dialoop_learning.loss.facts import facts_of
from dialoop_learning.rl.buckets import first_above, length_bin

from dialoop_services.config.tables import turns_spent
from dialoop_services.trainer.data.batches import (
    Batch,
    keep_for_step,
    metrics_of_candidates,
    read_rows,
    sort_batch,
)
from dialoop_services.trainer.data.debug_table import write_debug_table
from dialoop_services.trainer.data.queue_client import WORKER
from dialoop_services.trainer.job.pace import Pace
from dialoop_services.trainer.learner.learner import StepObserver, TrainStepReport
from dialoop_services.trainer.step_replay.keeping import keep_step
from dialoop_services.trainer.step_replay.trace import StepTrace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from dialoop.sequences import PolicyVersion
    from dialoop.sequences import Sequence as TokenSequence
    from dialoop_learning.packing.rows import TokenRow

    from dialoop_services.trainer.data.batches import Untrainable
    from dialoop_services.trainer.job.checkpointer import Checkpointer
    from dialoop_services.trainer.job.parts import JobParts
    from dialoop_services.trainer.job.policy_versions import VersionedPublisher
    from dialoop_services.trainer.publish.publisher import Published
    from dialoop_services.trainer.recovery.checkpoint import JournalEntry
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

FRESH_MISMATCH = "FRESH_MISMATCH"
"""The alarm that engine and trainer disagree on log-probs of the current policy's own data."""

GROUPS_SET_ASIDE = "GROUPS_SET_ASIDE"
"""The alarm that groups cannot be trained; it ends when a batch is trained again."""

NO_SIGNAL = "NO_SIGNAL"
"""The alarm that many groups in a row taught nothing; it ends with the next train step."""

QUEUE_FULL = "QUEUE_FULL"
"""The alarm that the queue has no memory left, and no trained group to free some; it ends when a
group comes."""

_LEASE_WAIT_S = 5.0
_NOT_LOST = (DropReason.STALE, DropReason.ABANDONED, DropReason.DROPPED_OLDEST, DropReason.NO_ROOM)
"""Why groups are dropped that say nothing of whether others can be trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedBatch:
    """Leased groups, and the rows of those to train, read under the policy version `version`."""

    leases: tuple[GroupLease, ...]
    trained_lease_ids: tuple[str, ...]
    version: PolicyVersion
    rows: list[TokenRow]

    def rows_of(self, batch: Batch, version: PolicyVersion) -> list[TokenRow] | None:
        """Return the rows if they are still the batch's; None after a publish, which ages them."""
        is_same = self.trained_lease_ids == batch.trained_lease_ids and self.version == version
        return self.rows if is_same else None


class TrainSteps:
    """The RL train steps. Each ends with a publish, which may run beside the next."""

    def __init__(
        self,
        settings: TrainerSettings,
        parts: JobParts,
        checkpointer: Checkpointer,
        versions: VersionedPublisher,
    ) -> None:
        self._settings = settings
        self._learner = parts.learner
        self._replay = parts.replay
        self._publisher = parts.publisher
        self._records = parts.records
        self._board = parts.board
        self._checkpointer = checkpointer
        self._held = checkpointer.held
        self._state = checkpointer.state
        self._versions = versions
        self._pace = Pace(settings, parts.board.state)
        # Groups refused since the last batch with a group that can be trained.
        self._num_refused = 0
        # Groups leased for the next train step.
        self._kept: list[GroupLease] = []
        # Seconds waited for it so far, also for groups that turned out to be stale, and spent on
        # reading them.
        self._lease_s = self._rows_s = 0.0
        # Why the last wait for a batch ended: trained groups fill the queue.
        self._is_queue_full = False
        # Groups in a row of which none can be trained, less than a batch of them; and the whole
        # batches of such groups in a row.
        self._num_without_signal = 0
        self._num_empty = 0
        # Why those groups were dropped; and all groups that were lost before the newest step.
        self._reasons: Counter[str] = Counter()
        self._lost_before: Counter[str] | None = None
        self._needs_feedback = facts_of(settings.loss).needs_feedback
        # Groups without feedback, before the first train step.
        self._num_without_feedback = 0

    async def next_step(self) -> Callable[[], Awaitable[None]] | None:
        """Wait for a whole batch; return the step that trains it, or None when the job stops.

        If the queue is full meanwhile, return the step that frees memory there.
        """
        started, rows_s = time.perf_counter(), self._rows_s
        with waiting_for("replay", "groups to train") as wait:
            leased = await self._lease(wait)
        self._lease_s += time.perf_counter() - started - (self._rows_s - rows_s)
        if leased is not None:
            return partial(self._train_step, leased)
        return self._free_queue if self._is_queue_full else None

    async def _lease(self, wait: OpenWait) -> LeasedBatch | None:
        """Return a whole batch, or an incomplete one with groups that are trained already.

        Groups are leased as they come, stale ones too, because only the trainer knows which of them
        are trained. Each that cannot be trained is replaced. Return None when the job stops, or if
        no group comes because the trained ones fill the queue.
        """
        size = self._settings.groups_per_train_step
        self._is_queue_full = False
        while not (self._board.is_stopping or self._state.stopped_early):
            if len(self._kept) >= size:
                leased = await self._read()
                if leased is not None:
                    return leased
                continue
            answer = await self._replay.lease_groups(
                self._settings.run,
                Stage.SCORED,
                worker=WORKER,
                max_groups=size - len(self._kept),
                lease_s=self._settings.lease_s,
                wait_s=_LEASE_WAIT_S,
                selection=Selection[self._settings.selection.upper()],
            )
            if not answer.leases:
                # Its groups' credits return with it, and what follows announces the policy again.
                await self._versions.wait_for_publish()
                stats = await self._replay.get_stats(self._settings.run)
                if self._is_collected(stats.training):
                    turns = self._settings.total_turns
                    self._state.stopped_early = f"total_turns = {turns} turns were played"
                    continue
                if stats.is_full and self._state.consumed_lease_ids:
                    self._is_queue_full = True
                    return None
                self._alarm_of_memory(is_full=stats.is_full)
                self._require_some_played(stats.training)
                self._give_up_if_all_is_lost(stats.training)
                # A queue that lost its state leases no tasks until a policy is announced again.
                await self._checkpointer.restore_cursor()
                await self._publisher.announce(self._state.policy_version)
                continue
            self._alarm_of_memory(is_full=False)
            self._held.hold(lease.lease_id for lease in answer.leases)
            batch = self._sort(answer.leases)
            self._kept = keep_for_step(self._kept, batch)
            self._count_signal(batch)
            await self._drop_before_step(batch)
            if batch.train:
                wait.restart()
            if batch.already_consumed:
                return LeasedBatch(
                    leases=tuple(self._kept),
                    trained_lease_ids=(),
                    version=self._state.policy_version,
                    rows=[],
                )
        if self._state.stopped_early:
            await self._return_kept()
        return None

    def _alarm_of_memory(self, *, is_full: bool) -> None:
        """Raise the alarm of a full queue that training cannot empty, or end it."""
        if is_full and QUEUE_FULL not in self._board.alarms:
            log.error(
                "The queue is full, and it is not of trained groups: raise maxmemory of its Redis, "
                "or see whether the scorer and evaluations go on."
            )
        self._board.raise_alarm(QUEUE_FULL, on=is_full)

    def _require_some_played(self, counts: LedgerCounts) -> None:
        """Raise InvalidConfig if many groups failed while they were played, and no other came.

        Such a job would go on failing for ever. One that has trained a group waits instead, since
        a service may come back.
        """
        num_failed = counts.num_groups_dropped.get(DropReason.MEMBER_FAILED, 0)
        if num_failed < self._settings.max_refused_groups:
            return
        if counts.num_trajectories_live or counts.num_trajectories_consumed:
            return
        raise InvalidConfig(
            f"All of the first {num_failed} groups failed while they were played"
            f"{_last_failure(self._settings.run_dir)}.",
            reason=Reason.EVERY_GROUP_FAILED,
            remedy="The collector's log names each failure, and its status counts them by owner.",
        )

    async def _free_queue(self) -> None:
        """Save a checkpoint before it is due, which acknowledges the trained groups.

        That frees their memory. No other group can come before, since a full queue takes none.
        """
        log.warning(
            "The queue is full of groups that are trained: saving a checkpoint before it is due.",
            extra={"num_groups": len(self._state.consumed_lease_ids)},
        )
        await self._checkpointer.checkpoint()

    def _is_collected(self, counts: LedgerCounts) -> bool:
        """Return whether collectors have played `total_turns`, and no other group will come."""
        total_turns = self._settings.total_turns
        if total_turns < 0:
            return False
        is_on_its_way = (
            counts.num_tasks_offered
            + counts.num_groups_leased
            + counts.num_groups_unscored
            + counts.num_groups_scored
        )
        return turns_spent(total_turns) in counts.num_groups_dropped and not is_on_its_way

    async def _return_kept(self) -> None:
        """Give the groups of an incomplete batch back, since training is over."""
        ids = [lease.lease_id for lease in self._kept]
        items = [ReturnItem(lease_id=i, reason=DropReason.TRAINER_STOPPED) for i in ids]
        if items:
            await self._replay.give_back(self._settings.run, items)
        self._held.release(ids)
        self._kept = []

    async def _drop_before_step(self, batch: Batch) -> None:
        """Drop groups that cannot be trained; the metrics of the next train step count them."""
        if batch.dropped:
            in_a_row = (self._num_without_signal, self._num_empty)
            self._checkpointer.record_dropped(batch, in_a_row)
            await self.drop(batch)
            self._require_some_feedback(batch)

    def _require_some_feedback(self, batch: Batch) -> None:
        """Raise InvalidConfig if no reward of the first groups says what an answer failed."""
        self._num_without_feedback += len(batch.dropped.get(DropReason.NO_FEEDBACK, ()))
        if self._kept or self._state.num_train_steps:
            return
        if self._num_without_feedback >= self._settings.max_refused_groups:
            raise InvalidConfig(
                f"Loss {self._settings.loss} learns from what answers failed, and no reward of the "
                f"first {self._num_without_feedback} groups says that in words.",
                reason=Reason.NO_FEEDBACK,
                remedy="Give feedback in the environment's rewards, as Reward(..., feedback="
                '"Use no commas."), or take another loss. Answers that fail nothing have none.',
            )

    def count_dropped(self, entry: JournalEntry) -> None:
        """Count groups that a killed trainer dropped before the train step that comes next."""
        if DropReason.REFUSED in entry.dropped:
            self._state.dropped_candidates = []
        self._state.dropped_candidates += entry.figures
        self._state.num_empty_batches = entry.num_empty_batches
        self._num_without_signal, self._num_empty = entry.num_in_a_row

    def _count_signal(self, batch: Batch) -> None:
        """Count candidates in a row that cannot be trained; a batch's number of them is empty."""
        if batch.train:
            self._num_without_signal = self._num_empty = 0
            self._reasons.clear()
            return
        dropped = {why: len(x) for why, x in batch.dropped.items() if why != DropReason.STALE}
        self._num_without_signal += sum(dropped.values())
        num_empty, self._num_without_signal = divmod(
            self._num_without_signal, self._settings.groups_per_train_step
        )
        self._count_empty(num_empty, dropped)

    def _count_empty(self, num_batches: int, dropped: Mapping[str, int]) -> None:
        """Count empty batches; after many, raise the alarm or end the training."""
        settings, state = self._settings.candidates, self._state
        self._reasons.update(dropped)
        state.num_empty_batches += num_batches
        self._num_empty += num_batches
        if num_batches and self._num_empty >= settings.max_empty_batches:
            self._board.raise_alarm(NO_SIGNAL, on=True)
            log.warning(
                "No group of the last batches can be trained.",
                extra={"num_batches": self._num_empty, "step": state.num_train_steps},
            )
        if 0 < settings.stop_after_empty <= self._num_empty:
            self._give_up(f"{self._num_empty} empty batches in a row", self._reasons)

    def _give_up(self, why: str, reasons: Mapping[str, int]) -> None:
        """End the training, since nothing of what is played can be trained."""
        counts = ", ".join(f"{number} {reason}" for reason, number in reasons.items() if number)
        self._state.stopped_early = f"{why} (groups: {counts})" if counts else why
        self._state.gave_up = True
        log.error("Training ends: %s.", self._state.stopped_early)

    def _give_up_if_all_is_lost(self, counts: LedgerCounts) -> None:
        """End the training where groups are lost on their way here, as many as empty batches do.

        They are dropped by the scorer, fail while they are played, or are set aside.
        """
        dropped = counts.num_groups_dropped.items()
        lost = Counter({reason: count for reason, count in dropped if reason not in _NOT_LOST})
        if self._lost_before is None:
            self._lost_before = lost
        lost = lost - self._lost_before
        most = self._settings.candidates.stop_after_empty * self._settings.groups_per_train_step
        if 0 < most <= lost.total() and not self._kept:
            self._give_up(f"none of {lost.total()} groups in a row could be trained", lost)

    async def _read(self) -> LeasedBatch | None:
        """Return the batch with its rows; None if some of its groups cannot be trained.

        The queue then sets those groups aside as dead letters, and others take their places.
        Raises the first error after `max_refused_groups` bad groups in a row.
        """
        leases = tuple(self._kept)
        version, batch = self._state.policy_version, self._sort(leases)
        to_rows = partial(self._learner.rows_to_train, current=version)
        started = time.perf_counter()
        rows, untrainable = await asyncio.to_thread(read_rows, batch, to_rows)
        self._rows_s += time.perf_counter() - started
        if not untrainable:
            return LeasedBatch(
                leases=leases,
                trained_lease_ids=batch.trained_lease_ids,
                version=version,
                rows=rows,
            )
        ids = {group.lease.lease_id for group in untrainable}
        items = [
            ReturnItem(lease_id=group.lease.lease_id, reason=group.reason, set_aside=True)
            for group in untrainable
        ]
        await self._replay.give_back(self._settings.run, items)
        self._held.release(ids)
        self._kept = [lease for lease in leases if lease.lease_id not in ids]
        for group in untrainable:
            self._report(group)
        self._board.raise_alarm(GROUPS_SET_ASIDE, on=True)
        self._require_some_trainable(untrainable)
        return None

    def _require_some_trainable(self, untrainable: Sequence[Untrainable]) -> None:
        self._num_refused += len(untrainable)  # an update resets it
        if self._num_refused >= self._settings.max_refused_groups:
            log.error(
                "None of the last groups can be trained.",
                extra={"num_groups": self._num_refused, "reason": untrainable[0].reason},
            )
            error = untrainable[0].error
            # Exit as for a wrong setting: a restarted trainer would only refuse them again.
            raise InvalidConfig(error.message, reason=error.reason, remedy=error.remedy) from error

    def _report(self, group: Untrainable) -> None:
        ids = {"group_id": group.lease.group.group_id, "trajectory_id": group.trajectory_id}
        log.error("A group is set aside: %s", group.error, extra={**ids, "reason": group.reason})
        self._records.metric(
            "set_aside",
            train_step=self._state.num_train_steps,
            policy_version=self._state.policy_version,
            reason=group.reason,
            message=str(group.error),
            **ids,
        )

    def _sort(self, leases: tuple[GroupLease, ...]) -> Batch:
        return sort_batch(
            leases,
            current=self._state.policy_version,
            max_staleness=self._pace.max_staleness,
            consumed_group_ids=self._state.consumed_group_ids,
            needs_advantages=self._learner.needs_advantages,
            needs_feedback=self._needs_feedback,
            candidates=self._settings.candidates,
        )

    async def _train_step(self, leased: LeasedBatch) -> None:
        batch = self._sort(leased.leases)
        if batch.already_consumed:
            # Their gradient is in the weights, so only a checkpoint may acknowledge them.
            self._checkpointer.mark_trained(lease.lease_id for lease in batch.already_consumed)
            await self._checkpointer.checkpoint()
        if len(batch.train) < self._settings.groups_per_train_step:
            # A publish has made some stale, or some were trained already: others are leased.
            self._kept = list(batch.train)
            await self._drop_before_step(batch)
            return
        candidates = metrics_of_candidates(batch.groups, self._state.dropped_candidates)
        batch, self._kept = replace(batch, candidates=candidates), []
        rows = leased.rows_of(batch, self._state.policy_version)
        row = {"lease_s": self._lease_s, "rows_s": self._rows_s}
        self._lease_s = self._rows_s = 0.0
        row |= await self.learn(batch, rows)
        if not row["num_updates"]:
            await self._drop_refused(batch, row)
            return
        started = time.perf_counter()
        await self._versions.wait_for_publish()
        row["wait_s"] = time.perf_counter() - started
        self._pace.after_step(row)
        self._publisher.max_outstanding_groups = self._pace.max_outstanding_groups

        async def record(published: Published, step: int, version: PolicyVersion) -> None:
            row["capture_s"], row["publish_s"] = published.capture_s, published.publish_s
            row["keep_s"] = published.keep_s
            await self.record(batch, row, step, version)

        await self._versions.publish_trained(batch, record)

    async def _drop_refused(self, batch: Batch, row: dict[str, Any]) -> None:
        """Drop a batch of which every update was refused: the policy is as it was, and stays so."""
        state = self._state
        version = state.policy_version
        self._records.metric(
            "refused", train_step=state.num_train_steps, policy_version=version, **row
        )
        state.dropped_candidates = []  # that row has them
        self._count_empty(1, {DropReason.REFUSED: len(batch.train)})
        refused = Batch(train=(), already_consumed=(), dropped={DropReason.REFUSED: batch.train})
        await self._drop_before_step(refused)
        self._count_updates(row)

    def _count_updates(self, row: Mapping[str, Any]) -> None:
        num_refused = row["num_refused"]
        found = self._learner.found_in(row["loss"], row["grad_norm"]) if num_refused else ""
        self._board.count_updates(
            num_applied=row["num_updates"], num_refused=num_refused, found=found
        )

    async def learn(self, batch: Batch, rows: list[TokenRow] | None = None) -> dict[str, Any]:
        """Train a batch as the next train step and return its metrics row; publish nothing.

        `rows` are the batch's, if they have been read already. A batch whose every update is
        refused is no train step, and changes nothing.
        """
        state, version = self._state, self._state.policy_version
        started = time.perf_counter()
        if rows is None:
            rows = await asyncio.to_thread(
                self._learner.rows_to_train, batch.sequences, current=version
            )
        await self._write_debug_table(batch, rows)
        with waiting_for("learner", "a train step"):
            report = await self._train(batch, rows, version)
        if report.num_updates:
            self._count(batch, report, version)
            state.num_train_steps += 1
            self._num_refused = self._num_without_signal = self._num_empty = 0
            self._reasons.clear()
            self._lost_before = None
            self._board.raise_alarm(GROUPS_SET_ASIDE, on=False)
            self._board.raise_alarm(NO_SIGNAL, on=False)
        staleness = list(batch.staleness(version).elements())
        row = {
            **batch.candidates,
            "num_groups_trained": len(batch.train),
            **{
                "num_trained_tokens": report.num_trained_tokens,
                "num_forwarded_tokens": report.num_forwarded_tokens,
                "num_saved_tokens": report.num_saved_tokens,
                "forwarded_per_distinct": report.forwarded_per_distinct,
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "learning_rate": report.learning_rate,
                "num_updates": report.num_updates,
                "num_refused": report.num_refused,
                **report.seconds,
                **report.metrics,
            },
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
        }
        if self._needs_feedback:
            row["num_with_feedback"] = len({(r.group_index, r.trajectory_index) for r in rows})
        row |= row_of_oversize([entry.sequence for entry in batch.sequences], self._settings)
        row |= self._pace.row_of(lease.group for lease in batch.train)
        row |= self._check_mismatch(report, version)
        if report.num_updates:
            self._count_updates(row)
        return row | {"train_s": time.perf_counter() - started}

    async def _train(
        self, batch: Batch, rows: list[TokenRow], version: PolicyVersion
    ) -> TrainStepReport:
        """Take the train step; with `keep_steps`, keep what `dialoop replay-step` compares."""
        settings, learner = self._settings, self._learner
        if not settings.keep_steps:
            return await asyncio.to_thread(learner.train_step, rows)
        trace = learner.observer = StepTrace()
        try:
            report = await asyncio.to_thread(learner.train_step, rows)
        finally:
            learner.observer = StepObserver()
        if report.num_updates:  # a refused batch is no train step, and changes no weight
            step = self._state.num_train_steps + 1
            try:
                await asyncio.to_thread(keep_step, settings, step, version, batch.groups, trace)
            except PreconditionFailed as error:  # the weights have changed, so training goes on
                log.error("The train step is not kept: %s", error, extra={"train_step": step})
        return report

    async def _write_debug_table(self, batch: Batch, rows: list[TokenRow]) -> None:
        """Write what the loss is about to read, every `debug_table_every` train steps."""
        every, step = self._settings.debug_table_every, self._state.num_train_steps + 1
        if every and step % every == 0:
            logprobs = await asyncio.to_thread(self._learner.logprobs_of_rows, rows)
            # The next batch has the same step if every update is refused.
            read_by = {"train_step": step, "policy_version": str(self._state.policy_version)}
            write_debug_table(self._settings.run_dir, batch, rows, logprobs, read_by)

    def _check_mismatch(self, report: TrainStepReport, version: PolicyVersion) -> dict[str, Any]:
        """Raise or end the alarm that engine and trainer disagree on the current policy's tokens.

        Only a bug explains that: in rendering, a sampler that truncates, or different weights.
        """
        kl, bound = report.fresh_mismatch_kl, self._settings.objective.max_fresh_mismatch_kl
        if kl is None:
            return {}
        depth = first_above(report.fresh_by_depth, bound)
        is_off = depth is not None or not kl <= bound  # so that NaN raises the alarm, too
        self._board.raise_alarm(FRESH_MISMATCH, on=is_off)
        for alarm in [a for a in self._board.alarms if a.startswith(f"{FRESH_MISMATCH}_FROM_")]:
            self._board.raise_alarm(alarm, on=False)
        if depth:  # from the first bucket on, depth explains nothing
            self._board.raise_alarm(f"{FRESH_MISMATCH}_FROM_{depth}", on=True)
        if is_off:
            log.error(
                "Engine and trainer disagree on data of the current policy.",
                extra={
                    "policy_version": str(version),
                    "mismatch_kl": kl,
                    "bound": bound,
                    "from_depth": depth or 0,
                },
            )
        return {
            "fresh_mismatch_kl": kl,
            "fresh_mismatch_alarm": is_off,
            "by_depth": report.fresh_by_depth,
        }

    async def record(
        self,
        batch: Batch,
        row: dict[str, Any],
        step: int,
        version: PolicyVersion,
        *,
        is_recovered: bool = False,
    ) -> None:
        """Write a batch's trajectories and row; step and version are those after it.

        The row comes last, so a batch that has a row is recorded whole.
        """
        fate = {"train_step": step, "lineage": version.lineage}
        await self._record_groups(batch.groups, "trained", is_recovered=is_recovered, **fate)
        self._records.metric("train", train_step=step, policy_version=version, **row)

    async def drop(self, batch: Batch, *, is_recovered: bool = False) -> None:
        """Drop the groups that cannot be trained, with their reasons."""
        step = self._state.num_train_steps
        for reason, leases in batch.dropped.items():
            lease_ids = [lease.lease_id for lease in leases]
            await self._replay.drop(self._settings.run, lease_ids, reason)
            self._held.release(lease_ids)
            groups = [lease.group for lease in leases]
            await self._record_groups(groups, reason, is_recovered=is_recovered, train_step=step)

    def _count(self, batch: Batch, report: TrainStepReport, version: PolicyVersion) -> None:
        state = self._state
        state.dropped_candidates = []
        state.num_trained_trajectories += sum(g.num_trajectories for g in batch.groups)
        for group in batch.groups:
            state.consumed_group_ids[group.group_id] = state.num_policy_versions
        staleness = batch.staleness(version)
        state.staleness_histogram.update(staleness)
        state.num_steps_with_older_data += any(age > 0 for age in staleness)
        state.forks.update(batch.forks())
        trained = (t for group in batch.groups for t in group.trajectories)
        state.trained_lengths.update(length_bin(t.num_model_tokens) for t in trained)
        state.num_trained_tokens += report.num_trained_tokens

    async def _record_groups(
        self, groups: Sequence[Group], outcome: str, *, is_recovered: bool = False, **fate: Any
    ) -> None:
        fate = {"outcome": outcome, "label": "training", **fate}
        written = await asyncio.to_thread(self._records.ids_of, **fate) if is_recovered else ()
        trajectories = [t for g in groups for t in g.trajectories if t.trajectory_id not in written]
        await asyncio.to_thread(self._records.trajectories, trajectories, **fate)


def _last_failure(run_dir: Path) -> str:
    """Return what a collector wrote down of the newest failed member; "" where none has."""
    files = sorted(run_dir.glob("collector-*.json"), key=lambda path: path.stat().st_mtime)
    texts = [json.loads(path.read_text("utf-8")).get("last_failure", "") for path in files]
    newest = next((text for text in reversed(texts) if text), "")
    return f", at last: {newest.rstrip('.')}" if newest else ""


def row_of_oversize(rows: Iterable[TokenSequence], settings: TrainerSettings) -> dict[str, int]:
    """Return how many sequences were dropped or truncated; {} where `oversize` allows neither."""
    if settings.oversize == "error":
        return {}
    return {"num_oversize": sum(len(row.token_ids) > settings.packed_row_tokens for row in rows)}
