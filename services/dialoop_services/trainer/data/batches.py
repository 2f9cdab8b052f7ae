"""One leased batch: the groups to train, and the groups to drop with a reason.

No train step can use some groups, which shows before anything is computed: the code that makes
rows for the model, and the loss itself, decide. Only when they refuse a batch does `read_rows` try
its groups one by one, and then the trajectories of a refused group.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dialoop.errors import DialoopError, InvalidConfig
from dialoop.reasons import DropReason
from dialoop.sequences import ForkCause, PolicyVersion, Sequence
from dialoop.trajectory import Group, StopReason, Trajectory, sums_by_name
from dialoop_learning.rl.staleness import is_stale

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from collections.abc import Sequence as Rows

    from dialoop.clients.replay import GroupLease
    from dialoop_learning.packing.rows import TokenRow

    from dialoop_services.config.candidates import CandidateSettings

    ToRows = Callable[[Rows["TrainedSequence"]], list[TokenRow]]


_OTHERWISE = (DropReason.STALE, DropReason.REFUSED)
"""Why groups are dropped that had a signal."""
_CUT_OFF = (StopReason.LENGTH, StopReason.CONTEXT_FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSequence:
    """One token row to train, with its group in the batch, trajectory in the group, temperature.

    group: the group itself, for a loss that reads more of it than tokens.
    """

    sequence: Sequence
    group_index: int
    trajectory_index: int | None = None
    temperature: float = 1.0
    group: Group | None = None

    @property
    def trajectory(self) -> Trajectory | None:
        """Return its trajectory, where the group is known."""
        if self.group is None or self.trajectory_index is None:
            return None
        return self.group.trajectories[self.trajectory_index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The leased groups, sorted by what to do with them; `dropped` is by reason.

    candidates: metrics of all groups leased for the train step, those dropped before it included.
    Empty before they are known.
    """

    train: tuple[GroupLease, ...]
    already_consumed: tuple[GroupLease, ...]
    dropped: dict[str, tuple[GroupLease, ...]]
    candidates: Mapping[str, Any] = field(default_factory=dict)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Return the groups to train."""
        return tuple(lease.group for lease in self.train)

    @property
    def trained_lease_ids(self) -> tuple[str, ...]:
        """Return the leases of the groups to train."""
        return tuple(lease.lease_id for lease in self.train)

    @property
    def dropped_lease_ids(self) -> dict[str, tuple[str, ...]]:
        """Return the leases of the groups to drop, by reason."""
        return {why: tuple(x.lease_id for x in leases) for why, leases in self.dropped.items()}

    @property
    def sequences(self) -> tuple[TrainedSequence, ...]:
        """Return the token rows to train."""
        return sequences_of(self.groups)

    def staleness(self, current: PolicyVersion) -> Counter[int]:
        """Count trained trajectories by how many versions their oldest token lags `current`."""
        return Counter(
            current.staleness_of(min(trajectory.policy_versions))
            for group in self.groups
            for trajectory in group.trajectories
            if trajectory.policy_versions  # none if the prompt filled the context
        )

    @property
    def without_signal(self) -> tuple[GroupLease, ...]:
        """Return the dropped groups of which the present policy could have been trained."""
        dropped = self.dropped.items()
        no_signal = (why_leases for why_leases in dropped if why_leases[0] not in _OTHERWISE)
        return tuple(lease for _, leases in no_signal for lease in leases)

    def forks(self) -> Counter[str]:
        """Count trained sequences that started as a fork, by cause."""
        return Counter(
            sequence.fork_cause.name.lower()
            for group in self.groups
            for trajectory in group.trajectories
            for sequence in trajectory.sequences
            if sequence.fork_cause is not ForkCause.NONE
        )


def sequences_of(groups: Rows[Group]) -> tuple[TrainedSequence, ...]:
    """Return the token rows of a batch's groups to train: all that have a sampled token.

    Rows with advantage 0 stay: a loss takes its means over them, and they have a KL term.
    """
    return tuple(
        TrainedSequence(
            sequence=sequence,
            group_index=index,
            trajectory_index=number,
            temperature=_temperature_of(trajectory),
            group=group,
        )
        for index, group in enumerate(groups)
        for number, trajectory in enumerate(group.trajectories)
        for sequence in trajectory.sequences
        if sequence.num_model_tokens
    )


def keep_for_step(kept: Rows[GroupLease], batch: Batch) -> list[GroupLease]:
    """Return the groups kept for the next train step after `batch` was leased for it too.

    A queue that lost its newest leases may deliver a kept group again, perhaps played anew: the
    new delivery counts, also when it is dropped.
    """
    new = [*batch.train, *batch.already_consumed]
    delivered = itertools.chain(new, *batch.dropped.values())
    ids = {lease.group.group_id for lease in delivered}
    return [lease for lease in kept if lease.group.group_id not in ids] + new


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFigures:
    """What the metrics need of a trajectory: without its tokens, which may be dropped.

    reward: None where no function gave one. absent: names of rewards that functions did not give.
    numbers: rewards of weight 0, as they were given.
    trial_rewards: of each episode, where it is a trial of several.
    """

    reward: float | None
    rewards: Mapping[str, float]
    num_tokens: int
    calls_tools: bool
    is_truncated: bool
    trial_rewards: Rows[float] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    absent: Rows[str] = ()

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrajectoryFigures:
        """Return the figures of a trajectory; its rewards are sums over turns, by name."""
        is_cut_off = any(turn.stop_reason in _CUT_OFF for turn in trajectory.turns)
        rewards = [reward for turn in trajectory.turns for reward in turn.rewards]
        return cls(
            reward=None if trajectory.is_unrewarded else trajectory.reward,
            rewards=sums_by_name(r for r in rewards if r.weight),
            numbers=sums_by_name(r for r in rewards if not r.weight),
            absent=tuple(dict.fromkeys(r.name for r in rewards if r.absent)),
            num_tokens=trajectory.num_model_tokens,
            calls_tools=trajectory.num_tool_calls > 0,
            is_truncated=trajectory.truncated or is_cut_off,
            trial_rewards=trial_rewards_of(trajectory),
        )


def figures_of_dropped(batch: Batch) -> list[list[dict[str, Any]]]:
    """Return what the next train step's metrics need of each group that was dropped before it.

    Not of a stale group: that the policy is too new for it says nothing about its task.
    """
    groups = (lease.group for lease in batch.without_signal)
    return [[asdict(TrajectoryFigures.of(t)) for t in group.trajectories] for group in groups]


def metrics_of_candidates(
    trained: Rows[Group], dropped: Rows[Rows[Mapping[str, Any]]]
) -> dict[str, Any]:
    """Return the metrics of a train step's groups and of the figures of those dropped before it."""
    figures = [TrajectoryFigures.of(t) for group in trained for t in group.trajectories]
    figures += [TrajectoryFigures(**values) for group in dropped for values in group]
    return metrics_of(figures) | {"num_groups_dropped": len(dropped)}


