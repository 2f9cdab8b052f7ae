"""Give twenty mistakes to TRL and to us: which are named before a train step is taken?

    python -m benchmarks.real.mistakes > mistakes.json

Each mistake is one change of a job of two steps on a tiny model, whose rows, reward functions and
model directory both sides share. Of each the result has one of these words:

    named    it stopped before a step, and the error says what is wrong
    stopped  it stopped before a step, and the error does not say it
    warned   a line says it, and the job went on all the same
    silent   steps were trained, or it hung, and nothing said it

An error or line says what is wrong if it has the word that the mistake is listed with. TRL gets a
virtual environment of its own over ours. verl trains on a GPU alone, and prime-rl is not on PyPI.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 45
"""Seconds after which TRL's job is ended, and only what it printed counts."""
ROW = {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}
FUNCTIONS = """
import time

def right(completions, **kwargs):
    return [float(len(c[0]["content"]) % 3) for c in completions]

def nan(completions, **kwargs):
    return [float("nan") for _ in completions]

def infinite(completions, **kwargs):
    return [float("inf") for _ in completions]

def words(completions, **kwargs):
    return ["very good" for _ in completions]

def many(completions, **kwargs):
    return [1.0] * (len(completions) + 1)

def failing(completions, **kwargs):
    return [{}["target"] for _ in completions]

def hanging(completions, **kwargs):
    time.sleep(600)

def wanting(completions, target, **kwargs):
    return [0.0 for _ in completions]
"""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """What both sides are given that is wrong, and what an answer that names it has."""

    word: str
    reward: str = "right"
    row: dict[str, Any] = field(default_factory=lambda: ROW)
    model: str = "whole"
    trl: dict[str, Any] = field(default_factory=dict)
    lora: tuple[str, ...] = ()
    in_model: str = ""
    lines: str = ""


LONG = {**ROW, "prompt": [{"role": "user", "content": "one and one " * 300}]}
MISTAKES = {
    "rewards are not a number": Mistake(word=r"\bnan\b|finite", reward="nan"),
    "rewards are infinite": Mistake(word=r"\binf\b|finite", reward="infinite"),
    "rewards are texts": Mistake(word="very good|str", reward="words"),
    "a reward too many": Mistake(word="gave|returned|expected|number of", reward="many"),
    "a reward function raises": Mistake(word="KeyError", reward="failing"),
    "a reward function hangs": Mistake(word="took more|timed out", reward="hanging"),
    "a reward wants a column that is not there": Mistake(word="target", reward="wanting"),
    "a column that nothing reads": Mistake(word="anwser", row={**ROW, "anwser": "2"}),
    "the prompt's column is misspelt": Mistake(
        word="promt|prompt", row={"promt": ROW["prompt"], "answer": "2"}
    ),
    "the model has no chat template": Mistake(word="template", model="untemplated"),
    "the model is not there": Mistake(word="no-model", model="./no-model"),
    "a tensor is missing in the checkpoint": Mistake(word="model.norm", model="torn"),
    "LoRA names a layer that is not there": Mistake(
        word="q_prj", lora=("q_prj",), in_model='lora_rank = 8\nlora_targets = ["q_prj"]\n'
    ),
    "the loss is misspelt": Mistake(
        word="gpro", trl={"loss_type": "gpro"}, lines='[train]\nloss = "gpro"\n'
    ),
    "a setting is misspelt": Mistake(
        word="learning_rat", trl={"learning_rat": 1e-6}, lines="[train]\nlearning_rat = 1e-6\n"
    ),
    "the learning rate is below 0": Mistake(
        word="learning_rate|learning rate",
        trl={"learning_rate": -1e-6},
        lines="[train]\nlearning_rate = -1e-6\n",
    ),
    "the temperature is 0": Mistake(
        word="temperature", trl={"temperature": 0.0}, lines="[collector]\ntemperature = 0.0\n"
    ),
    "groups of one": Mistake(
        word="num_generations|generations|group_size",
        trl={"num_generations": 1},
        lines="[collector]\ngroup_size = 1\n",
    ),
    "prompts are longer than the model reads": Mistake(word="512|longer|max_model_len", row=LONG),
    "answers are longer than the model reads": Mistake(
        word="512|longer|max_model_len|max_new_tokens",
        trl={"max_completion_length": 4096},
        lines="[collector]\nmax_new_tokens = 4096\n",
    ),
}


def make_models(folder: Path) -> None:
    """Write a tiny model, one without a chat template, and one that lacks a tensor."""
    from safetensors.torch import load_file, save_file

    from benchmarks.servers.families import make_family

    whole = make_family("qwen3", folder / "whole")
    for name in ("untemplated", "torn"):
        shutil.copytree(whole, folder / name)
    config = folder / "untemplated" / "tokenizer_config.json"
    fields = json.loads(config.read_text("utf-8"))
    config.write_text(json.dumps({k: v for k, v in fields.items() if k != "chat_template"}))
    weights = folder / "torn" / "model.safetensors"
    tensors = {k: v for k, v in load_file(weights).items() if k != "model.norm.weight"}
    save_file(tensors, weights, metadata={"format": "pt"})


