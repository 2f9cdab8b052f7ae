"""`dialoop config check`: every typical mistake is one sentence with a remedy, within seconds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from dialoop.environments import load_environment
from dialoop.errors import DialoopError, InvalidConfig
from dialoop_learning.loss.facts import LOSSES
from dialoop_ops.cli.main import main
from dialoop_ops.stack import preflight
from dialoop_ops.stack.run_dir import open_run
from dialoop_services.config.advice import (
    warnings_for_agents,
    warnings_for_steps,
    warnings_for_unused,
)
from dialoop_services.config.file import load_config, load_with_origins, toml_of
from dialoop_services.config.job import JobConfig
from dialoop_services.config.tables import InferenceSection

from tests.support.samples.checked_jobs import HEAD, MODULE

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "checked_code.py").write_text(MODULE)
    (tmp_path / "tasks.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (tmp_path / "broken.jsonl").write_text('{"question": "1+1", "answer": "2"}\nnot json\n')
    for name in ("empty", "model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"max_position_embeddings": 600}')
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "some/base"}'
    )
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delitem(sys.modules, "checked_code", raising=False)
    return tmp_path


def check(folder: Path, text: str) -> int:
    if text.startswith("@"):
        text = HEAD.replace('engine = "transformers"\n', "") + text[1:]
    else:
        text = HEAD + text
    (folder / "job.toml").write_text(text)
    try:
        return main(["config", "check", str(folder / "job.toml")])
    finally:
        sys.modules.pop("checked_code", None)


def test_several_mistakes_are_all_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        '[environment]\nuse = "checked_code:maker"\n[model]\ndirectory = "no-model"\n'
        '[train]\nloss = "checked_code:mime"\n'
    )
    assert check(folder, text) == 2
    output = capsys.readouterr().err
    assert len(output.splitlines()) == 3, output


def test_a_config_without_a_mistake_says_so_and_starts_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '[environment]\nuse = "checked_code:make"\n[train]\nloss = "checked_code:mine"\n'
    assert check(folder, f"{text}loss_options = {{ cap = 2.0 }}\n") == 0
    assert "job.toml: no mistake found." in capsys.readouterr().out
    assert not (folder / "runs").exists()


def test_what_deserves_a_warning_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(folder, '[train]\nloss = "dapo"\n') == 0
    assert "Warning: loss dapo is meant for drop_uniform = true" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (
            {"sft": {"batch_size": 3, "num_epochs": 2}},
            "batch_size and num_epochs in [sft] count for",
        ),
        ({"warm_start": {"learning_rate": 0.1}}, "learning_rate in [warm_start] counts for"),
        ({"train": {"mode": "sft"}, "warm_start": {"num_steps": 3}}, "num_steps in [warm_start]"),
        (
            {"train": {"mode": "sft"}, "scorer": {"top_k": 1}},
            "top_k in [scorer] counts for nothing: m",
        ),
        (
            {"model": {"lora_alpha": 8.0}},
            "lora_alpha in [model] counts for nothing: lora_rank is 0",
        ),
        (
            {"evaluation": {"stop_at": 0.9, "every": 0}},
            "stop_at in [evaluation] counts for nothing",
        ),
        ({"evaluation": {"stop_at": 0.9, "num_tasks": 0}}, "so nothing is evaluated during"),
        ({"scorer": {"reference_model": "m"}}, "reference_model in [scorer] counts for nothing"),
        ({"trackers": {"project": "mine"}}, "project in [trackers] counts for nothing"),
        (
            {"train": {"learning_rate_floor": 0.2}},
            "learning_rate_floor in [train] counts for nothing: schedule is constant",
        ),
        ({"model": {"publish": "merged"}}, "publish in [model] counts for nothing"),
        ({"train": {"weight_decay_all": True}}, "weight_decay is 0"),
        ({"train": {"loss_timeout_s": 9}}, "losses of your own"),
        (
            {"train": {"keep_policies": 0, "keep_milestones": 3, "keep_policies_every": 5}},
            "keep_policies_every and keep_milestones in [train] count",
        ),
        ({"dtype": "bfloat16", "train": {"autocast": "bfloat16"}}, "autocast in [train] counts"),
        ({"train": {"objective": {"kl_to": "inference"}}}, "kl_to in [train.objective] counts"),
        ({"train": {"objective": {"kl_estimator": "k1"}}}, "nothing: kl_coeff is 0"),
        ({"train": {"objective": {"constant": 9}}}, 'aggregation is not "constant"'),
        (
            {"train": {"objective": {"correction_low": 0.1, "correction_high": 9}}},
            "correction_low and correction_high in [train.objective] count for nothing: corre",
        ),
        (
            {"train": {"objective": {"correction": "tis", "correction_low": 0.1}}},
            'correction is "tis"',
        ),
        (
            {
                "train": {"loss": "minor_sft", "mode": "sft", "objective": {"kl_coeff": 0.1}},
            },
            "loss minor_sft holds the policy to the reference",
        ),
        ({"train": {"objective": {"sibling_answer": False}}}, "reads no feedback"),
        ({"train": {"candidates": {"success_reward": 0.5}}}, "it has no success_rate"),
        (
            {"train": {"candidates": {"stop_after_empty": 2}}},
            None,
        ),
        (
            {"train": {"candidates": {"stop_after_empty": 5, "max_empty_batches": 5}}},
            "training ends at stop_after_empty, 5",
        ),
        ({"train": {"mode": "sft", "num_minibatches": 3}}, "num_minibatches in [train] counts"),
        (
            {"train": {"mode": "sft", "num_steps": 7}, "sft": {"num_epochs": 2}},
            "num_steps in [train] counts for nothing: num_epochs in [sft]",
        ),
        ({"train": {"mode": "sft"}, "sft": {"heldout_file": "a"}}, "it names no file"),
        (
            {
                "train": {"mode": "sft"},
                "sft": {"file": "b", "heldout_file": "a", "heldout_fraction": 0.3},
            },
            "heldout_fraction in [sft] counts",
        ),
        (
            {"train": {"num_steps": 5}, "evaluation": {"every": 5, "stop_without_gain": 2}},
            "every is not below num_steps",
        ),
        ({"scorer": {"top_k": 2, "divide_by_std": True}}, "nothing: top_k is set"),
        (
            {"scorer": {"advantage_estimator": "a:b", "advantage_divisor": "sum"}},
            "advantage_divisor in [scorer] counts for nothing: advantage_estimator",
        ),
        (
            {
                "train": {"loss": "distill"},
                "scorer": {"reference_logprobs": True, "leave_one_out": True},
            },
            "loss distill reads no advantages",
        ),
        ({"scorer": {"kl_estimator": "k3"}}, "nothing: kl_coefficient is 0"),
        ({"scorer": {"kl_coefficient": 0.1, "reference_model": "m"}}, None),
        ({"scorer": {"num_threads": 2}}, "nothing: it loads no model"),
        ({"inference": {"kv_cache_mib": 99}}, 'nothing: engine is "transformers"'),
        ({"inference": {"tensor_parallel_size": 2}}, 'nothing: engine is "transformers"'),
        ({"inference": {"max_adapter_rank": 8}}, "max_adapters is 0"),
        ({"inference": {"batching_timeout_s": 2.0}}, "min_batch_size is 1"),
        (
            {
                "inference": {"record_routed_experts": True},
                "train": {"replay_routed_experts": False},
            },
            "replay_routed_experts is false",
        ),
        ({"inference": {"wake_after_s": 5.0}}, 'placement is "split"'),
        ({"train": {"sleep_drain_s": 5.0}}, 'placement is "split"'),
        ({"collector": {"agent_time_limit_s": 5.0}}, "the policy itself plays"),
        (
            {"environment": {"agent": "a:b"}, "collector": {"stop": ["x"]}},
            "stop in [collector] counts",
        ),
        ({"replay": {"overflow": "reject"}}, "max_waiting_groups is 0"),
        ({"console": False, "ports": {"console": 80}}, "console is false"),
        ({"store": "memory", "ports": {"redis": 80}}, 'store is "memory"'),
        ({"ports": {"rendezvous": 80}}, "one machine trains"),
        (
            {"launch": {"slurm": {"partition": "gpu"}}},
            "partition in [launch.slurm] counts for nothing: on is",
        ),
        ({"launch": {"shared_folder": False}}, 'on is "local"'),
        ({"environment": {"weight": 2.0}}, "there is no other environment"),
        ({"environment": {"heldout_fraction": 0.2}}, "no task_file is named"),
        (
            {"environment": {"task_file": "a", "heldout_file": "b", "heldout_fraction": 0.2}},
            "heldout_file has the tasks",
        ),
        (
            {"environments": [{"use": "trl", "heldout_split": "x"}]},
            "evaluations use the first environment alone",
        ),
        (
            {"train": {"mode": "sft"}, "environments": [{"use": "trl"}]},
            "use in [environments] counts for nothing: mode",
        ),
        ({"environment": {"play": "text", "tools_in_prompt": False}}, 'play is "text"'),
    ],
)
def test_keys_that_count_for_nothing_beside_another_are_said(
    tables: dict[str, object], words: str | None
) -> None:
    config = JobConfig.model_validate({"engine": "transformers", **tables})
    warnings = warnings_for_unused(config)
    assert len(warnings) == (words is not None), warnings
    assert (words or "") in "".join(warnings)
    whole = JobConfig.model_validate(tomllib.loads(toml_of(JobConfig(engine="transformers"))))
    assert warnings_for_unused(whole) == (), "a whole file, as `config print` writes it, names all"


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"train": {"num_minibatches": 17}}, "num_minibatches is 17 in [train], above groups"),
        ({"train": {"num_steps": 5, "num_warmup_updates": 10}}, "there are 10 in all"),
        ({"train": {"num_steps": 5, "num_warmup_updates": 9}}, ""),
        (
            {"train": {"mode": "sft", "num_steps": 5, "num_warmup_updates": 5}},
            "num_warmup_updates in [train] is 5",
        ),
        (
            {"train": {"mode": "sft", "num_warmup_updates": 99}, "sft": {"num_epochs": 2}},
            "",
        ),
        ({"warm_start": {"num_steps": 20}}, "num_warmup_steps in [warm_start] is 20"),
        ({"inference": {"min_batch_size": 500}}, "at most 384 samples of training"),
        ({"inference": {"min_batch_size": 384}}, ""),
        (
            {"inference": {"min_batch_size": 33}, "collector": {"max_groups_in_flight": 4}},
            "at most 32 samples",
        ),
        (
            {"environment": {"agent": "a:b"}, "inference": {"max_recordings": 383}},
            "up to 384 episodes of agents",
        ),
        ({"environment": {"agent": "a:b"}, "inference": {"max_recordings": 384}}, ""),
        ({"inference": {"max_recordings": 1}}, ""),
        (
            {"environment": {"agent": "a:b"}, "inference": {"recording_ttl_s": 60.0}},
            "below agent_time_limit_s 600",
        ),
    ],
)
def test_numbers_that_others_never_reach_are_said(tables: dict[str, object], words: str) -> None:
    config = JobConfig.model_validate({"engine": "transformers", **tables})
    warnings = [*warnings_for_steps(config), *warnings_for_agents(config)]
    assert len(warnings) == bool(words), warnings
    assert words in "".join(warnings)


def test_no_config_of_ours_has_a_key_that_counts_for_nothing() -> None:
    configs = sorted((ROOT / "infra" / "configs").rglob("*.toml"))
    assert len(configs) > 5
    for path in configs:
        config = load_config(path, environment={})
        assert not [*warnings_for_unused(config), *warnings_for_steps(config)], path


def test_a_kernel_of_gpus_is_refused_without_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(folder, '[train]\nlogprob_kernel = "cut"\nautocast = "bfloat16"\n') == 2
    assert "train.logprob_kernel needs 1 GPU, and this machine has none" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert check(folder, f"[ports]\ntrainer = {port}\n") == 2
    assert f"Port {port} of trainer is taken" in capsys.readouterr().err


def test_a_redis_that_does_not_answer_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:secret@127.0.0.1:9/0")
    (folder / "job.toml").write_text('engine = "transformers"\n')
    assert main(["config", "check", str(folder / "job.toml")]) == 2
    error = capsys.readouterr().err
    assert "No server answers at REDIS_URL" in error
    assert "secret" not in error


def test_the_command_checks_without_importing_torch(folder: Path) -> None:
    (folder / "job.toml").write_text(f'{HEAD}[train]\nloss = "grop"\n')
    code = (
        "import sys\nfrom dialoop_ops.cli.main import main\n"
        "code = main(sys.argv[1:])\nassert 'torch' not in sys.modules\nsys.exit(code)\n"
    )
    path = f"{ROOT / 'client'}{os.pathsep}{ROOT / 'services'}"
    for text, expected in (('loss = "grop"', 2), ('loss = "grpo"', 0)):
        (folder / "job.toml").write_text(f"{HEAD}[train]\n{text}\n")
        ended = subprocess.run(
            [sys.executable, "-c", code, "config", "check", "job.toml"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == expected, ended.stderr


def test_relative_paths_and_modules_are_those_of_the_configs_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "beside.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 2)
    (folder / "job.toml").write_text(
        f'{HEAD}[environment]\nuse = "checked_code:beside"\n[evaluation]\nnum_tasks = 0\n'
        '[sft]\nfile = "chats.jsonl"\n[warm_start]\nfile = "chats.jsonl"\n'
    )
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    before = list(sys.path)
    loaded = load_with_origins(folder / "job.toml", environment={})
    config = preflight.check(loaded.config, folder=loaded.folder)
    assert config.environment.served_name == "beside"
    chats = str(folder / "chats.jsonl")
    assert (config.sft.file, config.warm_start.file) == (chats, chats)
    assert (Path.cwd() != folder, sys.path) == (True, before)


def test_config_print_lists_what_a_key_may_be() -> None:
    lines: dict[str, str] = {}
    for line in toml_of(JobConfig()).splitlines():
        lines.setdefault(line.partition(" = ")[0], line)  # [inference] has an engine too
    for name in LOSSES:
        assert json.dumps(name) in lines["loss"].partition("Allowed: ")[2]
    assert (
        'Allowed: one of "adamw", "muon", or your own as "module:function".' in lines["optimizer"]
    )
    engines = 'Allowed: one of "vllm", "transformers", "openai", or your own as "module:Class".'
    assert engines in lines["engine"]
    assert lines["train_split"].count("Allowed") == 0
    assert "Allowed: at least 0 and below 1." in lines["heldout_fraction"]


def test_a_resumed_run_says_what_its_config_says_otherwise(tmp_path: Path) -> None:
    first = JobConfig.model_validate({"run": "again", "train": {"loss": "grpo"}})
    with open_run(tmp_path, first, fresh=False) as run_dir:
        assert run_dir.changes == ()
    (run_dir.path / "metrics.jsonl").touch()
    second = JobConfig.model_validate(
        {"run": "again", "train": {"loss": "dapo"}, "ports": {"replay": 7003}}
    )
    with open_run(tmp_path, second, fresh=False, reuse=True) as resumed:
        assert resumed.changes == ('train.loss: "grpo", now "dapo"',)
    with open_run(tmp_path, second, fresh=False, reuse=True) as unchanged:
        assert (unchanged.changes, unchanged.run_id) == ((), run_dir.run_id)


def test_only_its_owner_reads_a_new_run_and_a_resumed_one_keeps_its_mode(tmp_path: Path) -> None:
    config = JobConfig.model_validate({"run": "mine"})
    with open_run(tmp_path, config, fresh=False) as run_dir:
        assert run_dir.path.stat().st_mode & 0o777 == 0o700
    (run_dir.path / "metrics.jsonl").touch()
    run_dir.path.chmod(0o750)
    with open_run(tmp_path, config, fresh=False, reuse=True) as resumed:
        assert resumed.path.stat().st_mode & 0o777 == 0o750
    with open_run(tmp_path, config, fresh=True) as replaced:
        assert replaced.path.stat().st_mode & 0o777 == 0o700


def test_a_broken_template_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = folder / "model"
    vocabulary = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None}
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (model / "tokenizer.json").write_text(
        json.dumps({**vocabulary, "post_processor": None, "decoder": None, "model": words})
    )
    with pytest.raises(DialoopError) as caught:
        preflight.check_model(model)
    assert caught.value.reason == "TEMPLATE_MISSING"
    for source in ("{% for m in messages %}", "{{ raise_exception('no users') }}"):
        (model / "chat_template.jinja").write_text(source)
        with pytest.raises(InvalidConfig, match="template"):
            preflight.check_model(model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    preflight.check_model(model)


def test_a_record_of_experts_is_refused_where_engine_or_model_have_none() -> None:
    experts = {"num_experts": 8}
    records = InferenceSection(record_routed_experts=True)
    for engine, model, words in (
        ("vllm", experts, 'engine = "vllm" does not say which experts'),
        ("openai", experts, 'engine = "openai" does not say'),
        ("transformers", {"hidden_size": 8}, "the model has no experts"),
        ("transformers", {}, "the model has no experts"),
    ):
        config = JobConfig(engine=engine, inference=records)
        with pytest.raises(InvalidConfig, match=words) as caught:
            preflight._check_record_of_experts(config, model)
        assert caught.value.reason == "NO_ROUTED_EXPERTS"
        preflight._check_record_of_experts(JobConfig(engine=engine), model)
    for engine in ("transformers", "my_engines:Mine"):
        config = JobConfig(engine=engine, inference=records)
        preflight._check_record_of_experts(config, experts)


def test_experts_that_the_engine_would_never_renew_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    experts = {"text_config": {"num_experts": 8}}
    with pytest.raises(InvalidConfig, match="no new weights of experts") as caught:
        preflight._check_experts(JobConfig(engine="vllm"), experts)
    assert caught.value.reason == "MODEL_NOT_PUBLISHABLE"
    preflight._check_experts(JobConfig(engine="transformers"), experts)
    preflight._check_experts(JobConfig(engine="vllm"), {"num_experts": 0, "hidden_size": 8})
    only_serves = JobConfig.model_validate({"engine": "vllm", "train": {"num_steps": 0}})
    preflight._check_experts(only_serves, experts)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    preflight._check_experts(JobConfig(engine="vllm"), experts)


def test_the_environments_stop_strings_are_the_jobs_unless_it_names_its_own(
    folder: Path,
) -> None:
    """So run.json has them, and every export of the run."""
    own = load_environment("arithmetic").traits.stop
    assert own
    base = {"engine": "transformers", "store": "memory"}
    for tables, stop in (
        ({}, own),
        ({"collector": {"stop": ["\n"]}}, ("\n",)),
        ({"collector": {"stop": []}}, ()),
        ({"train": {"mode": "sft", "num_steps": 1}}, None),
    ):
        checked = preflight.check(JobConfig.model_validate(base | tables), folder=folder)
        assert checked.collector.stop == stop
