"""How a replica starts vLLM where there is a GPU, seen on a machine that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.servers.families import make_family

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("vllm")

# The service, in a process whose torch says that there is a GPU. What it would start is an engine
# that notes how vLLM would start its core.
CHILD = """
import json, os, sys, types
import torch

asked = []

def is_available():
    asked.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
    return True

torch.cuda.is_available = is_available

class VllmEngine:
    async def start(model_dir, options):
        from vllm.utils.system_utils import get_mp_context
        print(json.dumps({"asked": asked, "method": get_mp_context().get_start_method()}))
        sys.stdout.flush()
        os._exit(0)

name = "dialoop_services.inference.vllm_engine.engine"
sys.modules[name] = types.ModuleType(name)
sys.modules[name].VllmEngine = VllmEngine

from dialoop_services.inference.__main__ import run, serve
run(serve, name="inference")
"""


def start_of_a_service(model_dir: Path) -> dict[str, object]:
    """What the service asked and would do; its variables are none of this process."""
    ours = ("PYTORCH_NVML", "VLLM_", "DIALOOP_", "CUDA_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {
        "DIALOOP_INFERENCE_MODEL_DIR": str(model_dir),
        "DIALOOP_INFERENCE_PORT": "0",
    }
    child = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, env=environment, check=False
    )
    assert child.returncode == 0, child.stderr
    answer: dict[str, object] = json.loads(child.stdout.splitlines()[-1])
    return answer


def test_on_a_gpu_the_driver_is_asked_and_the_core_is_a_new_interpreter(tmp_path: Path) -> None:
    """A core forked after CUDA was asked for ends with "Cannot re-initialize CUDA"."""
    answer = start_of_a_service(make_family("qwen2", tmp_path / "model"))
    questions = answer["asked"]
    assert isinstance(questions, list)
    assert questions
    assert set(questions) == {"1"}
    assert answer["method"] == "spawn"