def metrics_of(trajectories: Rows[TrajectoryFigures]) -> dict[str, float]:
    """Return rewards, by name too, lengths and shares over all trajectories of a train step.

    `docs/metrics.md` says what each name means. Without a trajectory only `reward` and
    `tool_call_rate` are there, and 0.
    """
    if not trajectories:
        return {"reward": 0.0, "tool_call_rate": 0.0}
    rewards = [t.reward for t in trajectories if t.reward is not None] or [0.0]
    lengths = [t.num_tokens for t in trajectories]
    metrics = {
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "tool_call_rate": sum(t.calls_tools for t in trajectories) / len(trajectories),
        "truncated_share": sum(t.is_truncated for t in trajectories) / len(trajectories),
        "response_tokens_mean": statistics.fmean(lengths),
        "response_tokens_min": min(lengths),
        "response_tokens_max": max(lengths),
    }
    for name in dict.fromkeys(name for t in trajectories for name in (*t.rewards, *t.numbers)):
        # A rewarded trajectory without a reward of that name, as one that ended early, has 0 of it.
        values = [
            t.rewards.get(name, 0.0)
            for t in trajectories
            if t.reward is not None and (name in t.rewards or name not in t.absent)
        ]
        if not any(name in t.rewards for t in trajectories):
            values = [t.numbers[name] for t in trajectories if name in t.numbers]
        metrics[f"rewards/{name}/mean"] = statistics.fmean(values)
        metrics[f"rewards/{name}/std"] = statistics.pstdev(values)
    return metrics | trial_means(t.trial_rewards for t in trajectories)


def trial_rewards_of(trajectory: Trajectory) -> tuple[float, ...]:
    """Return what each episode of a trial earned, as its label says; () for what is no trial."""
    try:
        return tuple(map(float, trajectory.labels.get("trial_rewards", "").split()))
    except ValueError:  # an agent of the user's has a label of this name
        return ()


def trial_means(trials: Iterable[Rows[float]]) -> dict[str, float]:
    """Return the mean reward of the first, second, ... episode over all trials that had one."""
    columns = itertools.zip_longest(*trials)
    rewards = ([reward for reward in column if reward is not None] for column in columns)
    return {
        f"trial_reward/{number}": statistics.fmean(earned)
        for number, earned in enumerate(rewards, start=1)
    }


def sort_batch(  # noqa: PLR0913 - two of them are facts of the loss
    leases: Rows[GroupLease],
    *,
    current: PolicyVersion,
    max_staleness: int | None,
    consumed_group_ids: Collection[str],
    needs_advantages: bool = True,
    needs_feedback: bool = False,
    candidates: CandidateSettings | None = None,
) -> Batch:
    """Split leased groups into train, drop and already consumed.

    A loss that needs no advantages trains groups of uniform reward too, and one that needs feedback
    only groups with some. A group that was trained is
    consumed and never stale: it may come again from a queue that lost its last second.
    """
    train: list[GroupLease] = []
    consumed: list[GroupLease] = []
    dropped: dict[str, list[GroupLease]] = {}
    for lease in leases:
        reason = _reason_to_drop(lease.group, current, max_staleness, needs_advantages)
        if reason is None and needs_feedback and not num_with_feedback([lease.group]):
            reason = DropReason.NO_FEEDBACK
        if reason is None and candidates is not None and not _is_in_bounds(lease.group, candidates):
            reason = DropReason.SUCCESS_RATE
        if lease.group.group_id in consumed_group_ids:
            consumed.append(lease)
        elif reason:
            dropped.setdefault(reason, []).append(lease)
        else:
            train.append(lease)
    return Batch(
        train=tuple(train),
        already_consumed=tuple(consumed),
        dropped={reason: tuple(leases) for reason, leases in dropped.items()},
    )


