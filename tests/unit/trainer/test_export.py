"""Exporting a published policy: what comes out loads, and scores as what was published."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from dialoop.errors import AlreadyExists, InvalidInput, NotFound, PreconditionFailed
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_ops.cli.main import main
from dialoop_ops.policies.export import RunPolicies, copy_with_bar, export_policy
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings
from rich.console import Console
from safetensors.torch import load_file, save_file

from tests.support.samples.adapter_samples import ALPHA, RANK, adapter_of, config_json
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = [[1, 2, 3, 4, 5, 6, 7]]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that published main-1, main-2 and an adapter, as its trainer would."""
    path = tmp_path_factory.mktemp("runs") / "demo"
    model_dir = make_tiny_model(path / "model", seed=0)
    (path / "run.json").write_text(json.dumps({"config": {"model": {"directory": ""}}}))
    for number in (1, 2):
        learner_after(model_dir, number).export(
            path / "policies" / f"main-{number}" / "model.safetensors"
        )
    adapter = path / "policies" / "style-1"
    adapter.mkdir()
    save_file(adapter_of(model_dir, seed=1), adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(config_json())
    pointer = {"path": "main-2/model.safetensors"}
    (path / "policies" / "latest.json").write_text(json.dumps(pointer))
    return path


def learner_after(model_dir: Path, number: int, **settings: Any) -> Learner:
    """The learner after something was learned."""
    learner = Learner(TrainerSettings(model_dir=model_dir, **settings))
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in (p for p in learner.state.policy.parameters() if p.requires_grad):
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return learner


def score(directory: Path) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    with torch.inference_mode():
        rows = torch.log_softmax(model(torch.tensor(IDS)).logits[0, :-1].float(), -1)
    return rows.gather(-1, torch.tensor(IDS[0][1:])[:, None])[:, 0].numpy()


def test_an_exported_policy_loads_in_transformers_and_scores_as_the_published_one(
    run_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    run = RunPolicies.of(run_dir)
    for number in (1, 2):
        out = export_policy(run, f"main-{number}", tmp_path / f"out{number}")
        expected = learner_after(run_dir / "model", number).logprobs(IDS)[0]
        assert np.abs(score(out) - expected).max() < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    chat = [{"role": "user", "content": "1+1"}]
    own = AutoTokenizer.from_pretrained(run_dir / "model", local_files_only=True)
    assert tokenizer.apply_chat_template(chat, tokenize=False) == own.apply_chat_template(
        chat, tokenize=False
    )
    GenerationConfig.from_pretrained(out, local_files_only=True)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert sorted(p.name for p in out.glob("*.safetensors")) == ["model.safetensors"]


def test_a_large_policy_is_exported_in_parts_with_an_index(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_dir / "policies" / "main-2" / "model.safetensors"
    monkeypatch.setattr("dialoop_ops.policies.export.MAX_SHARD_BYTES", whole.stat().st_size // 3)
    out = export_policy(RunPolicies.of(run_dir), "main-2", tmp_path / "parts")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    parts = {path.name: load_file(path) for path in out.glob("*.safetensors")}
    assert len(parts) > 2
    assert parts.keys() == set(index["weight_map"].values())
    written = {name: tensor for part in parts.values() for name, tensor in part.items()}
    published = load_file(whole)
    assert written.keys() == published.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in published.items())
    assert np.abs(score(out) - learner_after(run_dir / "model", 2).logprobs(IDS)[0]).max() < 1e-5


def test_a_version_may_be_named_by_number_or_as_the_latest(run_dir: Path) -> None:
    run = RunPolicies.of(run_dir)
    assert run.policy("2").name == run.policy("latest").name == "main-2"


def test_an_unknown_or_unclear_version_names_those_there_are(run_dir: Path) -> None:
    run = RunPolicies.of(run_dir)
    for version in ("main-9", "1", ""):
        with pytest.raises(NotFound) as caught:
            run.policy(version)
        assert caught.value.reason == "POLICY_NOT_FOUND"
        assert all(name in caught.value.remedy for name in ("main-1", "main-2", "style-1"))


def test_an_adapter_exports_as_a_peft_directory(run_dir: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    out = export_policy(RunPolicies.of(run_dir), "style-1", tmp_path / "adapter")
    model = AutoPeftModelForCausalLM.from_pretrained(out)
    with torch.inference_mode():
        rows = torch.log_softmax(model(torch.tensor(IDS)).logits[0, :-1].float(), -1)
    logprobs = rows.gather(-1, torch.tensor(IDS[0][1:])[:, None])[:, 0].numpy()
    merged = export_policy(RunPolicies.of(run_dir), "style-1", tmp_path / "merged", merged=True)
    assert np.abs(logprobs - score(merged)).max() < 1e-5
    assert np.abs(logprobs - score(run_dir / "model")).max() > 0.05


def test_every_export_has_tokenizer_template_and_what_ends_an_answer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    run_dir = tmp_path / "run"
    model_dir = make_tiny_model(run_dir / "model", seed=0)
    template = json.loads((model_dir / "tokenizer_config.json").read_text())["chat_template"]
    (model_dir / "chat_template.jinja").write_text(template)
    (model_dir / "additional_chat_templates").mkdir()
    (model_dir / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    config = {"model": {"directory": ""}, "collector": {"stop": ["<call>", "\n"]}}
    (run_dir / "run.json").write_text(json.dumps({"config": config}))
    whole = learner_after(model_dir, 1)
    whole.export(run_dir / "policies" / "main-1" / "model.safetensors")
    adapted = learner_after(model_dir, 2, model={"lora_rank": 4})
    adapted.export(run_dir / "policies" / "main-2" / "adapter_model.safetensors")
    run = RunPolicies.of(run_dir)
    chat = [{"role": "user", "content": "1+1"}]
    expected = AutoTokenizer.from_pretrained(model_dir).apply_chat_template(chat, tokenize=False)
    before = GenerationConfig.from_pretrained(model_dir)
    for version, merged in (("main-1", False), ("main-2", True), ("main-2", False)):
        out = export_policy(run, version, tmp_path / f"{version}-{merged}", merged=merged)
        tokenizer = AutoTokenizer.from_pretrained(out)
        assert tokenizer.apply_chat_template(chat, tokenize=False) == expected
        assert (out / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
        generation = GenerationConfig.from_pretrained(out)
        assert generation.stop_strings == ["<call>", "\n"]
        assert generation.eos_token_id == before.eos_token_id
        assert (out / "config.json").is_file() is (version == "main-1" or merged)
    (model_dir / "generation_config.json").unlink()
    out = export_policy(run, "main-1", tmp_path / "without")
    assert GenerationConfig.from_pretrained(out).eos_token_id == before.eos_token_id


def test_an_adapter_merges_into_the_version_it_is_for(run_dir: Path, tmp_path: Path) -> None:
    run = RunPolicies.of(run_dir)
    out = export_policy(run, "style-1", tmp_path / "merged", merged=True, base="main-1")
    base = load_file(run_dir / "policies" / "main-1" / "model.safetensors")
    tensors = load_file(out / "model.safetensors")
    adapter = load_file(run_dir / "policies" / "style-1" / "adapter_model.safetensors")
    assert tensors.keys() == base.keys()
    for name, weight in base.items():
        down = adapter.get(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight")
        up = adapter.get(f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight")
        expected = weight if down is None else weight + ALPHA / RANK * up @ down
        assert (tensors[name] - expected).abs().max() < 1e-6


def test_what_is_there_is_not_overwritten_and_a_failure_leaves_nothing(
    run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("")
    with pytest.raises(AlreadyExists):
        export_policy(RunPolicies.of(run_dir), "main-1", tmp_path / "there")
    with pytest.raises(InvalidInput):
        export_policy(RunPolicies.of(run_dir), "main-1", tmp_path / "x", merged=True)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_the_command_exports_and_says_what_is_wrong(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run_dir), "latest", str(tmp_path / "a")]) == 0
    assert "main-2" in capsys.readouterr().out
    assert main(["export", str(run_dir), "main-7", str(tmp_path / "b")]) == 2
    assert "main-1, style-1, main-2" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "main-7", str(tmp_path / "b")]) == 2
    assert "not a run of Dialoop" in capsys.readouterr().err


def test_a_program_exports(run_dir: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "dialoop_ops.stack",
        "export",
        str(run_dir),
        "2",
        str(tmp_path / "o"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o" / "model.safetensors").is_file()


def test_a_published_lora_version_exports_as_what_was_served(tmp_path: Path) -> None:
    """As a PEFT directory of the run's model, and merged to the bytes that merging publishes."""
    from peft import AutoPeftModelForCausalLM

    run_dir = tmp_path / "run"
    model_dir = make_tiny_model(run_dir / "model", seed=0)
    (run_dir / "run.json").write_text(json.dumps({"config": {"model": {"directory": ""}}}))
    trained = learner_after(model_dir, 3, model={"lora_rank": 4})
    trained.export(run_dir / "policies" / "main-3" / "adapter_model.safetensors")
    out = export_policy(RunPolicies.of(run_dir), "latest", tmp_path / "adapter")
    model = AutoPeftModelForCausalLM.from_pretrained(out)
    with torch.inference_mode():
        rows = torch.log_softmax(model(torch.tensor(IDS)).logits[0, :-1].float(), -1)
    logprobs = rows.gather(-1, torch.tensor(IDS[0][1:])[:, None])[:, 0].numpy()
    assert np.abs(logprobs - trained.logprobs(IDS)[0]).max() < 1e-5
    assert np.abs(logprobs - score(model_dir)).max() > 0.05
    merged = export_policy(RunPolicies.of(run_dir), "3", tmp_path / "merged", merged=True)
    served = load_file(trained.export(tmp_path / "whole.safetensors").path)
    exported = load_file(merged / "model.safetensors")
    assert exported.keys() == served.keys()
    assert all(torch.equal(exported[name], served[name]) for name in served)
    make_tiny_model(run_dir / "model", seed=1)
    with pytest.raises(PreconditionFailed, match="trained on weights") as caught:
        export_policy(RunPolicies.of(run_dir), "3", tmp_path / "other", merged=True)
    assert caught.value.reason == "BASE_MISMATCH"
    assert not (tmp_path / "other").exists()


def test_a_policy_that_was_deleted_is_refused_as_deleted(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    row = {"kind": "publish", "lineage": "main", "policy_version": 3}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    policies = RunPolicies(policies=tmp_path / "policies", model_dir=tmp_path)
    for version, reason in (("main-3", "POLICY_GONE"), ("main-4", "POLICY_NOT_FOUND")):
        with pytest.raises(NotFound) as caught:
            policies.policy(version)
        assert caught.value.reason == reason


@pytest.mark.parametrize("is_terminal", [True, False])
def test_large_files_are_copied_with_a_bar_on_a_terminal(tmp_path: Path, is_terminal: bool) -> None:
    source, target = tmp_path / "a", tmp_path / "model.safetensors"
    source.write_bytes(bytes(range(256)) * 200_000)
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
    copy_with_bar(source, target, console)
    assert target.read_bytes() == source.read_bytes()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("writing model.safetensors" in shown) is is_terminal
