"""[inference.engine]: the engine's own options, and those that it may not be given."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from dialoop.errors import InvalidConfig
from dialoop_extras.importers.imported import import_config
from dialoop_ops.stack.devices import Node, plan_devices
from dialoop_ops.stack.preflight import mistakes_in
from dialoop_services.config.advice import warnings_for_cache
from dialoop_services.config.engines import ENGINES, require_options
from dialoop_services.config.file import Override, load_config, load_with_origins, parse_config
from dialoop_services.config.job import JobConfig
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.runtime.settings import load
from dialoop_services.trainer.settings import TrainerSettings


def config_of(inference: dict[str, Any], **more: Any) -> JobConfig:
    return parse_config({"inference": inference, **more}, source="job.toml")


def refusal_of(inference: dict[str, Any], **more: Any) -> str:
    with pytest.raises(InvalidConfig) as caught:
        config_of(inference, **more)
    return str(caught.value)


def test_an_option_of_vllm_reaches_the_service_and_the_command_line_may_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[inference.engine]\nenable_prefix_caching = false\n")
    more = Override(path="inference.engine.block_size", value=32, origin="--set")
    loaded = load_with_origins(file, environment={}, overrides=[more])
    options = {"enable_prefix_caching": False, "block_size": 32}
    assert loaded.config.inference.engine == options
    assert loaded.origins["inference.engine.block_size"] == "--set"
    assert InferenceSettings.of_job(loaded.config)["engine_options"] == options
    monkeypatch.setenv("DIALOOP_CONFIG", str(file))
    settings = load(InferenceSettings, model_dir=tmp_path)
    assert settings.engine_options == {"enable_prefix_caching": False}
    monkeypatch.setenv("DIALOOP_INFERENCE_ENGINE_OPTIONS", '{"block_size": 16}')
    assert load(InferenceSettings, model_dir=tmp_path).engine_options == options | {
        "block_size": 16
    }


def test_an_option_that_does_not_exist_is_refused_with_the_nearest(tmp_path: Path) -> None:
    message = refusal_of({"engine": {"enable_prefix_cachin": True}})
    assert "enable_prefix_cachin is no option" in message
    assert "did you mean 'enable_prefix_caching'?" in message
    with pytest.raises(InvalidConfig, match="is no option of engine"):
        load(InferenceSettings, model_dir=tmp_path, engine_options={"no_such_thing": 1})


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("speculative_config", "never shown"),
        ("kv_offloading_size", "older policy"),
        ("hf_overrides", "another model"),
        ("logits_processors", "another distribution"),
        ("data_parallel_size", "num_replicas"),
        ("max_model_len", "max_model_len in [inference]"),
        ("logprobs_mode", "Dialoop sets it"),
        ("generation_config", "Dialoop sets it"),
        ("override_generation_config", "Dialoop sets it"),
        ("max_lora_rank", "max_adapter_rank in [inference]"),
        ("enable_return_routed_experts", "does not read"),
    ],
)
def test_what_would_break_exactness_is_refused_by_name(option: str, remedy: str) -> None:
    message = refusal_of({"engine": {option: 1}})
    assert f"{option} in [inference.engine] is refused" in message
    assert remedy in message


def test_every_refused_name_is_an_option_of_the_installed_vllm() -> None:
    """So that none is misspelt, and a new version of vLLM that renames one is noticed."""
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    names = arg_utils.EngineArgs.__dataclass_fields__
    from fnmatch import filter as matching

    for refused in ENGINES["vllm"].refused:
        assert matching(names, refused), refused
    for name in names:
        if not any(matching([name], refused) for refused in ENGINES["vllm"].refused):
            require_options("vllm", {name: None})


def test_only_an_engine_that_takes_options_gets_them() -> None:
    options = {"block_size": 16}
    assert 'engine = "transformers" takes no options' in refusal_of(
        {"engine": options}, engine="transformers"
    )
    # The user's own engine checks them itself.
    assert config_of({"engine": {"any": 1}}, engine="mine:Engine").inference.engine == {"any": 1}


def test_a_share_of_memory_stands_in_for_the_fixed_size_of_the_cache() -> None:
    share = {"gpu_memory_utilization": 0.5}
    assert not config_of({"engine": share}).inference.has_fixed_cache
    assert config_of({}).inference.has_fixed_cache
    assert "leave one out" in refusal_of({"engine": share, "kv_cache_mib": 128})
    (warning,) = warnings_for_cache(config_of({"engine": share}))
    assert "gpu_memory_utilization = 0.5" in warning
    assert "takes the place of kv_cache_mib" in warning
    assert not warnings_for_cache(config_of({}))


def test_pipeline_stages_count_as_devices_of_a_replica() -> None:
    config = config_of({"tensor_parallel_size": 2, "engine": {"pipeline_parallel_size": 2}})
    assert TrainerSettings.of_job(config)["inference_world_size"] == 4
    plan = plan_devices(config, [Node(gpus=tuple("01234567"))])
    assert plan.variables("inference")["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    for stages in ("two", 0, -1):
        message = refusal_of({"engine": {"pipeline_parallel_size": stages}})
        assert "set a whole number" in message


@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_options_of_vllm_are_imported_where_vllm_samples(tmp_path: Path, name: str) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(
        "data: {train_files: train.parquet}\nalgorithm: {adv_estimator: grpo}\n"
        "actor_rollout_ref:\n  model: {path: Qwen/Qwen3-0.6B}\n"
        f"  rollout: {{name: {name}, gpu_memory_utilization: 0.4}}\n"
    )
    text = import_config(file)
    written = tmp_path / "job.toml"
    written.write_text(text)
    options = load_config(written, environment={}).inference.engine
    of_verl = {"max_num_batched_tokens": 8192, "enable_chunked_prefill": True}  # by default
    assert options == ({"gpu_memory_utilization": 0.4} | of_verl if name == "vllm" else {})
    assert ("it is an option of vLLM" in text) is (name == "hf")


def test_the_options_of_the_docs_are_taken() -> None:
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text("utf-8")
    text = page.split("<!-- test: engine_options -->\n```toml\n")[1].split("```")[0]
    config = parse_config(tomllib.loads(text), source="docs/configuration.md")
    assert (config.inference.num_devices, len(config.inference.engine)) == (2, 3)


OUTSIDE = {"engine": "openai", "inference": {"engine": {"url": "http://127.0.0.1:1/v1"}}}


def test_a_job_cannot_train_what_a_server_outside_has() -> None:
    config = parse_config(OUTSIDE | {"store": "memory"}, source="job.toml")
    mistakes = [error.message for error in mistakes_in(config)]
    assert any("no job can train" in mistake for mistake in mistakes)
    with pytest.raises(InvalidConfig, match="uri is no option"):
        parse_config({"engine": "openai", "inference": {"engine": {"uri": "x"}}}, source="job.toml")


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"collector": {"temperature": 0.7}}, "scores at temperature 1"),
        ({"scorer": {"reference_model": "models/teacher"}}, "say the same"),
    ],
)
def test_a_teacher_outside_scores_at_temperature_1_alone(tables, sentence) -> None:
    server = {"reference_server": {"url": "http://127.0.0.1:1/v1"}, "reference_logprobs": True}
    scorer = server | tables.get("scorer", {})
    with pytest.raises(InvalidConfig, match=sentence):
        parse_config(tables | {"scorer": scorer}, source="job.toml")
