"""Scoring one whole group: rewards, reference log-probs, KL, advantages, in this order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.trajectory import DoneReason

from dialoop_services.rl.advantages import AdvantageSettings, with_advantages
from dialoop_services.rl.monte_carlo import with_turn_advantages
from dialoop_services.rl.selection import with_best_alone
from dialoop_services.scorer.rewards import GroupReward, KlPenalty, with_kl_penalty, with_reward

if TYPE_CHECKING:
    from collections.abc import Sequence as Rows

    from dialoop.sequences import Floats, Sequence
    from dialoop.trajectory import Group, Trajectory


class Reference(Protocol):
    """A model that says how likely it finds given tokens: `reference.ReferenceModel`.

    A protocol, because importing that file imports torch.
    """

    def logprobs_of_sampled(
        self, sequences: Rows[Sequence], temperatures: Rows[float]
    ) -> list[Floats]:
        """Per sequence float32 [M] of its sampled tokens."""
        ...

    def logprobs_of_all(self, token_ids: Rows[Rows[int]]) -> list[Floats]:
        """Per row float32 [L - 1] of every token but the first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How groups are scored; `reference` only where log-probs or KL are wanted."""

    rewards: tuple[GroupReward, ...] = ()
    advantages: AdvantageSettings = AdvantageSettings()  # noqa: RUF009  (frozen)
    reference: Reference | None = None
    kl_penalty: KlPenalty | None = None
    drop_uniform: bool = False
    per_turn: bool = False
    top_k: int = 0

    def score(self, group: Group) -> Group:
        """The scored group. The same group gives the same scores: a redelivery changes nothing.

        Raises InvalidInput (GROUP_INCOMPLETE, GROUP_TOO_SMALL, UNSCORABLE_TRAJECTORY,
        TRAJECTORY_NOT_DONE, ...) and PreconditionFailed (REWARD_FAILED, UNIFORM_REWARD); the reason
        is what it is dropped under.
        """
        require_scorable(group)
        for reward in self.rewards:
            group = with_reward(group, reward)
        if self.reference is not None:
            group = with_reference(group, self.reference)
        if self.kl_penalty is not None:
            group = with_kl_penalty(group, self.kl_penalty)
        scored = self._with_advantages(group)
        if self.drop_uniform and not _teaches(scored):
            raise PreconditionFailed(
                f"No advantage of {group.group_id} differs from 0.",
                reason=Reason.UNIFORM_REWARD,
                remedy="Nothing is learned from it; set drop_uniform to false to keep it.",
            )
        return scored

    def _with_advantages(self, group: Group) -> Group:
        if self.top_k:
            return with_best_alone(group, k=self.top_k, aggregate=self.advantages.aggregate)
        compute = with_turn_advantages if self.per_turn else with_advantages
        return compute(group, self.advantages, group_size=group.task.num_trajectories)


def require_scorable(group: Group) -> None:
    """A whole group of two or more that ended and failed by the policy alone; else InvalidInput."""
    if group.num_trajectories != group.task.num_trajectories:
        raise InvalidInput(
            f"{group.group_id} has {group.num_trajectories} of {group.task.num_trajectories}"
            " trajectories.",
            reason=Reason.GROUP_INCOMPLETE,
            remedy="Play its task again: a partial group has a wrong baseline.",
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
                remedy="Play it to its end, or say that it was cut: truncated, with done_reason.",
            )


def _is_unfinished(trajectory: Trajectory) -> bool:
    """Whether nobody says that it ended: what it has earned so far is not its reward."""
    has_ended = trajectory.terminated or trajectory.truncated
    return not has_ended and trajectory.done_reason is DoneReason.NOT_DONE


def with_reference(group: Group, reference: Reference) -> Group:
    """The group with `ref_logprobs` on every sequence that has sampled tokens."""
    owned = [
        (sequence, temperature_of(trajectory))
        for trajectory in group.trajectories
        for sequence in trajectory.sequences
        if sequence.num_model_tokens
    ]
    found = iter(reference.logprobs_of_sampled([s for s, _ in owned], [t for _, t in owned]))
    trajectories = tuple(
        replace(
            trajectory,
            sequences=tuple(
                replace(s, ref_logprobs=next(found)) if s.num_model_tokens else s
                for s in trajectory.sequences
            ),
        )
        for trajectory in group.trajectories
    )
    return replace(group, trajectories=trajectories)


def temperature_of(trajectory: Trajectory) -> float:
    """The temperature its tokens were sampled with; 0 has no log-probs."""
    temperature = trajectory.sampling.temperature
    if temperature == 0:
        raise InvalidInput(
            f"Trajectory {trajectory.trajectory_id} was sampled at temperature 0.",
            reason=Reason.INVALID_TEMPERATURE,
            remedy="Sample training trajectories with a temperature above 0.",
        )
    return 1.0 if temperature is None else temperature


def _teaches(scored: Group) -> bool:
    """Whether any advantage differs from 0; sums of rewards may be the same though turns differ."""
    sequences = [s for trajectory in scored.trajectories for s in trajectory.sequences]
    return any(s.token_advantages.any() or s.advantage for s in sequences)
