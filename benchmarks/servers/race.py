"""Start the contenders of the reasoning race, and read their results."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from dialoop.environments import ChatEnv, load_environment
from dialoop.tasks.column_addition import final_number
from dialoop.templates.chat_template import ChatTemplate
from dialoop.tokens.builder import TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.config.file import parse_config, toml_of
from dialoop_services.trainer.data.demonstrations import warm_start_batches
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

ENVIRONMENT = "dialoop.tasks.column_addition:column_addition"
NAME = "column_addition"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What all contenders share; threads are the best for each one, and depth is the default."""

    seed: int = 0
    sft_steps: int = 250
    num_steps: int = 40
    groups: int = 16
    group_size: int = 8
    num_minibatches: int = 2
    learning_rate: float = 1e-4
    max_new_tokens: int = 32
    trl_threads: int = 2
    trainer_threads: int = 1
    pipeline_depth: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A policy: its weights, and the seconds of RL until it was ready."""

    train_step: int
    rl_s: float
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result of a contender; `rl_cpu_s` counts all its processes while it trained."""

    policies: tuple[Ready, ...]
    start_up_s: float
    rl_cpu_s: float
    cpu_s: float = 0.0


def environment() -> ChatEnv:
    """Return the environment of the task."""
    loaded = load_environment(ENVIRONMENT)
    assert isinstance(loaded, ChatEnv)
    return loaded


def warm_start(directory: Path, recipe: Recipe) -> Path:
    """Write the model directory that all start from: the tiny model after our supervised steps."""
    make_tiny_model(directory, seed=recipe.seed)
    settings = TrainerSettings(
        model_dir=directory,
        run_dir=directory / "sft",
        seed=recipe.seed,
        environment={"use": ENVIRONMENT, "name": NAME},
        warm_start={"num_steps": recipe.sft_steps},
    )
    tokenizer = Tokenizer.from_directory(directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    batches = warm_start_batches(settings, builder)
    learner = Learner(settings)
    for _ in range(recipe.sft_steps):
        learner.warm_start_step(learner.rows_to_imitate(next(batches)))
    learner.export(directory / "model.safetensors")
    return directory


def contend(name: str, model: Path, folder: Path, recipe: Recipe, *, trl_python: str) -> Run:
    """Let a contender train to its end, in processes of its own."""
    started, before = time.time(), _cpu_s()
    is_trl = name.startswith("trl")
    if is_trl:
        threads = 1 if name == "trl_one_thread" else recipe.trl_threads
        command = _trl_command(model, folder, recipe, trl_python, threads)
    else:
        command = _command_of(name, model, folder, recipe)
        threads = recipe.trainer_threads
    variables = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        # Threads that wait do not spin: other work on the machine would stretch it for all alike.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables, "PYTHONPATH": paths},
        stdout=sys.stderr,
        check=False,
    )
    run = read_trl(folder, started) if is_trl else read_ours(folder, started)
    if len(run.policies) < recipe.num_steps:
        raise RuntimeError(f"{name} ended after {len(run.policies)} train steps ({done})")
    return replace(run, cpu_s=_cpu_s() - before)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def job_of(name: str, model: Path, recipe: Recipe) -> dict[str, Any]:
    """Return our job: the task's shipped config, from the warm-started model, no evaluations."""
    engine = "vllm" if name == "vllm" else "transformers"
    return {
        "run": "race",
        "seed": recipe.seed,
        "engine": engine,
        "store": "memory" if name == "in_process" else "redis",
        "model": {"directory": str(model)},
        "environment": {"use": ENVIRONMENT, "name": NAME},
        "inference": {"max_model_len": 64, "max_num_seqs": 128},
        "collector": {
            "group_size": recipe.group_size,
            "max_new_tokens": recipe.max_new_tokens,
            "max_groups_in_flight": 2 * recipe.groups,
        },
        "train": {
            "num_steps": recipe.num_steps,
            "groups_per_train_step": recipe.groups,
            "num_minibatches": recipe.num_minibatches,
            "loss": "grpo",
            "learning_rate": recipe.learning_rate,
            "pipeline_depth": recipe.pipeline_depth,
            "num_threads": recipe.trainer_threads,
            "keep_policies": 0,  # all are evaluated afterwards
        },
        "evaluation": {"num_tasks": 0, "every": 0},
    }


