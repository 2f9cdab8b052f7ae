"""Write a run as logs of Inspect and as a project of trackio, which their viewers show.

    PYTHON benchmarks/console/other_viewers.py runs/demo OUT

PYTHON is that of an environment with inspect-ai and trackio, which are no dependencies of ours:
this file imports nothing of Dialoop. Inspect gets a log for each evaluation and for each train
step, with every trajectory as a sample: its messages, its reward as a score, its named rewards
beside it. trackio gets each number of metrics.jsonl at its train step, and each trajectory as a
trace. Both get the config.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by keys with strokes."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}/")
        else:
            found[prefix + name] = value
    return found


def rewards_of(row: dict[str, Any]) -> dict[str, float]:
    """Return the rewards of a trajectory by who gave them."""
    given: dict[str, float] = defaultdict(float)
    for turn in row["turns"]:
        for name, value in turn["rewards"].items():
            given[name] += value
    return dict(given)


def facts_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of a trajectory beside its messages."""
    names = ("outcome", "label", "train_step", "trajectory_id", "group_id", "task_key", "reward")
    names += ("num_tool_calls",)
    advantages = [sequence["advantage"] for sequence in row["sequences"]]
    facts = {name: row[name] for name in names} | {"rewards": rewards_of(row)}
    return facts | {"advantage": advantages[0] if advantages else None}


def write_for_inspect(rows: list[dict[str, Any]], config: dict[str, Any], folder: Path) -> None:
    """Write a log for each evaluation and each train step."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        name = row["label"] if row["outcome"] == "evaluation" else "train"
        groups[f"{name}_step_{row['train_step']:02}"].append(row)
    for name, own in groups.items():
        write_log(name, own, config, folder)


def write_log(name: str, rows: list[dict[str, Any]], config: dict[str, Any], folder: Path) -> None:
    """Write one log of Inspect."""
    from inspect_ai.log import (
        EvalConfig,
        EvalDataset,
        EvalLog,
        EvalMetric,
        EvalResults,
        EvalScore,
        EvalSpec,
        write_eval_log,
    )

    samples = [sample_of(row, number) for number, row in enumerate(rows)]
    rewards = [row["reward"] or 0.0 for row in rows]
    mean = EvalMetric(name="mean", value=sum(rewards) / len(rewards))
    log = EvalLog(
        status="success",
        eval=EvalSpec(
            created=datetime.now(UTC).isoformat(),
            task=name,
            dataset=EvalDataset(samples=len(samples)),
            model="policy",
            config=EvalConfig(),
            task_args=config,
        ),
        results=EvalResults(
            total_samples=len(samples),
            completed_samples=len(samples),
            scores=[EvalScore(name="reward", scorer="reward", metrics={"mean": mean})],
        ),
        samples=samples,
    )
    write_eval_log(log, str(folder / f"{name}.eval"))


def sample_of(row: dict[str, Any], number: int) -> Any:
    """Return a trajectory as a sample of Inspect."""
    from inspect_ai.log import EvalSample
    from inspect_ai.model import (
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageTool,
        ChatMessageUser,
        ModelOutput,
    )
    from inspect_ai.scorer import Score

    kinds = {"assistant": ChatMessageAssistant, "system": ChatMessageSystem}
    kinds |= {"tool": ChatMessageTool, "user": ChatMessageUser}
    messages = [kinds[m["role"]](content=m["content"] or "") for m in row["messages"]]
    said = [m["content"] or "" for m in row["messages"] if m["role"] == "assistant"]
    answer = said[-1] if said else ""
    score = Score(value=row["reward"] or 0.0, answer=answer, metadata=rewards_of(row))
    return EvalSample(
        id=f"{row['task_key']} {number}",
        epoch=1,
        input=row["messages"][0]["content"] or "",
        target="",
        messages=messages,
        output=ModelOutput.from_content("policy", answer),
        scores={"reward": score},
        metadata=facts_of(row),
    )


def write_for_trackio(
    rows: list[dict[str, Any]], metrics: list[dict[str, Any]], config: dict[str, Any], folder: Path
) -> None:
    """Log each row of metrics.jsonl, and each trajectory as a trace."""
    os.environ["TRACKIO_DIR"] = str(folder)
    import trackio

    trackio.init(project="run", name="run", config=config, auto_log_gpu=False, auto_log_cpu=False)
    for row in metrics:
        kind = "/".join(filter(None, (row["kind"], row.get("label"))))
        numbers = {
            f"{kind}/{name}": value
            for name, value in flat(row).items()
            if isinstance(value, (int, float)) and name not in ("time", "train_step")
        }
        trackio.log(numbers, step=row["train_step"])
    for row in rows:
        messages = [{"role": m["role"], "content": m["content"] or ""} for m in row["messages"]]
        trackio.log(
            {"trajectory": trackio.Trace(messages, metadata=facts_of(row))}, step=row["train_step"]
        )
    trackio.finish()


def main() -> None:
    """Convert the run."""
    run, out = Path(sys.argv[1]), Path(sys.argv[2])
    rows = [row for part in sorted(run.glob("trajectories*.jsonl")) for row in lines_of(part)]
    config = flat(json.loads((run / "run.json").read_text())["config"])
    for name in ("inspect", "trackio"):
        (out / name).mkdir(parents=True)
    write_for_inspect(rows, config, out / "inspect")
    write_for_trackio(rows, lines_of(run / "metrics.jsonl"), config, out / "trackio")


if __name__ == "__main__":
    main()
