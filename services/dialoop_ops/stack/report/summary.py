"""Make summary.json: what a run did, whether the services' counts agree, and the gates."""

from __future__ import annotations

import json
import platform
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import dialoop
from dialoop.reasons import DropReason
from dialoop_learning.rl.buckets import first_above
from dialoop_services.config.engines import ENGINES
from dialoop_services.trainer.job.evaluation import share_in
from dialoop_services.trainer.records.rows import trajectory_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from dialoop.clients.replay import LedgerCounts, ReplayStats
    from dialoop_services.config.job import JobConfig

    from dialoop_ops.stack.run_dir import RunDir

_WITHOUT_SIGNAL = (
    DropReason.UNIFORM_REWARD,
    DropReason.NO_REWARD,
    DropReason.REFUSED,
    DropReason.SUCCESS_RATE,
    DropReason.NO_TRAINABLE_TOKEN,
    DropReason.TRUNCATED_SAMPLING,
)
_PACKAGES = {
    package: distributions
    for facts in ENGINES.values()
    for package, distributions in facts.packages.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the end of a run leaves for the summary."""

    config: JobConfig
    trainer: Mapping[str, Any]
    """Content of trainer.json."""
    stats: ReplayStats
    collectors: tuple[Mapping[str, Any], ...]
    """Content of collector-<worker>.json of each collector process of the run."""
    rows_by_outcome: Mapping[str, int]
    """Number of lines of trajectories.jsonl by outcome."""
    rescoring: Mapping[str, Any]
    seconds_by_phase: Mapping[str, Mapping[str, float]]
    num_sampled_tokens: int
    redis_version: str = ""
    num_restarts: Mapping[str, int] = field(default_factory=dict)
    pace: Mapping[str, float] = field(default_factory=dict)
    is_resumed: bool = False
    alarms: tuple[str, ...] = ()
    """What was wrong with processes when the training ended."""


def conclude(run_dir: RunDir, config: JobConfig, **others: Any) -> dict[str, Any]:
    """Write summary.json and return what it holds: the summary and its gates.

    `others` are the findings beside those that the run's folder has.
    """
    findings = Findings(
        config=config,
        trainer=json.loads((run_dir.path / "trainer.json").read_text("utf-8")),
        collectors=read_collectors(run_dir.path),
        rows_by_outcome=count_outcomes(run_dir.path),
        pace=pace_of(run_dir.path / "metrics.jsonl"),
        is_resumed=run_dir.is_resumed,
        **others,
    )
    summary = summarise(findings)
    summary["gates"] = gates_of(summary, config)
    summary["ending"] = ending_of(summary)
    text = json.dumps(summary, indent=2) + "\n"
    (run_dir.path / "summary.json").write_text(text, encoding="utf-8")
    return summary


def summarise(findings: Findings) -> dict[str, Any]:
    """Return the whole summary except its gates."""
    trainer, stats = findings.trainer, findings.stats
    return {
        "run": findings.config.run,
        "engine": findings.config.engine,
        "store": findings.config.store,
        "seed": findings.config.seed,
        "versions": versions(findings.redis_version),
        "num_parameters": trainer["num_parameters"],
        **_seconds(findings),
        **_evaluations(trainer["evaluations"], findings.config.evaluation.min_share),
        "num_train_steps": trainer["num_train_steps"],
        "num_steps": trainer["num_steps"],
        "num_refused_updates": trainer["num_refused_updates"],
        "alarms": [*trainer["alarms"], *findings.alarms],
        "num_policy_versions": trainer["num_policy_versions"],
        "signal": signal(stats.training, trainer),
        "groups": group_counts(stats.training),
        "trajectories": trajectory_counts(stats.training),
        "evaluation_groups": group_counts(stats.evaluation),
        "evaluation_trajectories": trajectory_counts(stats.evaluation),
        "turns": turns(findings),
        "lengths": lengths(findings),
        "accounting": accounting(findings),
        "pace": dict(findings.pace),
        "staleness_histogram": trainer["staleness_histogram"],
        "share_of_train_steps_with_older_data": trainer["share_of_train_steps_with_older_data"],
        "max_logprob_difference": trainer["max_logprob_difference"],
        "forks": trainer["forks"],
        "heldout_losses": trainer.get("heldout_losses", {}),
        "stopped_early": trainer["stopped_early"],
        "gave_up": trainer["gave_up"],
        "rescoring": dict(findings.rescoring),
        "num_redelivered": stats.num_redelivered,
        "num_dead_letters": stats.num_dead_letters,
        "num_restarts": dict(findings.num_restarts),
    }


def pace_of(metrics: Path) -> dict[str, float]:
    """Return what the trainer waited for, from the rows of its train steps; empty without any.

    pipeline_depth: the last one. The others are medians over the steps: play_s_p99, train_s (a
    step's seconds without waiting for groups), and waiting_share, that of those seconds.
    """
    lines = metrics.read_text("utf-8").splitlines() if metrics.is_file() else []
    steps = [row for row in map(json.loads, lines) if "play_s_p99" in row]
    if not steps:
        return {}
    busy = [row["rows_s"] + row["train_s"] + row["wait_s"] for row in steps]
    waited = [row["lease_s"] for row in steps]
    return {
        "pipeline_depth": steps[-1]["pipeline_depth"],
        "play_s_p99": median(row["play_s_p99"] for row in steps),
        "train_s": median(busy),
        "waiting_share": median(w / (w + b) for w, b in zip(waited, busy, strict=True) if w + b),
    }


def _seconds(findings: Findings) -> dict[str, Any]:
    """Return total seconds, seconds by phase, and the rates that follow from them."""
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


def _evaluations(evaluations: Mapping[str, Mapping[str, Any]], min_share: float) -> dict[str, Any]:
    """Return held-out mean rewards and tool use; None for an evaluation that did not take place.

    There is no gain where fewer than `min_share` of the episodes of one count.
    """

    def value(label: str, name: str) -> float | None:
        return evaluations.get(label, {}).get(name)

    means = {
        f"heldout_{how}_{when}": value(f"{when}_{how}", "mean_reward")
        for how in ("greedy", "sampled")
        for when in ("before", "after")
    }
    rates = {
        f"tool_call_rate_{when}": value(f"{when}_sampled", "tool_call_rate")
        for when in ("before", "after")
    }
    before, after = (means[f"heldout_sampled_{when}"] for when in ("before", "after"))
    undecided = [label for label, result in evaluations.items() if share_in(result) < min_share]
    gain = None
    if before is not None and after is not None:
        is_decided = not {"before_sampled", "after_sampled"} & set(undecided)
        gain = after - before if is_decided else None
    return {
        **means,
        "heldout_sampled_gain": gain,
        **rates,
        "evaluations": {label: dict(result) for label, result in evaluations.items()},
        "undecided_evaluations": undecided,
    }


def group_counts(counts: LedgerCounts) -> dict[str, Any]:
    """Return groups: generated = trained + dropped by reason + left; and tasks not played yet."""
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
    """Return the trajectories that the queue has counted."""
    return {
        "generated": counts.num_trajectories_generated,
        "trained": counts.num_trajectories_consumed,
        "dropped": dict(counts.num_trajectories_dropped),
        "left": counts.num_trajectories_live,
    }


def signal(counts: LedgerCounts, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many candidate groups could be trained, and how many batches were empty.

    A candidate is a group that was trained, or dropped because it taught nothing.
    """
    dropped = counts.num_groups_dropped
    num_trained = counts.num_groups_consumed
    num_without = sum(dropped.get(reason, 0) for reason in _WITHOUT_SIGNAL)
    return {
        "num_candidates": num_trained + num_without,
        "num_trained": num_trained,
        "share": num_trained / max(1, num_trained + num_without),
        "num_empty_batches": trainer.get("num_empty_batches", 0),
    }


def turns(findings: Findings) -> dict[str, int]:
    """Return the turns that collectors have played, by purpose, and the limit of those to train."""
    played = {
        purpose: sum(counts[purpose]["num_turns"] for counts in findings.collectors)
        for purpose in ("training", "evaluation")
    }
    return played | {"total_turns": findings.config.collector.total_turns}


def lengths(findings: Findings) -> dict[str, dict[int, int]]:
    """Return training trajectories by sampled tokens: all that were played, and those trained.

    The key of a bin is its largest length (`dialoop_learning.rl.buckets`). If long answers are lost
    on the way, as by staleness, the two distributions differ.
    """
    generated: Counter[int] = Counter()
    for counts in findings.collectors:
        played = counts["training"].get("lengths", {})
        generated.update({int(longest): count for longest, count in played.items()})
    trained = findings.trainer.get("trained_lengths", {})
    return {
        "generated": dict(sorted(generated.items())),
        "trained": dict(sorted((int(longest), count) for longest, count in trained.items())),
    }


def accounting(findings: Findings) -> dict[str, Any]:
    """Return whether the queue's counts add up and agree with those of other services.

    A collector whose lease expired, or could not be given back, does not know whether the queue
    counts what it had played. The queue then has at most all of it, and at least the rest.
    """
    training = findings.stats.training
    evaluation = findings.stats.evaluation

    def sum_of(name: str) -> list[int]:
        of_all = (
            [counts[purpose].get(name, 0) for counts in findings.collectors]
            for purpose in ("training", "evaluation")
        )
        return [sum(numbers) for numbers in of_all]

    played, lost = sum_of("num_trajectories"), sum_of("num_trajectories_lost")
    generated = [counts.num_trajectories_generated for counts in (training, evaluation)]
    agree = all(
        most - unknown <= number <= most
        for most, unknown, number in zip(played, lost, generated, strict=True)
    )
    rows = findings.rows_by_outcome
    return {
        "ledger_adds_up": _adds_up(training) and _adds_up(evaluation),
        "played_by_collectors": dict(zip(("training", "evaluation"), played, strict=True)),
        "collectors_agree": agree or _lost_a_collector(findings),
        "recorded_as_trained": rows.get("trained", 0),
        "trainer_agrees": findings.trainer["num_trajectories_trained"]
        == training.num_trajectories_consumed,
    }


def _lost_a_collector(findings: Findings) -> bool:
    """Return whether a collector was killed: its counts of the last second are lost then."""
    return findings.is_resumed or findings.num_restarts.get("collector", 0) > 0


def _adds_up(counts: LedgerCounts) -> bool:
    final = counts.num_trajectories_consumed + sum(counts.num_trajectories_dropped.values())
    return bool(counts.num_trajectories_generated == final + counts.num_trajectories_live)


def versions(redis_version: str) -> dict[str, str]:
    """Return the versions of the software that took part; empty for what is not installed."""
    packages = {name: _first_installed(names) for name, names in _PACKAGES.items()}
    python = platform.python_version()
    return {"dialoop": dialoop.__version__, "redis": redis_version, "python": python, **packages}


def _first_installed(packages: Iterable[str]) -> str:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""


def read_collectors(run_dir: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the counters of every collector process that worked for the run."""
    files = sorted(run_dir.glob("collector-*.json"))
    return tuple(json.loads(file.read_text("utf-8")) for file in files)


def count_outcomes(run_dir: Path) -> Counter[str]:
    """Count the lines that are left of trajectories.jsonl by outcome."""
    counts: Counter[str] = Counter()
    for path in trajectory_files(run_dir):
        with path.open(encoding="utf-8") as lines:
            counts.update(json.loads(line)["outcome"] for line in lines)
    return counts


def gates_of(summary: Mapping[str, Any], config: JobConfig) -> dict[str, bool]:
    """Return each gate by name, and whether it holds: the end, exactness, what the config asks."""
    return {
        **gates_of_end(summary),
        **_exactness(summary, config),
        **_configured_gates(summary, config),
    }


def gates_of_end(summary: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether the job did what was asked, and nothing was wrong at its end."""
    done, asked, refused = (
        summary[name] for name in ("num_train_steps", "num_steps", "num_refused_updates")
    )
    is_ended_by_rule = bool(summary["stopped_early"]) and not summary["gave_up"]
    alarms = ", ".join(summary["alarms"])
    return {
        f"{asked} train steps were taken": done >= asked or (done > 0 and is_ended_by_rule),
        f"no update was refused{f' ({refused} were)' if refused else ''}": not refused,
        f"no alarm was on at the end{f' ({alarms})' if alarms else ''}": not alarms,
    }


def _exactness(summary: Mapping[str, Any], config: JobConfig) -> dict[str, bool]:
    bound = config.logprob_bound
    accounting = summary["accounting"]
    oldest = max((int(age) for age in summary["staleness_histogram"]), default=0)
    allowed = config.train.max_staleness
    fresh = (
        {}
        if allowed == "auto"
        else {f"nothing trained was staler than {allowed}": oldest <= allowed}
    )
    return {
        "every trajectory is accounted for": accounting["ledger_adds_up"]
        and accounting["collectors_agree"]
        and accounting["trainer_agrees"],
        **fresh,
        f"log-probs after every publish within {bound:g}": summary["max_logprob_difference"]
        <= bound,
        **_gates_of_rescoring(summary["rescoring"], config),
    }


def _gates_of_rescoring(rescoring: Mapping[str, Any], config: JobConfig) -> dict[str, bool]:
    """Return the gates of re-scoring; none where nothing was checked, which is no failure."""
    difference = rescoring.get("max_difference")
    if difference is None:
        return {}
    bound, most = config.logprob_bound, config.train.objective.max_fresh_mismatch_kl
    by_depth = {int(depth): values for depth, values in rescoring.get("by_depth", {}).items()}
    depth = first_above(by_depth, most)
    where = "at every depth" if depth is None else f"fails from depth {depth} on"
    return {
        f"re-scored log-probs within {bound:g}": difference <= bound,
        f"re-scored mismatch KL within {most:g} {where}": depth is None,
    }


def rescoring_options(config: JobConfig) -> dict[str, Any]:
    """Return how to re-score the job's trajectories; nothing where that is not to be done."""
    is_played = config.train.num_steps or config.evaluation.num_tasks
    if not is_played or not config.gates.rescoring_s:
        return {}
    return {
        "within_s": config.gates.rescoring_s,
        "device": config.train.device,
        "dtype": config.dtype,
        "max_row_tokens": config.train.row_tokens(config.inference.max_model_len),
        "replays_experts": int(config.train.replay_routed_experts),
    }


NOT_RESCORED: Mapping[str, Any] = MappingProxyType(
    {"num_trajectories": 0, "num_tokens": 0, "max_difference": None}
)
"""The result of a re-scoring that was not to be done."""


def _configured_gates(summary: Mapping[str, Any], config: JobConfig) -> dict[str, bool]:
    """Return the gates that the config names; none on too few of an evaluation's episodes holds."""
    gates, undecided = config.gates, set(summary["undecided_evaluations"])
    at_least: tuple[tuple[str, float | None, set[str]], ...] = (
        ("heldout_greedy_after", gates.heldout_greedy_after_at_least, {"after_greedy"}),
        (
            "heldout_sampled_gain",
            gates.heldout_sampled_gain_at_least,
            {"before_sampled", "after_sampled"},
        ),
        ("tool_call_rate_after", gates.tool_call_rate_after_at_least, {"after_sampled"}),
        ("share_of_train_steps_with_older_data", gates.older_data_share_at_least, set()),
        ("num_policy_versions", gates.policy_versions_at_least, set()),
    )
    results = {
        f"{name} at least {bound:g}": (summary[name] or 0) >= bound and not labels & undecided
        for name, bound, labels in at_least
        if bound is not None
    }
    bound = gates.heldout_greedy_before_at_most
    if bound is not None:
        before = summary["heldout_greedy_before"]
        is_known = before is not None and "before_greedy" not in undecided
        results[f"heldout_greedy_before at most {bound:g}"] = is_known and before <= bound
    return results


def ending_of(summary: Mapping[str, Any]) -> str:
    """Return in one sentence how the job ended: what it did, and what keeps it from a success."""
    done, asked = summary["num_train_steps"], summary["num_steps"]
    steps = f"{done} of {asked} train steps"
    why = f": {summary['stopped_early']}" if summary["stopped_early"] else ""
    wrong = [name for name, holds in summary["gates"].items() if not holds]
    if not wrong:
        return f"A success: {steps}{why}."
    return f"Not a success: {steps}{why}. What does not hold: {'; '.join(wrong)}."
