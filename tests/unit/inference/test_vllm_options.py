"""vLLM's arguments: Dialoop's own, and those that [inference.engine] gives."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.vllm_engine import environment
from dialoop_services.inference.weights.adapter_files import AdapterLimits

from benchmarks.servers.families import make_family

environment.prepare()
vllm = pytest.importorskip("vllm")
from dialoop_services.inference.vllm_engine import adapters as adapters_module  # noqa: E402
from dialoop_services.inference.vllm_engine import internals  # noqa: E402
from dialoop_services.inference.vllm_engine import options as module  # noqa: E402


@pytest.fixture
def args_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "_max_positions", lambda _: 1024)
    (tmp_path / "config.json").write_text("{}")
    return lambda **own: module.engine_args(tmp_path, EngineOptions(own=own))


def test_options_of_the_config_are_added_to_dialoops_own(args_of: Any) -> None:
    args = args_of(enable_prefix_caching=False, max_num_batched_tokens=256)
    assert (args.enable_prefix_caching, args.max_num_batched_tokens) == (False, 256)
    assert (args.logprobs_mode, args.max_model_len) == ("processed_logprobs", 513)
    assert args.kv_cache_memory_bytes == EngineOptions().kv_cache_bytes


def test_a_share_of_memory_replaces_the_fixed_size(args_of: Any) -> None:
    args = args_of(gpu_memory_utilization=0.3)
    assert (args.gpu_memory_utilization, args.kv_cache_memory_bytes) == (0.3, None)


def test_a_replica_starts_beside_a_trainer_on_its_gpu(args_of: Any) -> None:
    """vLLM's own check, with the figures of an 80 GB card and a 0.6B trainer on it."""
    from vllm.v1.worker.utils import request_memory

    card = SimpleNamespace(total_memory=80 << 30, free_memory=70 << 30, device_="cuda:0")

    def demand(**own: Any) -> int:
        share = args_of(**own).gpu_memory_utilization
        return request_memory(card, SimpleNamespace(gpu_memory_utilization=share))

    assert demand() < 1 << 30
    with pytest.raises(ValueError, match="Free memory"):
        demand(gpu_memory_utilization=0.92)


def test_graphs_are_captured_on_cuda_alone_and_small_blocks_are_a_cpus(
    args_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Platform:
        is_sleep_mode_available = staticmethod(lambda: False)

        def __init__(self, *, cuda: bool) -> None:
            self.is_cuda = lambda: cuda

    monkeypatch.setattr(module, "current_platform", Platform(cuda=True))
    assert args_of().enforce_eager is False
    assert args_of().block_size is None, "vLLM's own"
    assert args_of(enforce_eager=True).enforce_eager is True
    monkeypatch.setattr(module, "current_platform", Platform(cuda=False))
    assert args_of().enforce_eager is True
    assert args_of().block_size == 32
    assert args_of(block_size=64).block_size == 64
    with pytest.raises(InvalidConfig, match="only CUDA has graphs"):
        args_of(enforce_eager=False)


def test_adapters_in_float32_are_refused_on_a_gpu_before_vllm_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's kernel asserts it after the model was loaded."""
    monkeypatch.setattr(module, "_max_positions", lambda _: 1024)
    (tmp_path / "config.json").write_text("{}")
    adapters = AdapterLimits(max_adapters=1, max_rank=8)
    single = EngineOptions(adapters=adapters)
    assert module.engine_args(tmp_path, single).enable_lora  # on a CPU it works
    monkeypatch.setattr(adapters_module, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    with pytest.raises(InvalidConfig) as caught:
        module.engine_args(tmp_path, single)
    assert caught.value.reason is Reason.ADAPTERS_NEED_16_BITS
    assert "DIALOOP_INFERENCE_DTYPE=bfloat16" in caught.value.remedy
    half = EngineOptions(adapters=adapters, dtype="bfloat16")
    assert module.engine_args(tmp_path, half).enable_lora


@pytest.mark.skipif(not vllm.platforms.current_platform.is_cpu(), reason="vLLM is for a GPU")
@pytest.mark.parametrize(
    ("runner", "refusal"), [(None, "requires Model Runner V2"), (True, "requires Triton")]
)
def test_vllm_for_cpus_says_of_no_token_which_experts_computed_it(
    runner: bool | None, refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where this fails, vLLM for CPUs has learned it, and the engine may record experts."""
    monkeypatch.setattr(vllm.envs, "VLLM_USE_V2_MODEL_RUNNER", runner, raising=False)
    model_dir = make_family("qwen3_moe", tmp_path / "model")
    own = {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    args = module.engine_args(model_dir, EngineOptions(max_model_len=64, own=own))
    with pytest.raises(ValueError, match=refusal):
        args.create_engine_config()


@pytest.mark.parametrize(("version", "warns"), [("0.32.0+cpu", False), ("0.33.0", True)])
def test_another_vllm_than_the_tested_one_is_said_at_the_start(
    version: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(internals.vllm, "__version__", version)
    internals.check_version()
    assert ("vLLM 0.33.0 is installed" in caplog.text) is warns


def test_only_one_file_reads_what_vllm_documents_nowhere() -> None:
    room = Path(internals.__file__).parent
    hidden = re.compile(
        r"\b(engine_core|output_processor|request_states|cpu_linear|quant_method)\b"
    )
    files = {path.name for path in room.glob("*.py") if hidden.search(path.read_text("utf-8"))}
    assert files == {"internals.py"}