def give_to_us(name: str, folder: Path) -> str:
    """Return the word for what `dialoop config check` and the start of a job say of a mistake."""
    mistake = MISTAKES[name]
    text = (
        'run = "mistake"\nengine = "transformers"\nstore = "memory"\n'
        f'[model]\ndirectory = "{mistake.model}"\n{mistake.in_model}{mistake.lines}'
        '[environment]\nuse = "trl"\noptions = { dataset = "rows.jsonl", reward_funcs = '
        f'"functions.py:{mistake.reward}" }}\n[evaluation]\nnum_tasks = 0\n'
    )
    (folder / "job.toml").write_text(text)
    (folder / "rows.jsonl").write_text((json.dumps(mistake.row) + "\n") * 8)
    command = [sys.executable, "-m", "dialoop_ops.stack", "config", "check", "job.toml"]
    checked = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    said = re.search(mistake.word, checked.stdout + checked.stderr, re.IGNORECASE)
    if checked.returncode:
        return "named" if said else "stopped"
    return "warned" if said else "silent"


@contextlib.contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """Send what this process prints to a file, whoever prints it."""
    before = os.dup(1), os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            for number, kept in zip((1, 2), before, strict=True):
                os.dup2(kept, number)
                os.close(kept)


def give_to_trl(name: str, folder: Path) -> str:
    """Return the word for what TRL's GRPOTrainer does with a mistake; run by TRL's Python."""
    trl, datasets, peft = map(importlib.import_module, ("trl", "datasets", "peft"))
    mistake, trainer = MISTAKES[name], None
    options = {"output_dir": "out", "max_steps": 2, "per_device_train_batch_size": 4}
    options |= {"num_generations": 4, "max_completion_length": 8, "report_to": [], "use_cpu": True}
    options |= {"bf16": False, "save_strategy": "no", "gradient_checkpointing": False}
    functions: dict[str, Any] = {}
    exec(FUNCTIONS, functions)
    error = ""
    with printed_to(folder / "printed"):
        signal.alarm(LIMIT_S)
        try:
            trainer = trl.GRPOTrainer(
                model=mistake.model,
                reward_funcs=functions[mistake.reward],
                args=trl.GRPOConfig(**(options | mistake.trl)),
                train_dataset=datasets.Dataset.from_list([mistake.row] * 8),
                peft_config=peft.LoraConfig(target_modules=list(mistake.lora))
                if mistake.lora
                else None,
            )
            trainer.train()
        except Exception as raised:
            error = "".join(traceback.format_exception(raised, limit=0))  # and what caused it
        finally:
            signal.alarm(0)
    num_steps = trainer.state.global_step if trainer is not None else 0
    is_late = f"{LIMIT_S} s have passed" in error
    if error and not num_steps and not is_late:
        return "named" if re.search(mistake.word, error, re.IGNORECASE) else "stopped"
    printed = error * (not is_late) + (folder / "printed").read_text("utf-8", errors="replace")
    return "warned" if re.search(mistake.word, printed, re.IGNORECASE) else "silent"


def _time_is_up(*_: object) -> None:
    raise TimeoutError(f"{LIMIT_S} s have passed")


def words_of_trl(folder: Path) -> tuple[str, dict[str, str]]:
    """Return TRL's version and its words, from a process of its own environment."""
    from benchmarks.real.race import make_trl_python

    python = make_trl_python(ROOT / "runs" / "mistakes")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(
        [str(python.absolute()), "-W", "ignore", "-m", "benchmarks.real.mistakes", "trl"],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT)},
        check=True,
    )
    (found,) = python.parents[1].glob("lib/python*/site-packages/trl-*.dist-info")
    version = metadata.Distribution.at(found).version
    return version, json.loads((folder / "words.json").read_text("utf-8"))


def main() -> None:
    """Give the mistakes to both sides; with "trl" as argument to TRL alone, in this folder."""
    if sys.argv[1:] == ["trl"]:
        signal.signal(signal.SIGALRM, _time_is_up)
        words = {name: give_to_trl(name, Path.cwd()) for name in MISTAKES}
        Path("words.json").write_text(json.dumps(words))
        return
    from benchmarks.servers.figures import print_figures

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_models(folder)
        (folder / "functions.py").write_text(FUNCTIONS)
        ours = {name: give_to_us(name, folder) for name in MISTAKES}
        version, theirs = words_of_trl(folder)
    sides = {"dialoop": ours, f"trl {version}": theirs}
    print_figures(
        {
            "not_run": {
                "verl 0.9.1": "it knows no accelerator of this machine",
                "prime-rl": "not on PyPI",
            },
            "num_mistakes": len(MISTAKES),
        },
        {
            "num_named": {
                side: sum(w == "named" for w in words.values()) for side, words in sides.items()
            },
            "words": {name: {side: words[name] for side, words in sides.items()} for name in ours},
        },
    )


if __name__ == "__main__":
    main()
