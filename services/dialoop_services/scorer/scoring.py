"""Score whole groups: rewards, reference log-probs, KL, advantages, in this order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.trajectory import DoneReason, Group, Trajectory
from dialoop_learning.rl.advantages import (
    AdvantageSettings,
    returns_of,
    with_advantages,
    with_values,
)
from dialoop_learning.rl.monte_carlo import with_turn_advantages
from dialoop_learning.rl.selection import with_best_alone

from dialoop_services.scorer.estimator import Estimator
from dialoop_services.scorer.rewards import GroupReward, KlPenalty, with_kl_penalty, with_reward

if TYPE_CHECKING:
    from dialoop_services.scorer.reference_batches import ReferenceBatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How groups are scored; `reference` is None where neither its log-probs nor KL are needed.

    `estimator` computes the advantages; None: `advantages` says how.
    """

    rewards: tuple[GroupReward, ...] = ()
    advantages: AdvantageSettings = AdvantageSettings()  # noqa: RUF009  (frozen)
    reference: ReferenceBatches | None = None
    kl_penalty: KlPenalty | None = None
    drop_uniform: bool = False
    per_turn: bool = False
    top_k: int = 0
    estimator: Estimator | None = None

    async def score(self, group: Group) -> Group:
        """Return the scored group. The same group gives the same scores when it is delivered again.

        Raise InvalidInput (GROUP_INCOMPLETE, GROUP_TOO_SMALL, UNSCORABLE_TRAJECTORY,
        TRAJECTORY_NOT_DONE, ...) or PreconditionFailed (REWARD_FAILED, ESTIMATOR_FAILED,
        UNIFORM_REWARD, NO_REWARD). The worker drops or sets aside the group under that reason.
        """
        require_scorable(group)
        for reward in self.rewards:
            group = await with_reward(group, reward)
        if self.reference is not None:
            group = await with_reference(group, self.reference)
        scored = await self._compared(group)
        if self.drop_uniform and not _has_advantage(scored):
            is_rewarded = sum(not t.is_unrewarded for t in scored.trajectories) > 1
            raise PreconditionFailed(
                f"All advantages of {group.group_id} are 0."
                if is_rewarded
                else f"Fewer than two trajectories of {group.group_id} have a reward.",
                reason=Reason.UNIFORM_REWARD if is_rewarded else Reason.NO_REWARD,
                remedy="Training learns nothing from it; set drop_uniform to false to keep it.",
            )
        return scored

    async def _compared(self, group: Group) -> Group:
        """Return the group with advantages of the trajectories that have a reward.

        The others have none, and are in no baseline. One that is alone is compared with nothing.
        """
        rewarded = [t for t in group.trajectories if not t.is_unrewarded]
        part = replace(group, trajectories=tuple(rewarded))
        if len(rewarded) > 1:
            if self.kl_penalty is not None:
                part = with_kl_penalty(part, self.kl_penalty)
            part = await self._with_advantages(part)
        else:
            part = with_values(part, [0.0] * len(rewarded))
        scored = {t.trajectory_id: t for t in part.trajectories}
        return replace(
            group,
            trajectories=tuple(scored.get(t.trajectory_id, t) for t in group.trajectories),
        )

    async def _with_advantages(self, group: Group) -> Group:
        if self.top_k:
            return with_best_alone(group, k=self.top_k, aggregate=self.advantages.aggregate)
        if self.estimator is not None:
            returns = returns_of(group, self.advantages.aggregate)
            return with_values(group, await self.estimator.estimate(group, returns))
        compute = with_turn_advantages if self.per_turn else with_advantages
        return compute(group, self.advantages)


def require_scorable(group: Group) -> None:
    """Raise InvalidInput unless the group can be scored.

    It must be complete, or closed with as many trajectories as its task allows, and have two or
    more. Each must have ended, and only the policy may have failed.
    """
    task = group.task
    if not task.least_trajectories <= group.num_trajectories <= task.num_trajectories:
        raise InvalidInput(
            f"{group.group_id} has {group.num_trajectories} of {task.num_trajectories}"
            " trajectories.",
            reason=Reason.GROUP_INCOMPLETE,
            remedy="Play its task again: a partial group would have a wrong baseline.",
        )
    if group.num_trajectories < 2:
        raise InvalidInput(
            f"{group.group_id} has one trajectory.",
            reason=Reason.GROUP_TOO_SMALL,
            remedy="Play at least two trajectories of each task.",
        )
    for trajectory in group.trajectories:
        if not trajectory.is_scorable or not trajectory.turns:
            raise InvalidInput(
                f"Trajectory {trajectory.trajectory_id} failed or has nothing to train.",
                reason=Reason.UNSCORABLE_TRAJECTORY,
                remedy="Retry it, or drop the group and re-issue its task.",
            )
        if _is_unfinished(trajectory):
            raise InvalidInput(
                f"Trajectory {trajectory.trajectory_id} has not ended: it is neither terminated "
                "nor truncated.",
                reason=Reason.TRAJECTORY_NOT_DONE,
                remedy="Play it to its end, or set `truncated` and `done_reason`.",
            )


def _is_unfinished(trajectory: Trajectory) -> bool:
    """Return whether nothing marks the trajectory as ended; then its rewards are incomplete."""
    has_ended = trajectory.terminated or trajectory.truncated
    return not has_ended and trajectory.done_reason is DoneReason.NOT_DONE


async def with_reference(group: Group, reference: ReferenceBatches) -> Group:
    """Return the group with `ref_logprobs` on every sequence that has sampled tokens."""
    sampled = [
        (sequence, temperature_of(trajectory))
        for trajectory in group.trajectories
        for sequence in trajectory.sequences
        if sequence.num_model_tokens
    ]
    sequences = [sequence for sequence, _ in sampled]
    logprobs = iter(await reference.logprobs_of_sampled(sequences, [t for _, t in sampled]))
    trajectories = tuple(
        replace(
            trajectory,
            sequences=tuple(
                replace(s, ref_logprobs=next(logprobs)) if s.num_model_tokens else s
                for s in trajectory.sequences
            ),
        )
        for trajectory in group.trajectories
    )
    return replace(group, trajectories=trajectories)


def temperature_of(trajectory: Trajectory) -> float:
    """Return the sampling temperature; raise InvalidInput for 0, which has no log-probs."""
    temperature = trajectory.sampling.temperature
    if temperature == 0:
        raise InvalidInput(
            f"Trajectory {trajectory.trajectory_id} was sampled at temperature 0.",
            reason=Reason.INVALID_TEMPERATURE,
            remedy="Sample training trajectories with a temperature above 0.",
        )
    return 1.0 if temperature is None else temperature


def _has_advantage(scored: Group) -> bool:
    """Return whether any advantage differs from 0, which equal sums of rewards do not rule out."""
    sequences = [s for trajectory in scored.trajectories for s in trajectory.sequences]
    return any(s.token_advantages.any() or s.advantage for s in sequences)