def _reason_to_drop(
    group: Group, current: PolicyVersion, max_staleness: int | None, needs_advantages: bool
) -> DropReason | None:
    versions = group.policy_versions
    if not versions:
        return DropReason.NO_TRAINABLE_TOKEN
    if is_stale(versions, current=current, max_staleness=max_staleness):
        return DropReason.STALE
    if any(trajectory.sampling.constraint for trajectory in group.trajectories):
        return DropReason.CONSTRAINED_SAMPLING
    if any(trajectory.sampling.alters for trajectory in group.trajectories):
        return DropReason.TRUNCATED_SAMPLING
    sequences = (s for trajectory in group.trajectories for s in trajectory.sequences)
    has_signal = any(_has_signal(sequence, needs_advantages) for sequence in sequences)
    if has_signal:
        return None
    num_rewarded = sum(not trajectory.is_unrewarded for trajectory in group.trajectories)
    return DropReason.UNIFORM_REWARD if num_rewarded > 1 else DropReason.NO_REWARD


def num_with_feedback(groups: Rows[Group]) -> int:
    """Return how many trajectories have sampled tokens and words on what they failed."""
    trajectories = (t for group in groups for t in group.trajectories)
    return sum(bool(t.num_model_tokens and t.feedback) for t in trajectories)


def _is_in_bounds(group: Group, candidates: CandidateSettings) -> bool:
    """Return whether the group's share of successes is between the bounds, which are exclusive."""
    rewards = [t.reward for t in group.trajectories if not t.is_unrewarded]
    rate = sum(reward >= candidates.success_reward for reward in rewards) / max(1, len(rewards))
    low, high = candidates.success_rate_above, candidates.success_rate_below
    return (low is None or rate > low) and (high is None or rate < high)


def _temperature_of(trajectory: Trajectory) -> float:
    temperature = trajectory.sampling.temperature
    return 1.0 if temperature is None else temperature


def _has_signal(sequence: Sequence, needs_advantages: bool) -> bool:
    """Return whether it has sampled tokens and, where the loss needs one, an advantage not 0."""
    if not sequence.num_model_tokens or not needs_advantages:
        return bool(sequence.num_model_tokens)
    if len(sequence.token_advantages):
        return bool(sequence.token_advantages.any())
    return bool(sequence.advantage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Untrainable:
    """A group that cannot be trained, its first bad trajectory, and that trajectory's error."""

    lease: GroupLease
    trajectory_id: str
    error: DialoopError

    @property
    def reason(self) -> str:
        """Return the error's reason in snake_case, with which the group is set aside."""
        return self.error.reason.lower()


def read_rows(batch: Batch, to_rows: ToRows) -> tuple[list[TokenRow], tuple[Untrainable, ...]]:
    """Return the rows of the groups to train and (), or [] and the groups that cannot be trained.

    `to_rows` is the learner's. It raises a DialoopError where a sequence cannot be trained, and
    InvalidConfig where none can, as with a loss that fails.
    """
    sequences = batch.sequences
    try:
        return (to_rows(sequences) if sequences else []), ()
    except InvalidConfig:
        raise
    except DialoopError:
        pass  # the rest finds out which groups are at fault
    kept: list[TrainedSequence] = []
    untrainable: list[Untrainable] = []
    for index, lease in enumerate(batch.train):
        own = [row for row in sequences if row.group_index == index]
        error = _refusal([*kept, *own], to_rows)
        if error is None:
            kept += own
        else:
            untrainable.append(_blame(lease, own, error, to_rows))
    return [], tuple(untrainable)


def _blame(
    lease: GroupLease,
    own: list[TrainedSequence],
    error: DialoopError,
    to_rows: ToRows,
) -> Untrainable:
    """Return the first trajectory that is refused alone, with its error; else the first of all."""
    trajectories = lease.group.trajectories
    for trajectory in trajectories:
        theirs = {id(sequence) for sequence in trajectory.sequences}
        rows = [row for row in own if id(row.sequence) in theirs]
        refusal = _refusal(rows, to_rows)
        if refusal is not None:
            return Untrainable(lease=lease, trajectory_id=trajectory.trajectory_id, error=refusal)
    return Untrainable(lease=lease, trajectory_id=trajectories[0].trajectory_id, error=error)


def _refusal(sequences: Rows[TrainedSequence], to_rows: ToRows) -> DialoopError | None:
    try:
        if sequences:
            to_rows(sequences)
    except DialoopError as error:
        return error
    return None
