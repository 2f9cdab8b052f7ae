"""The state of a job: all that a checkpoint keeps of it, beside the learner's own state."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from dialoop.errors import InvalidConfig
from dialoop.sequences import PolicyVersion

_FORMAT = 1
# Policy versions for which a consumed group is remembered although it would be stale.
_MARGIN_VERSIONS = 100


@dataclass(slots=True, kw_only=True)
class JobState:
    """The progress of a job. One object per process, which every checkpoint holds whole.

    consumed_lease_ids: leases of groups whose gradient is in the weights and whose acknowledgement
    may not have reached the queue yet. A restart acknowledges them.
    consumed_group_ids: groups whose gradient is in the weights, and how many policy versions there
    were then. A queue that lost its last seconds delivers such a group, or plays its task, again:
    it is acknowledged, not trained again.
    trained_lengths: trained trajectories by `length_bin` of their sampled tokens.
    num_train_steps: steps that updated the weights.
    num_trained_trajectories: those that the queue counts as trained, also of refused batches.
    num_empty_batches: as many candidates in a row as a batch has, of which none could be trained,
    and batches of which every update was refused.
    num_refused_updates: updates that changed no weight, since loss or gradients were not finite.
    stopped_early: why training ended before its last step. gave_up: whether that was because
    nothing could be trained, not a rule of the settings. A resumed job decides both again, by the
    settings that it has.
    due_evaluations: train steps after which an evaluation is due that has no result yet.
    depth, oldest: what the job chose itself of pipeline_depth and max_staleness; None: nothing yet.
    dropped_candidates: figures of the groups dropped since the last train step, for the metrics of
    the next; a list of trajectories for each group.
    """

    policy_version: PolicyVersion = field(
        default_factory=lambda: PolicyVersion(lineage="main", number=0)
    )
    num_warm_start_steps: int = 0
    num_train_steps: int = 0
    num_empty_batches: int = 0
    num_policy_versions: int = 0
    num_trained_tokens: int = 0
    best_evaluation: float | None = None
    num_evaluations_without_gain: int = 0
    stopped_early: str = ""
    gave_up: bool = False
    num_trained_trajectories: int = 0
    num_refused_updates: int = 0
    num_steps_with_older_data: int = 0
    max_logprob_difference: float = 0.0
    cursor: str = ""
    consumed_lease_ids: list[str] = field(default_factory=list)
    consumed_group_ids: dict[str, int] = field(default_factory=dict)
    staleness_histogram: Counter[int] = field(default_factory=Counter)
    forks: Counter[str] = field(default_factory=Counter)
    trained_lengths: Counter[int] = field(default_factory=Counter)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    due_evaluations: list[int] = field(default_factory=list)
    depth: int | None = None
    oldest: int | None = None
    dropped_candidates: list[list[dict[str, Any]]] = field(default_factory=list)
    heldout_losses: dict[str, float] = field(default_factory=dict)
    phase_seconds: dict[str, dict[str, float]] = field(default_factory=dict)

    def become(self, other: JobState) -> None:
        """Take over the values of another state."""
        for own in fields(self):
            setattr(self, own.name, getattr(other, own.name))

    def forget_consumed(self, max_staleness: int | None) -> None:
        """Forget consumed groups that cannot return: they would be stale.

        Their tasks, played again, would not be. Those return at once, so a margin covers them; it
        covers all where there is no bound.
        """
        oldest = self.num_policy_versions - (max_staleness or 0) - _MARGIN_VERSIONS
        for group_id, number in tuple(self.consumed_group_ids.items()):
            if number < oldest:
                del self.consumed_group_ids[group_id]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"format": _FORMAT, **values, "policy_version": asdict(self.policy_version)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> JobState:
        """Return the state that `to_json` wrote; raise InvalidConfig for another format."""
        if data.pop("format", None) != _FORMAT:
            raise InvalidConfig(
                "Another version of Dialoop wrote this checkpoint.", remedy="Start a fresh run."
            )
        version = PolicyVersion(**data.pop("policy_version"))
        histogram = Counter({int(k): v for k, v in data.pop("staleness_histogram").items()})
        forks = Counter(data.pop("forks"))
        data |= {"stopped_early": "", "gave_up": False}
        lengths = Counter({int(k): v for k, v in data.pop("trained_lengths").items()})
        return cls(
            policy_version=version,
            staleness_histogram=histogram,
            forks=forks,
            trained_lengths=lengths,
            **data,
        )

    def result(self) -> dict[str, Any]:
        """Return the content of trainer.json about the whole run."""
        older = self.num_steps_with_older_data / max(1, self.num_train_steps)
        return {
            "phases": self.phase_seconds,
            "num_train_steps": self.num_train_steps,
            "num_empty_batches": self.num_empty_batches,
            "num_policy_versions": self.num_policy_versions,
            "staleness_histogram": dict(sorted(self.staleness_histogram.items())),
            "share_of_train_steps_with_older_data": older,
            "max_logprob_difference": self.max_logprob_difference,
            "num_trained_tokens": self.num_trained_tokens,
            "num_trajectories_trained": self.num_trained_trajectories,
            "forks": dict(self.forks),
            "trained_lengths": dict(sorted(self.trained_lengths.items())),
            "evaluations": self.evaluations,
            "heldout_losses": self.heldout_losses,
            "stopped_early": self.stopped_early,
            "gave_up": self.gave_up,
            "num_refused_updates": self.num_refused_updates,
        }


class PhaseTimer:
    """Adds the trainer's wall and CPU seconds to a job's state, phase by phase."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._name = ""
        self._wall_s = self._cpu_s = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds inside the context under `name`."""
        self._name = name
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        yield
        self.count()
        self._name = ""

    def count(self) -> None:
        """Add the running phase's seconds until now, so that a checkpoint has them."""
        if not self._name:
            return
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        entry = self._state.phase_seconds.setdefault(self._name, {"wall_s": 0.0, "cpu_s": 0.0})
        entry["wall_s"] += wall_s - self._wall_s
        entry["cpu_s"] += cpu_s - self._cpu_s
        self._wall_s, self._cpu_s = wall_s, cpu_s
