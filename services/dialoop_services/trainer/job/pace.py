"""How far sampling runs ahead of training, where a job leaves that to what its steps measure.

A step computes for `busy` seconds, and a group is played for `play` seconds. Batches are there when
they are wanted if play / busy of them are under way (Little's law, L = X W), and more where groups
that teach nothing are dropped. Where an engine has more to do than it can, more work makes each
answer slower and none comes sooner. So a deeper pipeline is on trial: unless steps come faster, the
depth goes back for a while. Where trainer and engine share the cores, taking turns may be as fast,
and its data is not older. So depth 0 is on trial too: unless steps come slower, it stays.

Data may be as old as it teaches something: the first age whose tokens have an effective sample size
below `_LEAST_ESS` is too old. A single token with a large ratio makes that small for a step, so the
median of some steps counts. Nothing else is dropped for its age, or long episodes would be trained
less often than they are played.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dialoop.trajectory import Group, Trajectory

    from dialoop_services.trainer.job.state import JobState
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

_MOST = 32
_WAITS, _WAITS_NOT = 0.1, 0.02
"""Shares of a step that the trainer waits for groups: above the first it wants more of them, below
the second fewer."""
_GAIN, _LOSS = 0.1, 0.02
"""By how much faster steps have to come for a greater depth to stay, and by how much slower they
may come at depth 0."""
_LAST = 2
"""Steps whose mean time is compared."""
_HOLD = 16
"""Steps without another trial, after one that brought nothing."""
_PATIENCE = 4
"""Steps in a row that need less than the depth, before it goes down by one."""
_LEAST_ESS = 0.3
_LEAST_TOKENS = 64
"""Fewer tokens of an age say nothing about it."""
_LOOKS = 3
"""Steps that say whether an age is too old."""
_OLDER_AGAIN = 5
"""Steps after which the bound of ages goes up by one again."""


@dataclass(slots=True)
class _Trial:
    """A depth that has to pay: what it was before, and the seconds that a step may take now."""

    before: int
    most_s: float
    settles_at: int


class Pace:
    """The pipeline depth and the bound of ages: as the settings say, or chosen after each step.

    What was chosen is in the job's state, so that a resumed job goes on with it.
    """

    def __init__(self, settings: TrainerSettings, state: JobState) -> None:
        self._settings = settings
        self._state = state
        self._play_s = self._busy_s = self._lease_s = self._played = 0.0
        self._ess: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_LOOKS))
        self._num_seen = 0
        self._num_below = 0
        self._trial: _Trial | None = None
        self._step_times: deque[float] = deque(maxlen=_LAST)
        self._holds_until = 0

    @property
    def depth(self) -> int:
        """Return how many train steps generation may run ahead."""
        depth = self._settings.pipeline_depth
        if depth != "auto":
            return depth
        return self._settings.first_depth if self._state.depth is None else self._state.depth

    @property
    def max_staleness(self) -> int | None:
        """Return how many policy versions the oldest trained token may lag behind; None: any."""
        bound = self._settings.max_staleness
        return self._state.oldest if bound == "auto" else bound

    @property
    def max_outstanding_groups(self) -> int:
        """Return how many groups may be outstanding at this depth."""
        return self._settings.outstanding_groups(self.depth)

    def row_of(self, groups: Iterable[Group]) -> dict[str, Any]:
        """Return what the row of a step that trains these groups says of its pace."""
        told = {"pipeline_depth": self.depth, **_play_times(groups)}
        if self.max_staleness is not None:
            told["max_staleness"] = self.max_staleness
        return told

    def after_step(self, row: Mapping[str, Any]) -> None:
        """Choose again after a train step, of which `row` has the metrics."""
        if not row["num_updates"]:
            return
        self._measure(row, row["group_play_s"])
        if self._settings.max_staleness == "auto":
            self._choose_bound(row.get("by_staleness", {}))
        if self._settings.pipeline_depth == "auto" and self._settings.first_depth:
            self._choose_depth()

    def _measure(self, row: Mapping[str, Any], play_s: float) -> None:
        busy_s = row["rows_s"] + row["train_s"] + row["wait_s"]
        kept = 0.5 if self._num_seen else 0.0
        self._play_s = kept * self._play_s + (1 - kept) * play_s
        self._busy_s = kept * self._busy_s + (1 - kept) * busy_s
        self._lease_s = kept * self._lease_s + (1 - kept) * row["lease_s"]
        # Groups that a batch costs, over those that one of the pipeline has.
        num_groups = self._settings.groups_per_train_step
        played = (num_groups + row["num_groups_dropped"]) / num_groups
        played /= self._settings.candidates.oversampling
        self._played = kept * self._played + (1 - kept) * max(1.0, played)
        self._num_seen += 1
        self._step_times.append(busy_s + row["lease_s"])

    @property
    def _needed(self) -> int:
        """Return the depth at which batches are there when they are wanted."""
        batches = self._played * self._play_s / (self._busy_s or math.inf)
        needed = math.ceil(batches) or self.depth
        return max(1, min(self._most, needed))

    @property
    def _most(self) -> int:
        bound = self.max_staleness  # batches that lie deeper would be too old
        return _MOST if bound is None else min(_MOST, bound)

    def _choose_depth(self) -> None:
        if self.depth > self._most:  # what lies deeper would be dropped for its age
            self._trial = None
            self._go_to(self._most)
        if self._trial is not None:
            self._judge(self._trial)
            return
        waits = self._lease_s / ((self._lease_s + self._busy_s) or 1.0)
        wanted = min(self._most, max(self._needed, self.depth + 1))
        may_try = self._num_seen >= self._holds_until
        if waits > _WAITS and wanted > self.depth and may_try:
            self._try(wanted, 1 - _GAIN)
        self._num_below = self._num_below + 1 if waits < _WAITS_NOT else 0
        if self._num_below < _PATIENCE:
            return
        if self.depth == 1 and may_try:
            self._try(0, 1 + _LOSS)
        elif self.depth > 1 and self._needed < self.depth:
            self._num_below = 0
            self._go_to(self.depth - 1)

    def _try(self, depth: int, factor: float) -> None:
        """Go to a depth that has to bring steps of at most so many times today's seconds."""
        # Batches that are under way now come as they would have come.
        settles_at = self._num_seen + self.depth + 1
        most_s = factor * statistics.fmean(self._step_times)
        self._trial = _Trial(self.depth, most_s, settles_at)
        self._go_to(depth)

    def _judge(self, trial: _Trial) -> None:
        """Keep the depth where steps come as fast as they have to, once batches come by it."""
        if self._num_seen < trial.settles_at + _LAST:
            return
        self._trial = None
        self._num_below = 0
        if statistics.fmean(self._step_times) > trial.most_s:
            self._holds_until = self._num_seen + _HOLD
            self._go_to(trial.before)

    def _go_to(self, depth: int) -> None:
        if depth == self.depth:
            return
        log.info(
            "The pipeline is %d deep from now on.",
            depth,
            extra={"before": self.depth, "play_s": self._play_s, "train_s": self._busy_s},
        )
        self._state.depth = depth

    def _choose_bound(self, by_age: Mapping[Any, Mapping[str, float]]) -> None:
        """Exclude the first age that teaches next to nothing; allow older ones again by and by."""
        for age, values in by_age.items():
            if values["num_tokens"] >= _LEAST_TOKENS:
                self._ess[int(age)].append(values["ess"])
        looks = ((age, own) for age, own in self._ess.items() if len(own) == _LOOKS)
        too_old = [age for age, own in looks if statistics.median(own) < _LEAST_ESS]
        if too_old:
            self._state.oldest = max(1, min(too_old) - 1)
            self._ess.clear()
        elif self._state.oldest is not None and self._num_seen % _OLDER_AGAIN == 0:
            self._state.oldest += 1


def _play_times(groups: Iterable[Group]) -> dict[str, float]:
    """Return for how long episodes and whole groups were played, in seconds.

    A group's members are played at once, so it takes as long as its slowest.
    """
    by_group = [[_seconds_of(t) for t in group.trajectories] for group in groups]
    episodes = sorted(seconds for own in by_group for seconds in own)
    if not episodes:
        return {"play_s_mean": 0.0, "play_s_p99": 0.0, "group_play_s": 0.0}
    return {
        "play_s_mean": statistics.fmean(episodes),
        "play_s_p99": episodes[min(len(episodes) - 1, math.ceil(0.99 * len(episodes)) - 1)],
        "group_play_s": statistics.fmean(max(own) for own in by_group),
    }


def _seconds_of(trajectory: Trajectory) -> float:
    return sum(turn.generate_s + turn.step_s for turn in trajectory.turns)
