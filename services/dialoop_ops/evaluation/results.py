"""What an evaluation found: means with intervals over tasks, pass@k, and a paired comparison."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from dialoop.errors import InvalidInput
from dialoop.reasons import Reason

from dialoop_ops.evaluation.records import EvaluationSpec, read_spec, scored_rows
from dialoop_ops.runs.intervals import Interval, mean_of, paired_difference, pass_at_k, share_of


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResults:
    """Rewards and successes by task key, in the order of the samples, without failed episodes."""

    spec: EvaluationSpec
    rewards: Mapping[str, tuple[float, ...]]
    successes: Mapping[str, tuple[bool, ...]]
    num_failed: int
    """Number of episodes that something else than the policy made fail."""

    @classmethod
    def of(cls, run_dir: Path) -> Self:
        """Read an evaluation's folder; NotFound (RUN_NOT_FOUND) where there is none.

        Of an episode that was played again, the last line counts.
        """
        spec = read_spec(run_dir)
        rows = {(row["task_key"], row["sample"]): row for row in scored_rows(run_dir)}
        scored = sorted(name for name, row in rows.items() if row["is_scored"])
        rewards: defaultdict[str, list[float]] = defaultdict(list)
        successes: defaultdict[str, list[bool]] = defaultdict(list)
        for name in scored:
            rewards[name[0]].append(rows[name]["reward"])
            successes[name[0]].append(rows[name]["is_success"])
        return cls(
            spec=spec,
            rewards={key: tuple(values) for key, values in rewards.items()},
            successes={key: tuple(values) for key, values in successes.items()},
            num_failed=len(rows) - len(scored),
        )

    @property
    def mean_reward(self) -> Interval | None:
        """Return the mean over tasks of each task's mean reward; None where nothing was scored."""
        means = [fmean(values) for values in self.rewards.values()]
        are_shares = all(0 <= mean <= 1 for mean in means)
        return (share_of if are_shares else mean_of)(means) if means else None

    def pass_at(self, k: int) -> Interval | None:
        """Return pass@k, the mean over tasks; None unless every task has k scored episodes."""
        if not self.successes or min(map(len, self.successes.values())) < k:
            return None
        return share_of([pass_at_k(len(s), sum(s), k) for s in self.successes.values()])

    def as_json(self) -> dict[str, Any]:
        """Return everything, with each task's rewards and successes."""
        passes = {k: self.pass_at(k) for k in ks_of(self.spec.num_samples)}
        return {
            "evaluation": asdict(self.spec),
            "num_tasks": len(self.rewards),
            "num_failed": self.num_failed,
            "mean_reward": None if self.mean_reward is None else asdict(self.mean_reward),
            "pass_at": {k: asdict(value) for k, value in passes.items() if value is not None},
            "tasks": {
                key: {"rewards": list(values), "successes": list(self.successes[key])}
                for key, values in self.rewards.items()
            },
        }


def ks_of(num_samples: int) -> list[int]:
    """Return the k of pass@k to report: powers of two up to the number of samples, and that."""
    powers = [2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples]
    return sorted({*powers, num_samples})


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedResults:
    """Two policies on the same tasks. `difference`: of the tasks' mean rewards, ours minus theirs.

    p_value: of the two-sided exact sign test over the tasks on which the two differ.
    """

    difference: Interval
    num_better: int
    num_worse: int
    num_equal: int
    p_value: float

    @classmethod
    def of(cls, ours: EvaluationResults, theirs: EvaluationResults) -> Self:
        """Compare by task key; InvalidInput (RESULTS_DIFFER) where no task is in both.

        Both must be of one environment and split.
        """
        for name in ("environment", "split"):
            own, other = getattr(ours.spec, name), getattr(theirs.spec, name)
            if own != other:
                raise InvalidInput(
                    f"The two evaluations have the {name} {own} and {other}.",
                    reason=Reason.RESULTS_DIFFER,
                    remedy="Compare evaluations of the same tasks.",
                )
        own_means, other_means = (
            {key: fmean(values) for key, values in results.rewards.items()}
            for results in (ours, theirs)
        )
        difference = paired_difference(own_means, other_means)
        if difference is None:
            raise InvalidInput(
                "The two evaluations have no task in common.",
                reason=Reason.RESULTS_DIFFER,
                remedy="Compare evaluations of the same tasks.",
            )
        gaps = [own_means[key] - other_means[key] for key in own_means if key in other_means]
        better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
        return cls(
            difference=difference,
            num_better=better,
            num_worse=worse,
            num_equal=len(gaps) - better - worse,
            p_value=_sign_test(better, worse),
        )


def _sign_test(num_better: int, num_worse: int) -> float:
    """Return the chance of a split at least as uneven, if both directions were equally likely."""
    total = num_better + num_worse
    fewer = sum(math.comb(total, number) for number in range(min(num_better, num_worse) + 1))
    return float(min(1.0, 2 * fewer / 2**total))
