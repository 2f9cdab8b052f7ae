"""Defaults that follow from the model and the machine, with their sources."""

from __future__ import annotations

import json
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
from dialoop_ops.cli.main import main
from dialoop_ops.stack.devices import Node, plan_devices
from dialoop_services.config.file import parse_config, toml_of
from dialoop_services.config.job import JobConfig
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.scorer.settings import ScorerSettings
from dialoop_services.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 1000,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", max_position_embeddings=40960, **SHAPE)


def write_model(directory: Path, **fields: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def job(model: Path | str, **tables: Any) -> JobConfig:
    return JobConfig.model_validate({"model": {"directory": str(model)}, **tables})


def lengths(config: JobConfig) -> tuple[int, int, int]:
    inference = config.inference
    return inference.max_model_len, config.collector.max_new_tokens, inference.kv_cache_mib


def test_lengths_and_cache_follow_from_the_model(model: Path, tmp_path: Path) -> None:
    each = 2 * 28 * 8 * 128 * 4  # bytes of a token's keys and values
    assert lengths(job(model)) == (8192, 1024, 32768 * each >> 20)
    assert lengths(job(model, dtype="bfloat16"))[2] == 32768 * each >> 21
    assert job(model).train.row_tokens(8192) == 8192
    small = write_model(tmp_path / "small", max_position_embeddings=512)
    assert lengths(job(small)) == (511, 255, 64)  # vLLM keeps one position free
    assert lengths(job(small, engine="transformers")) == (512, 256, 64)
    inner = write_model(tmp_path / "inner", text_config={"max_position_embeddings": 2048})
    assert lengths(job(inner, engine="transformers"))[:2] == (2048, 1024)
    unknown = write_model(tmp_path / "unknown", model_type="mamba")
    assert lengths(job(unknown, engine="transformers"))[:2] == (8192, 1024)


def test_what_is_named_stays_and_the_rest_follows_from_it(model: Path) -> None:
    named = {"inference": {"max_model_len": 384}, "collector": {"max_new_tokens": 24}}
    config = job(model, **named)
    assert lengths(config)[:2] == (384, 24)
    assert lengths(job(model, inference={"max_model_len": 384}))[1] == 192
    assert lengths(job(model, inference={"kv_cache_mib": 77}))[2] == 77
    share = {"engine": {"gpu_memory_utilization": 0.5}}
    assert lengths(job(model, inference=share))[2] == 64  # the share says it
    # Written without what is the default, the file of the services says the same.
    for each in (config, job(model), job(model, inference={"kv_cache_mib": 64})):
        assert parse_config(tomllib.loads(toml_of(each, whole=False)), source="job") == each


def test_a_lone_inference_service_has_the_lengths_of_its_model(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_service() -> tuple[int, int, int]:
        settings = InferenceSettings(model_dir=model)
        return settings.max_model_len, settings.max_new_tokens, settings.kv_cache_mib

    monkeypatch.delenv("DIALOOP_CONFIG", raising=False)
    assert of_service() == lengths(job(model))
    monkeypatch.setenv("DIALOOP_INFERENCE_MAX_NUM_SEQS", "2")
    assert of_service() == lengths(job(model, inference={"max_num_seqs": 2}))
    monkeypatch.setenv("DIALOOP_INFERENCE_MAX_MODEL_LEN", "384")
    assert of_service()[:2] == (384, 192)
    monkeypatch.setenv("DIALOOP_INFERENCE_MAX_NEW_TOKENS", "7")
    assert of_service()[:2] == (384, 7)


def test_the_demos_tiny_model_keeps_its_lengths() -> None:
    assert lengths(JobConfig()) == (384, 24, 64)
    assert lengths(job("/no/such/model")) == (384, 24, 64)  # the check says that it is not there


def test_config_check_says_each_value_with_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = 'engine = "transformers"\nstore = "memory"\n[collector]\nmax_new_tokens = 32\n'
    path = tmp_path / "job.toml"
    path.write_text(text)
    assert main(["config", "check", str(path), "--set", "train.device=auto"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "value    inference.max_model_len = 384 (default)" in lines
    assert f"value    collector.max_new_tokens = 32 ({path})" in lines
    assert "value    train.max_row_tokens = 1024 (max_model_len, or 1024 if more)" in lines
    assert 'value    train.device = "cpu" (this machine has no GPUs)' in lines


ROWS = [  # GPUs, engine, placement, overlap: trainer, replica, reference
    (0, "transformers", "split", False, ("cpu", "cpu", "cpu")),
    (1, "transformers", "split", False, ("cuda", "cpu", "cpu")),
    (2, "transformers", "split", False, ("cuda", "cuda", "cpu")),
    (3, "transformers", "split", False, ("cuda", "cuda", "cuda")),
    (1, "transformers", "shared", False, ("cuda", "cuda", "cpu")),
    (2, "transformers", "shared", False, ("cuda", "cuda", "cuda")),
    (1, "transformers", "split", True, ("cuda", "cuda", "cuda")),
    (1, "vllm", "split", False, ("cpu", "cpu", "cpu")),
    (2, "vllm", "split", False, ("cuda", "cpu", "cpu")),
    (1, "vllm", "shared", False, ("cuda", "cpu", "cpu")),
    (3, "vllm", "split", False, ("cuda", "cpu", "cuda")),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("is_visible", [True, False])
def test_a_device_that_is_not_named_is_a_gpu_where_the_plan_has_one_left(
    row: tuple[int, str, str, bool, tuple[str, str, str]],
    is_visible: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_gpus, engine, placement, overlap, expected = row
    gpus = tuple(map(str, range(num_gpus)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus) if is_visible else "")
    resources: dict[str, Any] = {"overlap": overlap}
    resources |= {} if is_visible else {"gpus_per_node": num_gpus}
    values = {"engine": engine, "placement": placement, "resources": resources}
    for auto in ({}, {"device": "auto"}):
        tables = {"train": auto, "inference": auto, "scorer": {"reference_logprobs": True, **auto}}
        config = JobConfig.model_validate({**values, **tables})
        devices = config.train.device, config.inference.device, config.scorer.device
        assert devices == expected
        plan_devices(config, [Node(gpus=gpus)])  # it fits
    assert JobConfig.model_validate({**values, "train": {"device": "cpu"}}).train.device == "cpu"
    assert JobConfig.model_validate(values).scorer.device == "cpu"  # it has no model


def test_a_service_that_is_started_by_itself_chooses_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for visible, device in (("0", "cuda"), ("", "cpu")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert TrainerSettings(model_dir=tmp_path).device == device
        assert ScorerSettings(model_dir=tmp_path).device == device
        assert TrainerSettings(model_dir=tmp_path, device="cpu").device == "cpu"
