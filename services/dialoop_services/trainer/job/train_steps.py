"""RL's train steps: lease a batch, train it, publish, drop what cannot be trained."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from dialoop.clients.replay import ReturnItem
from dialoop.trajectory import Stage

from dialoop_services.trainer.data.batches import sort_batch
from dialoop_services.trainer.data.leases import WORKER
from dialoop_services.trainer.data.untrainable import faults_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dialoop.clients.replay import GroupLease
    from dialoop.sequences import PolicyVersion
    from dialoop.trajectory import Group

    from dialoop_services.trainer.data.batches import Batch
    from dialoop_services.trainer.data.untrainable import Fault
    from dialoop_services.trainer.job.state import JobParts, Standing
    from dialoop_services.trainer.learner.learner import TrainStepReport
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

FRESH_MISMATCH = "FRESH_MISMATCH"
"""The alarm of data of the present policy on which engine and trainer disagree."""

GROUPS_SET_ASIDE = "GROUPS_SET_ASIDE"
"""The alarm of groups that no train step can take, until a batch is trained again."""

_LEASE_WAIT_S = 5.0


class TrainSteps:
    """Takes RL train steps; each ends with a publish."""

    def __init__(self, settings: TrainerSettings, parts: JobParts, standing: Standing) -> None:
        self._settings = settings
        self._learner = parts.learner
        self._replay = parts.replay
        self._publisher = parts.publisher
        self._records = parts.records
        self._board = parts.board
        self._standing = standing
        # Bad groups in a row: since a batch had one that can be trained.
        self._num_refused = 0

    async def next_step(self) -> Callable[[], Awaitable[None]] | None:
        """Wait for a whole batch; what is to be done with it, or None when the job stops."""
        started = time.perf_counter()
        leases = await self._lease()
        lease_s = time.perf_counter() - started
        return partial(self._train_step, leases, lease_s) if leases else None

    async def _lease(self) -> tuple[GroupLease, ...]:
        while not self._board.is_stopping:
            leased = await self._replay.lease_groups(
                self._settings.run,
                Stage.SCORED,
                worker=WORKER,
                max_groups=self._settings.groups_per_train_step,
                min_groups=self._settings.groups_per_train_step,
                lease_s=self._settings.lease_s,
                wait_s=_LEASE_WAIT_S,
                max_staleness=self._settings.max_staleness,
            )
            if leased.leases:
                self._standing.held.hold(lease.lease_id for lease in leased.leases)
                if await self._are_trainable(leased.leases):
                    return leased.leases
                continue
            # A queue that lost all it knew gives out no work until it hears of a policy again.
            await self._publisher.announce(self._standing.progress.policy_version)
        return ()

    async def _are_trainable(self, leases: tuple[GroupLease, ...]) -> bool:
        """Whether a train step can take them; if not, those at fault become dead letters.

        The others go back to their places, so that no batch is short for a group that is bad. When
        too many in a row were bad, the first fault of the last batch is raised.
        """
        version = self._standing.progress.policy_version
        batch = self._sorted(leases)
        faults = await asyncio.to_thread(faults_of, batch, self._learner, version)
        if not faults:
            return True
        reasons = {fault.lease.lease_id: fault.reason for fault in faults}
        ids = [lease.lease_id for lease in leases]
        items = [
            ReturnItem(
                lease_id=one, reason=reasons.get(one, "batch_refused"), set_aside=one in reasons
            )
            for one in ids
        ]
        await self._replay.give_back(self._settings.run, items)
        self._standing.held.let_go(ids)
        for fault in faults:
            self._say(fault)
        self._board.sound(GROUPS_SET_ASIDE, on=True)
        self._require_some_trainable(batch, faults)
        return False

    def _require_some_trainable(self, batch: Batch, faults: Sequence[Fault]) -> None:
        is_whole = len(faults) == len(batch.train)
        self._num_refused = self._num_refused + len(faults) if is_whole else 0
        if self._num_refused >= self._settings.max_refused_groups:
            log.error(
                "None of the last groups can be trained.",
                extra={"num_groups": self._num_refused, "reason": faults[0].reason},
            )
            raise faults[0].error

    def _say(self, fault: Fault) -> None:
        progress = self._standing.progress
        named = {"group_id": fault.lease.group.group_id, "trajectory_id": fault.trajectory_id}
        log.error("A group is set aside: %s", fault.error, extra={**named, "reason": fault.reason})
        self._records.metric(
            "set_aside",
            train_step=progress.num_train_steps,
            policy_version=progress.policy_version,
            reason=fault.reason,
            message=str(fault.error),
            **named,
        )

    def _sorted(self, leases: tuple[GroupLease, ...]) -> Batch:
        progress = self._standing.progress
        return sort_batch(
            leases,
            current=progress.policy_version,
            max_staleness=self._settings.max_staleness,
            consumed_group_ids=set(progress.consumed_group_ids),
            needs_advantages=self._learner.needs_advantages,
        )

    async def _train_step(self, leases: tuple[GroupLease, ...], lease_s: float) -> None:
        batch = self._sorted(leases)
        if batch.already_consumed:
            # Their gradient is in the weights, and only a checkpoint may let go of them.
            self._standing.settle(tuple(lease.lease_id for lease in batch.already_consumed))
            await self._standing.checkpoint()
        if not (batch.train or batch.dropped):
            return
        row = await self.learn(batch) | {"lease_s": lease_s}
        if batch.train:
            published = await self._standing.publish_next(batch)
            row["publish_s"] = published.publish_s
        else:
            self._standing.note(batch)
        await self.record(batch, row)
        # After the publish: a refunded credit starts a group, which is to be of the new policy.
        await self.drop(batch)

    async def learn(self, batch: Batch) -> dict[str, Any]:
        """Train a batch as the next train step; its row. Nobody outside hears of it yet."""
        progress, version = self._standing.progress, self._standing.progress.policy_version
        row = _row_of(batch)
        if batch.train:
            started = time.perf_counter()
            report = await asyncio.to_thread(
                self._learner.train_step, batch.sequences, current=version
            )
            self._count(batch, report, version)
            self._num_refused = 0
            self._board.sound(GROUPS_SET_ASIDE, on=False)
            row |= _row_of_report(report) | _row_of_staleness(batch, version)
            row |= self._row_of_oversize(batch)
            row |= self._alarm(report, version) | {"train_s": time.perf_counter() - started}
        progress.num_train_steps += 1
        self._board.num_train_steps = progress.num_train_steps
        return row

    def _row_of_oversize(self, batch: Batch) -> dict[str, Any]:
        """How many sequences were dropped or truncated, where that was asked for."""
        if self._settings.oversize == "error":
            return {}
        most = self._settings.packed_row_tokens
        return {"num_oversize": sum(len(s.sequence.token_ids) > most for s in batch.sequences)}

    def _alarm(self, report: TrainStepReport, version: PolicyVersion) -> dict[str, Any]:
        """Say so when engine and trainer disagree on what the present policy has sampled.

        Nothing but a bug explains that: rendering, a sampler that truncates, weights that differ.
        """
        found, bound = report.fresh_mismatch_kl, self._settings.objective.max_fresh_mismatch_kl
        if found is None:
            return {}
        is_off = not found <= bound  # so that what is not a number is an alarm, too
        self._board.sound(FRESH_MISMATCH, on=is_off)
        if is_off:
            log.error(
                "Engine and trainer disagree on data of the present policy.",
                extra={"policy_version": str(version), "mismatch_kl": found, "bound": bound},
            )
        return {"fresh_mismatch_kl": found, "fresh_mismatch_alarm": is_off}

    async def record(self, batch: Batch, row: dict[str, Any], *, is_redone: bool = False) -> None:
        """Write down what the newest train step trained; of a redone one, what is not there yet.

        The row comes last: a step that has one is written down whole.
        """
        if batch.train:
            await self._record_groups(batch.groups, "trained", is_redone=is_redone)
        progress = self._standing.progress
        version, step = progress.policy_version, progress.num_train_steps
        self._records.metric("train", train_step=step, policy_version=version, **row)

    async def drop(self, batch: Batch) -> None:
        """Let go of what cannot be trained, under its reasons."""
        for reason, leases in batch.dropped.items():
            lease_ids = [lease.lease_id for lease in leases]
            await self._replay.drop(self._settings.run, lease_ids, reason)
            self._standing.held.let_go(lease_ids)
            await self._record_groups([lease.group for lease in leases], reason)

    def _count(self, batch: Batch, report: TrainStepReport, version: PolicyVersion) -> None:
        progress = self._standing.progress
        staleness = batch.staleness(version)
        progress.staleness_histogram.update(staleness)
        progress.num_steps_with_older_data += any(age > 0 for age in staleness)
        progress.forks.update(batch.forks())
        progress.num_trained_tokens += report.num_trained_tokens
        progress.num_trained_trajectories += sum(g.num_trajectories for g in batch.groups)
        progress.consumed_group_ids.extend(g.group_id for g in batch.groups)

    async def _record_groups(
        self, groups: Sequence[Group], outcome: str, *, is_redone: bool = False
    ) -> None:
        step = self._standing.progress.num_train_steps
        fate: dict[str, Any] = {"outcome": outcome, "label": "training", "train_step": step}
        known = await asyncio.to_thread(self._records.written, **fate) if is_redone else ()
        trajectories = [t for g in groups for t in g.trajectories if t.trajectory_id not in known]
        await asyncio.to_thread(self._records.trajectories, trajectories, **fate)


def _row_of(batch: Batch) -> dict[str, Any]:
    """What the batch was, whether or not something of it could be trained."""
    dropped = [lease.group for leases in batch.dropped.values() for lease in leases]
    trajectories = [t for g in (*batch.groups, *dropped) for t in g.trajectories]
    return {
        "reward": sum(t.reward for t in trajectories) / max(1, len(trajectories)),
        "tool_call_rate": sum(t.num_tool_calls > 0 for t in trajectories)
        / max(1, len(trajectories)),
        "num_groups_trained": len(batch.train),
        "num_groups_dropped": len(dropped),
        "num_trained_tokens": 0,
    }


def _row_of_staleness(batch: Batch, version: PolicyVersion) -> dict[str, Any]:
    staleness = list(batch.staleness(version).elements())
    return {"staleness_mean": sum(staleness) / len(staleness), "staleness_max": max(staleness)}


def _row_of_report(report: TrainStepReport) -> dict[str, Any]:
    return {
        "num_trained_tokens": report.num_trained_tokens,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "num_updates": report.num_updates,
        "num_refused": report.num_refused,
        **report.metrics,
    }
