"""What a config says about training is what the trainer is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop.errors import InvalidConfig
from dialoop_ops.stack.layout import Layout, ports_of
from dialoop_ops.stack.run_dir import RunDir, open_run
from dialoop_services.config.file import parse_config
from dialoop_services.runtime.settings import load
from dialoop_services.trainer import __main__ as trainer
from dialoop_services.trainer.settings import TrainerSettings
from pydantic import ValidationError

CONFIG = {
    "model": {"lora_rank": 8, "lora_alpha": 4.0, "lora_targets": ["q_proj", "v_proj"]},
    "train": {
        "mode": "sft",
        "device": "cuda",
        "autocast": "bfloat16",
        "logprob_kernel": "cut",
        "activation_checkpointing": True,
        "max_trajectories_mb": 7,
    },
    "sft": {"file": "/mine/chats.jsonl", "num_epochs": 3},
    "evaluation": {"stop_at": 0.9, "stop_without_gain": 5},
    "trackers": {"tensorboard": True},
}


def load_settings(
    config: dict[str, object], run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> object:
    """The trainer's settings, as its process reads them from the job file and its variables."""
    job = parse_config(config, source="test")
    layout = Layout(config=job, run_dir=run_dir, ports=ports_of(job, with_redis=False))
    layout.write_job()
    for name, value in layout.process("trainer").variables.items():
        monkeypatch.setenv(name, value)
    return load(TrainerSettings)


def test_the_trainer_is_told_what_the_config_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(tmp_path, parse_config(CONFIG, source="t"), fresh=False, reuse=True) as run_dir:
        settings = load_settings(CONFIG, run_dir, monkeypatch)
    assert isinstance(settings, TrainerSettings)
    model = settings.model
    assert (model.lora_rank, model.lora_alpha) == (8, 4.0)
    assert model.lora_targets == ("q_proj", "v_proj")
    assert (settings.mode, settings.sft.file, settings.sft.num_epochs) == (
        "sft",
        "/mine/chats.jsonl",
        3,
    )
    assert (settings.device, settings.autocast) == ("cuda", "bfloat16")
    assert settings.activation_checkpointing
    assert settings.logprob_kernel == "cut"
    assert (settings.evaluation.stop_at, settings.evaluation.stop_without_gain) == (0.9, 5)
    assert settings.trackers.tensorboard
    assert settings.max_trajectories_mb == 7


def test_a_config_that_says_nothing_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(tmp_path, parse_config({}, source="t"), fresh=False, reuse=True) as run_dir:
        settings = load_settings({}, run_dir, monkeypatch)
    assert isinstance(settings, TrainerSettings)
    bare = TrainerSettings()
    for name in ("mode", "sft", "model", "trackers", "device", "autocast", "evaluation"):
        assert getattr(settings, name) == getattr(bare, name)


@pytest.mark.parametrize(
    "train",
    [
        {"loss": "grpo"},
        {"objective": {"kl_to": "inference"}},
        {"objective": {"correction": "tis"}},
        {"objective": {"proximal": True}},
        {"objective": {"num_epochs": 2}},
    ],
)
def test_sft_refuses_by_name_what_would_have_no_effect_on_it(train: dict[str, Any]) -> None:
    (name,) = train.get("objective", ("loss",))
    with pytest.raises(ValidationError, match=f'{name} is .* with mode = "sft"'):
        TrainerSettings(mode="sft", **train)
    with pytest.raises(InvalidConfig, match=f'{name} is .* with mode = "sft"'):
        parse_config({"train": {"mode": "sft", **train}}, source="t")
    for fits in ({"loss": "minor_sft"}, {"objective": {"aggregation": "sum", "kl_coeff": 0.1}}):
        parse_config({"train": {"mode": "sft", **fits}}, source="t")


def test_muon_and_lora_are_refused_together() -> None:
    with pytest.raises(InvalidConfig, match="Muon does not train LoRA"):
        load(TrainerSettings, model={"lora_rank": 4}, optimizer="muon")
    with pytest.raises(InvalidConfig, match="uon does not train LoRA"):
        parse_config({"model": {"lora_rank": 4}, "train": {"optimizer": "muon"}}, source="t")


def test_an_entropy_bonus_and_the_kernel_that_has_no_entropy_are_refused_together() -> None:
    train = {"logprob_kernel": "cut", "objective": {"entropy_coeff": 0.01}}
    with pytest.raises(InvalidConfig, match="cut gives none"):
        load(TrainerSettings, **train)
    with pytest.raises(InvalidConfig, match="cut gives none"):
        parse_config({"train": train}, source="t")


def test_a_loss_that_is_its_own_reference_refuses_what_it_has_no_place_for() -> None:
    train = {"loss": "self_distillation", "objective": {"kl_coeff": 0.1}}
    with pytest.raises(InvalidConfig, match="the policy itself: set kl_to"):
        load(TrainerSettings, **train)
    with pytest.raises(InvalidConfig, match="the policy itself: set kl_to"):
        parse_config({"train": train, "scorer": {"reference_logprobs": True}}, source="t")
    fits = {"kl_coeff": 0.1, "kl_to": "inference", "sibling_answer": False}
    parse_config({"train": train | {"objective": fits}}, source="t")
    with pytest.raises(ValidationError, match="takes only sft or minor_sft"):
        TrainerSettings(mode="sft", loss="self_distillation")


class Enough(Exception):
    """Ends the trainer after its first work."""


async def test_the_first_worker_has_the_trainers_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A worker that began before the number was set kept torch's, one for each core. Its train steps
    # then took other cores' time, and a restarted trainer did not repeat them bit for bit.
    before, seen = torch.get_num_threads(), []

    def make(settings: TrainerSettings) -> None:
        torch.ones(2) @ torch.ones(2)
        seen.append(torch.get_num_threads())
        raise Enough

    monkeypatch.setattr(trainer, "_make_tiny_model", make)
    host: Any = None
    settings = TrainerSettings(model_dir=Path("unused"), run="r", num_threads=1)
    torch.set_num_threads(2)
    try:
        with pytest.raises(Enough):
            await trainer.serve_in(host, settings)
    finally:
        torch.set_num_threads(before)
    assert seen == [1]
