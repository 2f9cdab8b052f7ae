"""summary.json: what a run did, from what each service says about it, and whether they agree."""

from __future__ import annotations

import json
import platform
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from dialoop.views.run_files import trajectory_files

from dialoop_services.config.engines import ENGINES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from dialoop.clients.replay import LedgerCounts, ReplayStats

    from dialoop_services.config.job import JobConfig

_PACKAGES = {
    package: distributions
    for facts in ENGINES.values()
    for package, distributions in facts.packages.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the end of a run leaves to be summed up."""

    config: JobConfig
    trainer: Mapping[str, Any]
    """trainer.json."""
    stats: ReplayStats
    collectors: tuple[Mapping[str, Any], ...]
    """collector-<worker>.json of each collector process there was."""
    rows_by_outcome: Mapping[str, int]
    """Lines of trajectories.jsonl by what became of them."""
    rescoring: Mapping[str, Any]
    seconds_by_phase: Mapping[str, Mapping[str, float]]
    num_sampled_tokens: int
    redis_version: str
    num_restarts: Mapping[str, int]
    is_resumed: bool = False


def summarise(findings: Findings) -> dict[str, Any]:
    """The whole summary but its gates."""
    trainer, stats = findings.trainer, findings.stats
    return {
        "run": findings.config.run,
        "engine": findings.config.engine,
        "store": findings.config.store,
        "seed": findings.config.seed,
        "versions": versions(findings.redis_version),
        "num_parameters": trainer["num_parameters"],
        **_seconds(findings),
        **_evaluations(trainer["evaluations"]),
        "num_train_steps": trainer["num_train_steps"],
        "num_policy_versions": trainer["num_policy_versions"],
        "groups": group_counts(stats.training),
        "trajectories": trajectory_counts(stats.training),
        "evaluation_groups": group_counts(stats.evaluation),
        "evaluation_trajectories": trajectory_counts(stats.evaluation),
        "accounting": accounting(findings),
        "staleness_histogram": trainer["staleness_histogram"],
        "share_of_train_steps_with_older_data": trainer["share_of_train_steps_with_older_data"],
        "max_logprob_difference": trainer["max_logprob_difference"],
        "forks": trainer["forks"],
        "heldout_losses": trainer.get("heldout_losses", {}),
        "stopped_early": trainer.get("stopped_early", ""),
        "rescoring": dict(findings.rescoring),
        "num_redelivered": stats.num_redelivered,
        "num_dead_letters": stats.num_dead_letters,
        "num_restarts": dict(findings.num_restarts),
    }


def _seconds(findings: Findings) -> dict[str, Any]:
    """Totals, by phase, and the rates that follow."""
    phases = findings.seconds_by_phase
    trained = findings.trainer["num_trained_tokens"]
    train_s = findings.trainer["phases"].get("train", {}).get("wall_s", 0.0)
    # Sampling goes on in the evaluations before and after training as well.
    sampled_s = sum(phases.get(name, {}).get("wall_s", 0.0) for name in ("training", "evaluating"))
    return {
        "wall_s": sum(phase["wall_s"] for phase in phases.values()),
        "cpu_s": sum(phase["cpu_s"] for phase in phases.values()),
        "seconds_by_phase": {name: dict(phase) for name, phase in phases.items()},
        "trainer_seconds_by_phase": findings.trainer["phases"],
        "num_sampled_tokens": findings.num_sampled_tokens,
        "num_trained_tokens": trained,
        "tokens_per_s_generated": findings.num_sampled_tokens / sampled_s if sampled_s else 0.0,
        "tokens_per_s_trained": trained / train_s if train_s else 0.0,
    }


def _evaluations(evaluations: Mapping[str, Mapping[str, float]]) -> dict[str, float | None]:
    """Held-out accuracy and tool use; None of an evaluation that was not asked for."""

    def value(label: str, name: str) -> float | None:
        return evaluations.get(label, {}).get(name)

    accuracies = {
        f"heldout_{how}_{when}": value(f"{when}_{how}", "mean_reward")
        for how in ("greedy", "sampled")
        for when in ("before", "after")
    }
    rates = {
        f"tool_call_rate_{when}": value(f"{when}_sampled", "tool_call_rate")
        for when in ("before", "after")
    }
    before, after = (accuracies[f"heldout_sampled_{when}"] for when in ("before", "after"))
    gain = None if before is None or after is None else after - before
    return {**accuracies, "heldout_sampled_gain": gain, **rates}


def group_counts(counts: LedgerCounts) -> dict[str, Any]:
    """Groups generated = trained + dropped by reason + left; tasks not played yet stand beside."""
    left = (
        counts.num_groups_unscored
        + counts.num_groups_scored
        + counts.num_groups_training
        + counts.num_groups_trained
    )
    dropped = dict(counts.num_groups_dropped)
    trained = counts.num_groups_consumed
    return {
        "generated": trained + sum(dropped.values()) + left,
        "trained": trained,
        "dropped": dropped,
        "left": left,
        "tasks_waiting": counts.num_tasks_offered,
        "tasks_leased": counts.num_groups_leased,
    }


def trajectory_counts(counts: LedgerCounts) -> dict[str, Any]:
    """Trajectories as the ledger has them."""
    return {
        "generated": counts.num_trajectories_generated,
        "trained": counts.num_trajectories_consumed,
        "dropped": dict(counts.num_trajectories_dropped),
        "left": counts.num_trajectories_live,
    }


def accounting(findings: Findings) -> dict[str, Any]:
    """Whether the ledger's counts add up, and agree with what others counted for themselves."""
    training = findings.stats.training
    evaluation = findings.stats.evaluation
    played = [
        sum(c[purpose]["num_trajectories"] for c in findings.collectors)
        for purpose in ("training", "evaluation")
    ]
    generated = [counts.num_trajectories_generated for counts in (training, evaluation)]
    rows = findings.rows_by_outcome
    return {
        "ledger_adds_up": _adds_up(training) and _adds_up(evaluation),
        "played_by_collectors": dict(zip(("training", "evaluation"), played, strict=True)),
        "collectors_agree": played == generated or _lost_a_collector(findings),
        "recorded_as_trained": rows.get("trained", 0),
        "trainer_agrees": findings.trainer["num_trajectories_trained"]
        == training.num_trajectories_consumed,
    }


def _lost_a_collector(findings: Findings) -> bool:
    """A killed collector takes its count of the last second, and what it was playing, along."""
    return findings.is_resumed or findings.num_restarts.get("collector", 0) > 0


def _adds_up(counts: LedgerCounts) -> bool:
    final = counts.num_trajectories_consumed + sum(counts.num_trajectories_dropped.values())
    return bool(counts.num_trajectories_generated == final + counts.num_trajectories_live)


def versions(redis_version: str) -> dict[str, str]:
    """Of what took part; empty for what is not installed or not ours."""
    found = {name: _first_installed(packages) for name, packages in _PACKAGES.items()}
    dialoop = _first_installed(("dialoop-services", "dialoop"))
    python = platform.python_version()
    return {"dialoop": dialoop, "redis": redis_version, "python": python, **found}


def _first_installed(packages: Iterable[str]) -> str:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""


def read_collectors(run_dir: Path) -> tuple[Mapping[str, Any], ...]:
    """The counters of every collector process that worked for the run."""
    files = sorted(run_dir.glob("collector-*.json"))
    return tuple(json.loads(file.read_text("utf-8")) for file in files)


def count_outcomes(run_dir: Path) -> Counter[str]:
    """Lines of what is left of trajectories.jsonl by outcome."""
    found: Counter[str] = Counter()
    for path in trajectory_files(run_dir):
        with path.open(encoding="utf-8") as lines:
            found.update(json.loads(line)["outcome"] for line in lines)
    return found
