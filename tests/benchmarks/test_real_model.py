"""A chat model that comes as a GGUF file is converted, and trains as infra/configs/real.toml says.

`make test` takes a small Llama with random weights, `make nightly` the model of benchmarks/real.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dialoop_ops
import pytest
from dialoop_learning.model.tiny import INITIALIZER_RANGE
from dialoop_ops.cli.main import main

from benchmarks.real.__main__ import fetch_model
from tests.support.samples.gguf_files import llama, write
from tests.support.stack_jobs import assert_accounted

ROOT = Path(__file__).parents[2]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHANGES: dict[str, Any] = {
    "engine": "transformers",
    "store": "memory",
    "train": {"num_steps": 2, "groups_per_train_step": 2},
    "evaluation": {"num_tasks": 4},
}
"""What makes the job one of seconds in one process."""


def assert_trained(summary: Mapping[str, Any]) -> None:
    """Two steps on what the queue counted, and log-probs that are the trainer's too."""
    assert summary["num_train_steps"] == 2
    assert_accounted(dict(summary))
    assert summary["max_logprob_difference"] <= 1e-3
    assert 0 < summary["rescoring"]["max_difference"] <= 1e-3


def test_a_converted_chat_model_trains_for_two_steps(tmp_path: Path) -> None:
    # With a smaller range all tokens are as likely as each other, whatever stands before them.
    model = llama(num_positions=512, initializer_range=INITIALIZER_RANGE)
    file, directory = write(tmp_path / "m.gguf", model, template=CHATML), tmp_path / "model"
    assert main(["model", "from-gguf", str(file), str(directory)]) == 0
    job: dict[str, Any] = tomllib.loads((ROOT / "infra/configs/real.toml").read_text("utf-8"))
    for key, value in (CHANGES | {"model": {"directory": str(directory)}}).items():
        job[key] = job[key] | value if isinstance(value, dict) else value
    result = dialoop_ops.train(job, in_process=True, folder=tmp_path, quiet=True)
    assert_trained(result.summary)
    assert result.succeeded, result.summary["gates"]


@pytest.mark.heavy(reason="a model of 135 million parameters on vLLM, minutes on two cores")
@pytest.mark.vllm
@pytest.mark.redis
@pytest.mark.timeout(900)
def test_the_real_model_trains_for_two_steps() -> None:
    try:
        fetch_model()
    except SystemExit as why:
        pytest.skip(str(why))
    changes = ("--set", "train.num_steps=2", "--set", "evaluation.num_tasks=4")
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.real", "--json", *changes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]
    figures = json.loads(ended.stdout)
    assert figures["num_train_steps"] == len(figures["steps"]) == 2
    assert_trained(json.loads((ROOT / "runs/real/summary.json").read_text("utf-8")))
