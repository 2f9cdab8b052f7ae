"""Put published bugs into a job, and show that it ends well without the checks, and not with them.

    python -m benchmarks.audit.silent_bugs

Each bug is a patch of the engine in this process. Without checks the job trains to its end: its
losses are finite and its rewards plausible. With them `dialoop audit` reads the run after every
train step, and the job is stopped at the first finding that names a trajectory and a token. A job
without a bug runs too, and is not stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dialoop
import torch
from dialoop.audit import AuditFinding, audit
from dialoop.audit.report import ERROR
from dialoop_services.inference.transformers_engine import engine as engine_module
from dialoop_services.inference.transformers_engine.batch import DecodingBatch

Patch = Callable[[], None]
NUM_STEPS = 8
TOP_K = 3


def adapter_never_delivered() -> None:
    """Answer that the second and every later adapter is loaded, and load none (verl #7495)."""
    real, loads = engine_module.copy_weights, iter(range(1_000_000))

    def copy_weights(model: Any, tensors: dict[str, torch.Tensor], *, tied: bool) -> None:
        if next(loads) == 0:
            real(model, tensors, tied=tied)

    engine_module.copy_weights = copy_weights


def stale_tied_head() -> None:
    """Keep the head of the first policy where it should be the embedding of each."""
    real = engine_module.copy_weights

    def copy_weights(model: Any, tensors: dict[str, torch.Tensor], *, tied: bool) -> None:
        # A copy of the head no longer follows the embedding, in which the new weights arrive.
        head = copy.deepcopy(model.lm_head.weight.data)
        is_first = not hasattr(model, "first_head")
        model.lm_head.weight = model.get_input_embeddings().weight
        real(model, tensors, tied=tied)
        model.first_head = model.lm_head.weight.data.clone() if is_first else head
        model.lm_head.weight = torch.nn.Parameter(model.first_head, requires_grad=False)

    engine_module.copy_weights = copy_weights


def stale_prefix_cache() -> None:
    """Take the keys of each prompt from the first policy, as a cache that no load empties."""
    real_copy, real_admit = engine_module.copy_weights, DecodingBatch.admit
    first: list[Any] = []

    def copy_weights(model: Any, tensors: dict[str, torch.Tensor], *, tied: bool) -> None:
        real_copy(model, tensors, tied=tied)
        if not first:
            first.append(copy.deepcopy(model))

    def admit(self: DecodingBatch, rows: Any, which: Any = None) -> torch.Tensor:
        fresh, self._model = self._model, first[0] if first else self._model
        try:
            return real_admit(self, rows, which)
        finally:
            self._model = fresh

    engine_module.copy_weights = copy_weights
    DecodingBatch.admit = admit  # type: ignore[method-assign]


def truncated_sampling() -> None:
    """Sample from the likeliest tokens alone, where the job said nothing of it."""
    real = engine_module.processed_logprobs

    def processed_logprobs(logits: torch.Tensor, sampling: Any, token_ids: Any) -> torch.Tensor:
        least = logits.topk(TOP_K, dim=-1).values[:, -1:]
        return real(logits.masked_fill(logits < least, float("-inf")), sampling, token_ids)

    engine_module.processed_logprobs = processed_logprobs


BUGS: dict[str, Patch] = {
    "adapter_never_delivered": adapter_never_delivered,
    "stale_tied_head": stale_tied_head,
    "stale_prefix_cache": stale_prefix_cache,
    "truncated_sampling": truncated_sampling,
}


def config_of(name: str, model: str) -> dict[str, Any]:
    """Return the job: the demo's task, for a few steps; without a model it makes one."""
    config: dict[str, Any] = {
        "run": name,
        "collector": {"group_size": 8, "max_new_tokens": 24, "max_groups_in_flight": 8},
        "train": {
            "num_steps": NUM_STEPS if model else 0,
            "groups_per_train_step": 8,
            "learning_rate": 3e-4,
            "pipeline_depth": 1,
            "debug_table_every": 1,
        },
        "warm_start": {"num_steps": 0 if model else 200, "batch_size": 64},
        "evaluation": {"num_tasks": 32 if model else 0},
        "gates": {"rescoring_s": 0, "logprob_difference_at_most": 1e-3},
    }
    if model:
        config["model"] = {"directory": model}
        if name == "adapter_never_delivered":
            config["model"] |= {"lora_rank": 16}
            config["train"]["learning_rate"] = 3e-3
    return config


def finding_of(run_dir: Path) -> AuditFinding | None:
    """Return an error of the run that names a trajectory and a token."""
    for finding in audit(run_dir).findings:
        evidence = finding.evidence[0]
        if finding.severity == ERROR and evidence.trajectory and evidence.token is not None:
            return finding
    return None


async def play(name: str, model: str, folder: Path, *, with_checks: bool) -> dict[str, Any]:
    """Run a job, stop it at a finding, and return what became of it."""
    config = config_of(name, model)
    rows: list[dict[str, Any]] = []
    async with dialoop.Job(config, in_process=True, folder=folder, fresh=True, quiet=True) as job:
        async for row in job.metrics():
            rows.append(row)
            if with_checks and row["kind"] == "train":
                finding = await asyncio.to_thread(finding_of, folder / name)
                if finding is not None:
                    return {
                        "stopped_at": row["train_step"],
                        "fault": finding.fault,
                        "evidence": str(finding.evidence[0]),
                    }
        await job.result()
    trained = [row for row in rows if row["kind"] == "train"]
    means = [row["mean_reward"] for row in rows if row["kind"] == "evaluation"]
    return {
        "num_steps": len(trained),
        "losses_are_finite": all(abs(row["loss"]) < 1e6 for row in trained),
        "rewards": [round(row["reward"], 3) for row in trained],
        "heldout": [round(mean, 3) for mean in means],
    }


def in_own_process(name: str, model: str, folder: Path, *, with_checks: bool) -> dict[str, Any]:
    """Run one job in a process of its own, which the patch of a bug changes."""
    words = ["--only", name, "--model", model, "--folder", str(folder)]
    command = [sys.executable, "-m", "benchmarks.audit.silent_bugs", *words]
    ended = subprocess.run(
        [*command, "--checks"] if with_checks else command,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if ended.returncode:
        raise SystemExit(f"{name} failed:\n{ended.stderr[-2000:]}")
    outcome: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return outcome


def all_bugs(names: list[str], model: str) -> int:
    """Run each bug without and with the checks; return 1 where one does not behave as it should."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dialoop-silent-bugs-") as scratch:
        folder = Path(scratch)
        if not model:
            in_own_process("warm_start", "", folder, with_checks=False)
            model = str(folder / "model")
            export = [sys.executable, "-m", "dialoop.cli.main", "export"]
            export += [str(folder / "warm_start"), "latest", model]
            subprocess.run(export, stdout=subprocess.DEVNULL, check=True)
        for name in ("no_bug", *names):
            result = {
                "without": in_own_process(name, model, folder, with_checks=False),
                "with": in_own_process(name, model, folder, with_checks=True),
            }
            results[name] = result
            sys.stderr.write(f"{name}: {json.dumps(result)}\n")
    wrong = [name for name, result in results.items() if not behaves(name, result)]
    report = {"bugs": len(names), "wrong": wrong, "results": results}
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return int(bool(wrong))


def behaves(name: str, result: dict[str, Any]) -> bool:
    """Return whether the job ends without checks, and with them only if there is no bug."""
    ends = result["without"].get("num_steps") == NUM_STEPS
    stops = "stopped_at" in result["with"]
    return bool(ends and result["without"]["losses_are_finite"] and stops == (name in BUGS))


def main() -> int:
    """Run all bugs, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="some of the bugs (all)")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="", help="model to start with (one is warmed up)")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--checks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.only:
        return all_bugs(options.names or list(BUGS), options.model)
    torch.set_num_threads(1)  # threads that wait for each other take most of a busy machine
    if options.only in BUGS:
        BUGS[options.only]()
    playing = play(options.only, options.model, options.folder, with_checks=options.checks)
    sys.stdout.write(json.dumps(asyncio.run(playing)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
