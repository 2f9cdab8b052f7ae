"""A checkpoint of a real shape goes through GRPO, and takes what `dialoop config check` said.

The small one has Qwen3-0.6B's head and tokenizer over a small body. Where it works, the large one
needs nothing but memory (about 15 GiB) and time. DIALOOP_FIGURES=FILE keeps what was measured.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.model.real_shapes import make_real_shape
from dialoop_ops.stack.estimates import estimate_of
from dialoop_ops.stack.preflight import gflops_of_this_machine
from dialoop_services.config.file import load_config

from tests.support.stack_jobs import Job, lines_of, wait_for

WITHIN = 0.2
"""By which the run's figures may differ from what was said before."""
SMALL_BODY = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SHAPES = {
    "small-body": pytest.param(SMALL_BODY, 3600, id="small-body", marks=pytest.mark.timeout(3600)),
    "qwen3-0.6b": pytest.param({}, 14_000, id="qwen3-0.6b", marks=pytest.mark.timeout(14_400)),
}
CONFIG = """
run = "job"
engine = "vllm"
store = "memory"
console = false
hang_timeout_s = 0
[model]
directory = "model"
{lora}
[environment]
use = "trl"
options = {{dataset = "rows.jsonl", reward_funcs = ["rewards.py:spread"]}}
[inference]
dtype = "bfloat16"
max_model_len = 4096
max_num_seqs = 4
kv_cache_mib = {cache}
data_plane = "chunks"
answer_base_s = 3000
[collector]
group_size = 2
max_new_tokens = 8
lease_s = 3000
max_groups_in_flight = 1
[warm_start]
num_steps = 0
[train]
num_steps = 2
num_threads = {num_threads}
groups_per_train_step = 1
num_minibatches = 1
pipeline_depth = 0
checkpoint_every = 1
activation_checkpointing = true
publish_deadline_s = 1200
lease_s = 3000
[evaluation]
num_tasks = 0
every = 0
[gates]
rescoring_s = {rescoring_s}
"""
REWARDS = '''
def spread(prompts, completions, **columns):
    """Differ from answer to answer: what a random model says is noise."""
    return [sum(map(ord, completion[0]["content"])) % 97 / 97 for completion in completions]
'''
COMMANDS = {
    "trainer": ("dialoop_services.trainer",),
    "inference": ("dialoop_services.inference", "VLLM::EngineCore"),
}
PROMPT_TOKENS = 4000
RESCORING_S = 600
NUM_THREADS = 2


@dataclass
class Watch:
    """Looks twice a second at the memory of a job's processes; keeps the largest of each service.

    Memory of all processes of a service, vLLM's engine core among them.
    """

    job: Job
    peaks: dict[str, int] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Look until the job has ended."""
        while not self.ended.wait(0.5):
            now: dict[str, int] = {}
            for pid, command in self.job.left_running().items():
                for service, words in COMMANDS.items():
                    if any(word in command for word in words):
                        now[service] = now.get(service, 0) + memory_of(pid)
            for service, size in now.items():
                self.peaks[service] = max(size, self.peaks.get(service, 0))


def memory_of(pid: int) -> int:
    """Return the bytes of a process that no file backs, its share of what a fork has in common."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text("utf-8")
    except OSError:
        return 0
    (line,) = (line for line in text.splitlines() if line.startswith("Pss_Anon:"))
    return int(line.split()[1]) << 10


def write_rows(folder: Path) -> None:
    """Write prompts of 4,000 tokens, of words that the tokenizer does not join."""
    tokenizer, chance = Tokenizer.from_directory(folder / "model"), random.Random(0)
    rows = []
    for _ in range(16):
        words: list[str] = []
        while len(tokenizer.encode(" ".join(words)).ids) < PROMPT_TOKENS:
            words += ["".join(chance.choices("abcdefghijklmnop", k=6)) for _ in range(100)]
        ids = tokenizer.encode(" ".join(words)).ids[:PROMPT_TOKENS]
        rows.append({"prompt": [{"role": "user", "content": tokenizer.decode(ids)}]})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text, encoding="utf-8")
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")


