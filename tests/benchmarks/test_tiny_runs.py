"""Every benchmark runs from end to end on the least work, and finds something."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
RUNS = {
    "adding_a_turn": "--turns 2 --words 5 --repeats 2",
    "answers": "--tokens 200",
    "audit.planted": "--cases 1 --fault sampling_mismatch",
    "audit.rollouts": "demo",
    "console.many_tokens": f"--browser {CHROMIUM} --trajectories 500 --rounds 1",
    "cpu_executors": "--rounds 1",
    "demo_cpu": "--rounds 1",
    "environment_doors": "--sessions 2 --seconds 0.3 --rounds 1",
    "environment_steps": "--sessions 2 --episodes 2",
    "environment_steps --in-process": "",
    "environment_steps --stream": "--sessions 2 --seconds 0.3",
    "fleet.registry_members": "--instances 20 --seconds 6",
    "fleet.routing": "--groups 2 --groups-in-flight 2 --turns 4",
    "fleet.trainer_ranks": "--rounds 1 --steps 1 --hidden 128 --layers 2",
    "fleet.trainer_ranks --saves 1": "--hidden 128 --layers 2",
    "forest": "--rounds 1 --scale 0.05",
    "generate_turns": "--repeats 1 --turns 1 2",
    "half_precision": "--families qwen3 --tokens 500",
    "inference_tokens": "--requests 1 --rounds 1",
    "learn_in_process": "--sft-steps 3 --rl-steps 1",
    "path_of_a_prompt": "",
    "path_of_a_prompt --rest-step": "",
    "publish_pause": "--engines transformers --sizes 3m --times 1",
    "real.deltas": "--tiny --steps 2 --rates 1e-6 --formats float32",
    "reasoning_race": "--contenders in_process --num-steps 2 --samples 1",
    "rendering": "--turns 2 --words 5 --calls 3",
    "replay_throughput": "--groups 40 --tokens 16",
    "sandbox": "--calls 3",
    "soak.attacks": "--minutes 0.1",
    "start_up": "--tries 2",
    "step_turns": "--rounds 1 --sessions 1 --episodes 1 --turns 1 4",
    "task_file": "--num-tasks 2000 --rounds 1",
    "train_step": "--rounds 1 --prompts 1 --vocabulary 1024 --ways ours",
}
LEFT_OUT = {
    "dividend": "minutes a run; tests/benchmarks/test_dividend.py reads its results",
    "console.other_viewers": "console.side_by_side runs it",
    "console.side_by_side": "it needs Inspect and trackio, and a run of the demo",
    "gpu.engine": "a check of gpu.smoke",
    "gpu.evidence": "tests/unit/infra/test_gpu_evidence.py rehearses it",
    "gpu.pack": "it downloads vLLM for a GPU",
    "gpu.rates": "a line of gpu.evidence",
    "gpu.real_model": "gpu.evidence makes its model with it",
    "gpu.real_shape": "it needs a GPU",
    "gpu.smoke": "gpu.evidence runs its checks",
    "gpu.train_step": "a check of gpu.smoke",
    "learn": "make learn trains by every algorithm",
    "real.mistakes": "it needs TRL; tests/unit/cli/test_mistakes.py gives such mistakes to us",
    "real": "tests/benchmarks/test_real_model.py runs it",
    "real.race": "it needs TRL; tests/benchmarks/test_real_race.py reads its clocks and results",
    "silent_bugs": "tests/e2e/test_silent_bugs.py runs it",
    "soak": "what grows shows after seven minutes at the earliest",
}
"""Benchmarks without a tiny run here, and what runs them, or why nothing does."""


def test_every_benchmark_has_a_tiny_run_or_a_reason_for_having_none() -> None:
    benchmarks = ROOT / "benchmarks"
    scripts = {
        ".".join(path.relative_to(benchmarks).with_suffix("").parts).removesuffix(".__main__")
        for path in benchmarks.rglob("*.py")
        if path.parent.name != "servers" and 'if __name__ == "__main__"' in path.read_text("utf-8")
    }
    run = {name.partition(" ")[0] for name in RUNS}
    assert not run & LEFT_OUT.keys()
    assert run | LEFT_OUT.keys() == scripts


@pytest.mark.heavy(reason="each benchmark from end to end, on little work")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RUNS)
def test_a_tiny_run_of_a_benchmark_finds_something(name: str) -> None:
    if CHROMIUM in RUNS[name] and shutil.which(CHROMIUM) is None:
        pytest.skip("no Chromium")
    module, *words = name.split()
    ended = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *words, *RUNS[name].split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]
    assert json.loads(ended.stdout)