def _command_of(name: str, model: Path, folder: Path, recipe: Recipe) -> list[str]:
    job = job_of(name, model, recipe)
    if name == "in_process":
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        return [sys.executable, "-m", "benchmarks.servers.in_process_job", "job.json", "runs"]
    text = toml_of(parse_config(job, source="the race"))
    (folder / "job.toml").write_text(text, encoding="utf-8")
    return [sys.executable, "-m", "dialoop_ops.stack", "train", "job.toml", "--fresh"]


def read_ours(folder: Path, started: float) -> Run:
    """Read our run. RL begins when the first policy is live; episodes are played from then."""
    run_dir = folder / "runs" / "race"
    lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "publish"]
    first = rows[0]["time"]
    policies = tuple(
        Ready(
            train_step=row["train_step"],
            rl_s=row["time"] - first,
            path=run_dir
            / "policies"
            / f"{row['lineage']}-{row['policy_version']}"
            / "model.safetensors",
        )
        for row in rows[1:]
    )
    summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
    cpu_s = summary["seconds_by_phase"].get("training", {}).get("cpu_s", 0.0)
    return Run(policies=policies, start_up_s=first - started, rl_cpu_s=cpu_s)


def _trl_command(model: Path, folder: Path, recipe: Recipe, python: str, threads: int) -> list[str]:
    tasks = environment().tasks
    questions = [tasks.get("train", key) for key in tasks.keys("train")]
    rows = [{"question": task.question, "answer": task.answer} for task in questions]
    (folder / "tasks.json").write_text(json.dumps(rows), encoding="utf-8")
    options = asdict(recipe) | {"model": str(model), "tasks": "tasks.json", "out": str(folder)}
    options["threads"] = threads
    arguments = ["-W", "ignore", "-m", "benchmarks.servers.trl_grpo", json.dumps(options)]
    return [str(Path(python).absolute()), *arguments]


def read_trl(folder: Path, started: float) -> Run:
    """Read TRL's run. RL begins with the training, before the first batch of prompts is sampled."""
    report = json.loads((folder / "trl.json").read_text("utf-8"))
    policies = tuple(
        Ready(
            train_step=row["train_step"],
            rl_s=row["rl_s"],
            path=folder / f"{row['train_step']}.safetensors",
        )
        for row in report["train_steps"]
    )
    cpu_s = report["train_steps"][-1]["cpu_s"]
    return Run(policies=policies, start_up_s=report["begun_s"] - started, rl_cpu_s=cpu_s)


def heldout_accuracy(model: Path, weights: Path, recipe: Recipe, *, samples: int) -> float:
    """Return the share of right answers at temperature 1, `samples` for each held-out task."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    policy.load_state_dict(load_file(weights), strict=False)
    policy.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tasks = environment().tasks
    keys = [key for key in tasks.keys("heldout") for _ in range(samples)]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": key}], add_generation_prompt=True, tokenize=False
        )
        for key in keys
    ]
    prompts = tokenizer(texts, return_tensors="pt", padding=True)
    torch.manual_seed(recipe.seed)
    with torch.inference_mode():
        rows = policy.generate(
            **prompts, max_new_tokens=recipe.max_new_tokens, do_sample=True, top_k=0
        )
    sampled = rows[:, prompts["input_ids"].shape[1] :]
    whole = (sampled == tokenizer.eos_token_id).any(dim=1).tolist()
    answers = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    right: list[bool] = [
        ended and final_number(answer) == tasks.get("heldout", key).answer
        for ended, answer, key in zip(whole, answers, keys, strict=True)
    ]
    return sum(right) / len(right)


def first_above(curve: Sequence[tuple[Ready, float]], threshold: float) -> Ready | None:
    """Return the first policy of a curve that is good enough."""
    return next((ready for ready, accuracy in curve if accuracy >= threshold), None)