@pytest.mark.heavy(reason="vLLM and a trainer of a real shape")
@pytest.mark.vllm
@pytest.mark.parametrize("adapts", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(("fields", "patience_s"), list(SHAPES.values()))
def test_a_real_shape_trains_and_takes_what_was_said(
    fields: dict[str, Any], patience_s: float, adapts: bool, tmp_path: Path
) -> None:
    make_real_shape(tmp_path / "model", fields=fields, shard="60MB" if fields else "300MB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    write_rows(tmp_path)
    values = {
        "lora": "lora_rank = 8" if adapts else "",
        "cache": 64 if fields else 1024,
        "rescoring_s": RESCORING_S,
        "num_threads": NUM_THREADS,
    }
    (tmp_path / "job.toml").write_text(CONFIG.format(**values), encoding="utf-8")
    estimate = estimate_of(load_config(tmp_path / "job.toml", environment={}))
    assert estimate is not None
    with Job(tmp_path, "train", "job.toml") as job:
        watch = Watch(job)
        looking = threading.Thread(target=watch.run)
        looking.start()
        try:
            kill_in_mid_publish(job, patience_s)
            ended = job.end(patience_s)
        finally:
            watch.ended.set()
            looking.join()
    assert ended.exit_code == 0, ended.output[-4000:]
    summary = ended.summary
    figures = figures_of(summary, ended.run_dir, watch.peaks, estimate)
    keep(figures, f"{'small-body' if fields else 'qwen3-0.6b'}-{'lora' if adapts else 'full'}")
    assert summary["num_train_steps"] == 2
    assert figures["rescoring_rows"] > 0
    assert figures["publish_bytes"] == pytest.approx(figures["publish_bytes_said"], rel=WITHIN)
    for service in ("trainer", "inference"):
        measured, expected = figures[service]["measured"], figures[service]["said"]
        assert measured == pytest.approx(expected, rel=WITHIN), figures


def keep(figures: dict[str, Any], name: str) -> None:
    """Put the figures of a case into the file that DIALOOP_FIGURES names."""
    path = Path(os.environ.get("DIALOOP_FIGURES", os.devnull))
    content = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    content = content or {"benchmark": "tests/e2e/test_real_shape.py", "cores": os.cpu_count()}
    content.setdefault("runs", {})[name] = figures
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def kill_in_mid_publish(job: Job, patience_s: float) -> None:
    """End the trainer with SIGKILL while it writes the policy of its first train step."""
    policies = job.run_dir / "policies"

    def is_writing() -> bool:
        assert job.process.poll() is None, job.output[-4000:]
        return any(not path.name.endswith("-0") for path in policies.glob("*-*"))

    wait_for(is_writing, patience_s)
    time.sleep(0.2)
    pid = job.service("trainer")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def figures_of(
    summary: dict[str, Any], run_dir: Path, peaks: dict[str, int], estimate: Any
) -> dict[str, Any]:
    rows = [json.loads(line) for line in lines_of(run_dir / "metrics.jsonl")]
    steps = [row for row in rows if row["kind"] == "train"]
    published = max((run_dir / "policies").glob("*/*.safetensors"), key=os.path.getmtime)
    names = {"trainer": "trainer", "inference": "inference-0"}
    return {
        "publish_bytes": published.stat().st_size,
        "publish_bytes_said": estimate.publish_bytes,
        "train_s": [row["train_s"] for row in steps],
        "step_tflop_at_most": estimate.step_products / 1e12,
        "gflops_of_the_machine": gflops_of_this_machine() * NUM_THREADS,
        "load": os.getloadavg(),
        "rescoring_rows": summary["rescoring"]["num_rows"],
        "rescoring_max_difference": summary["rescoring"]["max_difference"],
        **{
            service: {"measured": peaks[service], "said": estimate.processes[name].total}
            for service, name in names.items()
        },
    }
