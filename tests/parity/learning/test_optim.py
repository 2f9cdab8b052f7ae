import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop.errors import InvalidConfig
from dialoop_learning.model.policy import PolicyModel
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_services.config.tables import TrainSection
from pydantic import ValidationError
from torch import nn

from benchmarks.servers.families import FAMILIES, family_config


def _optimizer(**fields: float) -> tuple[nn.Parameter, GuardedOptimizer]:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    return weight, GuardedOptimizer([weight], OptimizerSettings(learning_rate=0.1, **fields))  # type: ignore[arg-type]


def test_rate_warms_up_and_decays_to_a_tenth() -> None:
    settings = OptimizerSettings(learning_rate=1.0, warmup_steps=4, total_steps=14)
    rates = [settings.learning_rate_at(step) for step in (0, 3, 4, 9, 14, 99)]
    assert rates == pytest.approx([0.25, 1.0, 1.0, 0.55, 0.1, 0.1])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    settings = OptimizerSettings(learning_rate=1.0, total_steps=10, schedule="cosine")
    assert settings.learning_rate_at(5) == pytest.approx(0.55)


def test_rate_without_a_total_is_constant() -> None:
    assert OptimizerSettings(learning_rate=0.3).learning_rate_at(10_000) == 0.3


def test_first_step_of_adam_moves_by_the_rate_against_the_gradient() -> None:
    weight, optimizer = _optimizer()
    weight.grad = torch.tensor([0.3, -0.4])
    report = optimizer.step(1.0)
    assert report.applied
    assert report.grad_norm == pytest.approx(0.5)
    assert weight.tolist() == pytest.approx([0.9, 2.1], abs=1e-5)
    assert weight.grad is None


def test_long_gradient_is_clipped_and_its_norm_reported() -> None:
    weight, optimizer = _optimizer()
    weight.grad = torch.tensor([30.0, 40.0])
    assert optimizer.step(1.0).grad_norm == pytest.approx(50.0)


@pytest.mark.parametrize(("gradient", "loss"), [(math.nan, 1.0), (math.inf, 1.0), (0.1, math.nan)])
def test_step_that_is_not_finite_is_refused_and_counted(gradient: float, loss: float) -> None:
    weight, optimizer = _optimizer()
    weight.grad = torch.tensor([gradient, 0.0])
    assert not optimizer.step(loss).applied
    assert weight.tolist() == [1.0, 2.0]
    assert (optimizer.num_steps, optimizer.num_refused) == (0, 1)


def test_training_goes_on_after_a_refused_step() -> None:
    weight, optimizer = _optimizer()
    for gradient in (math.nan, 1.0):
        weight.grad = torch.tensor([gradient, 0.0])
        optimizer.step(1.0)
    assert weight.tolist() == pytest.approx([0.9, 2.0], abs=1e-5)
    assert (optimizer.num_steps, optimizer.num_refused) == (1, 1)


def test_restored_optimizer_continues_exactly() -> None:
    weight, optimizer = _optimizer(warmup_steps=5)
    weight.grad = torch.tensor([0.3, -0.4])
    optimizer.step(1.0)
    copy, restored = _optimizer(warmup_steps=5)
    copy.data = weight.data.clone()
    restored.load_state_dict(deepcopy(optimizer.state_dict()))
    for parameter, owner in ((weight, optimizer), (copy, restored)):
        parameter.grad = torch.tensor([-0.1, 0.2])
        owner.step(1.0)
    assert torch.equal(weight, copy)
    assert restored.num_steps == 2


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    matrix = nn.Parameter(torch.zeros(4, 4))
    vector = nn.Parameter(torch.zeros(4))
    settings = OptimizerSettings(name="muon", learning_rate=0.1, max_grad_norm=1e9)
    optimizer = GuardedOptimizer([matrix, vector], settings, matrices=[matrix])
    matrix.grad, vector.grad = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])), torch.ones(4)
    optimizer.step(1.0)
    # Newton-Schulz makes all singular values about 1: the update is near a multiple of -I, of the
    # size 0.2 sqrt(max(4, 4)) times the rate that AdamW's updates have.
    moved = -matrix.detach().diagonal() / (0.1 * 0.2 * math.sqrt(4))
    assert bool(((moved > 0.6) & (moved < 1.3)).all())
    assert vector.tolist() == pytest.approx([-0.1] * 4, abs=1e-5)


def test_a_checkpoint_of_another_optimiser_is_refused() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    muon = GuardedOptimizer([matrix, vector], OptimizerSettings(name="muon"), matrices=[matrix])
    with pytest.raises(InvalidConfig) as caught:
        GuardedOptimizer([matrix, vector], OptimizerSettings()).load_state_dict(muon.state_dict())
    assert caught.value.reason == "OPTIMIZER_MISMATCH"


OWN = "tests.support.programs.own_optimizers"


def _own(name: str, *weights: nn.Parameter, **fields: Any) -> GuardedOptimizer:
    settings = OptimizerSettings(name=name, learning_rate=0.1, **fields)
    return GuardedOptimizer(weights or (nn.Parameter(torch.zeros(2)),), settings)


@pytest.mark.parametrize(
    ("name", "twin"),
    [(f"{OWN}:momentum", torch.optim.SGD), ("torch.optim:NAdam", torch.optim.NAdam)],
)
def test_an_optimizer_of_ones_own_takes_its_steps_at_the_rate_of_the_schedule(
    name: str, twin: Any
) -> None:
    weight, expected = (nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2))
    optimizer = _own(name, weight, weight_decay=0.01, total_steps=4)
    options = {"momentum": 0.9} if twin is torch.optim.SGD else {}
    other = twin([expected], lr=9.0, weight_decay=0.01, **options)
    for gradient, rate in (([0.3, -0.4], 0.1), ([0.5, 0.1], 0.0775)):
        weight.grad, expected.grad = torch.tensor(gradient), torch.tensor(gradient)
        report = optimizer.step(1.0)
        other.param_groups[0]["lr"] = rate
        other.step()
        assert report.learning_rate == pytest.approx(rate)
    assert torch.equal(weight, expected)
    weight.grad = torch.tensor([math.nan, 0.0])
    assert not optimizer.step(1.0).applied
    assert torch.equal(weight, expected)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_such_module:make", "'no_such_module:make' cannot be loaded"),
        (f"{OWN}:missing", "cannot be loaded"),
        (f"{OWN}:nothing", "returned no torch.optim.Optimizer"),
        (f"{OWN}:no_decay", "raised TypeError: .*weight_decay"),
        (f"{OWN}:without_the_first", "holds 1 parameters, not the 2 it was given"),
    ],
)
def test_what_is_no_optimizer_is_refused_at_the_start(name: str, problem: str) -> None:
    weights = (nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3)))
    with pytest.raises(InvalidConfig, match=problem) as caught:
        _own(name, *weights)
    assert caught.value.reason == "OPTIMIZER_NOT_FOUND"
    assert caught.value.remedy


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
def test_weight_decay_leaves_alone_what_transformers_trainer_does(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer

    small = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16}
    is_gpt2 = family == "gpt2"  # whose norms are of nn.LayerNorm, and named otherwise
    config = AutoConfig.for_model("gpt2", **small) if is_gpt2 else family_config(family)
    policy = PolicyModel(AutoModelForCausalLM.from_config(config))
    decayed = set(Trainer.get_decay_parameter_names(None, policy.causal_lm))
    plain = {id(parameter) for parameter in policy.norms_and_biases()}
    named = dict(policy.causal_lm.named_parameters())
    assert {name for name, p in named.items() if id(p) not in plain} == decayed & named.keys()
    assert plain
    settings = OptimizerSettings(weight_decay=0.1)
    (adamw,) = GuardedOptimizer(
        named.items(), settings, undecayed=policy.norms_and_biases()
    ).torch_optimizers
    decays = {id(p): group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    assert decays == {id(p): 0.1 * (name in decayed) for name, p in named.items()}
    for all_decay in ({}, {"undecayed": ()}):
        (adamw,) = GuardedOptimizer(named.items(), settings, **all_decay).torch_optimizers
        assert [group["weight_decay"] for group in adamw.param_groups] == [0.1]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_checkpoint_goes_on_whatever_the_weight_decay_was(name: str) -> None:
    """Its state lies in the order of the parameters, as it did before there were groups."""

    def made(weight_decay: float) -> GuardedOptimizer:
        weights = [nn.Parameter(torch.full((2, 2), 1.0 + n)) for n in range(4)]
        settings = OptimizerSettings(name=name, learning_rate=0.1, weight_decay=weight_decay)
        return GuardedOptimizer(weights, settings, matrices=weights[2:], undecayed=weights[::2])

    def state_after_a_step(optimizer: GuardedOptimizer) -> list[dict[int, Any]]:
        for number, weight in enumerate(optimizer.parameters):
            weight.grad = torch.tensor([[1.0, 0.3], [-0.2, 0.5]]) * (number + 1)
        optimizer.step(1.0)
        return [part["state"] for part in optimizer.state_dict()["optimizers"]]

    grouped, plain = made(0.5), made(0.0)
    for _ in range(2):  # what AdamW and Muon keep follows from gradients alone
        for of_grouped, of_plain in zip(
            state_after_a_step(grouped), state_after_a_step(plain), strict=True
        ):
            assert sorted(of_grouped) == sorted(of_plain) == list(range(len(of_plain)))
            for number, values in of_plain.items():
                assert all(torch.equal(of_grouped[number][key], values[key]) for key in values)
        states = deepcopy(grouped.state_dict()), deepcopy(plain.state_dict())
        grouped.load_state_dict(states[1])
        plain.load_state_dict(states[0])
    decays = [
        {group["weight_decay"] for part in each.torch_optimizers for group in part.param_groups}
        for each in (grouped, plain)
    ]
    assert decays == [{0.5, 0.0}, {0.0}]


def test_an_optimizer_of_ones_own_gets_the_names_of_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named_optimizer.py").write_text(NAMED)
    monkeypatch.syspath_prepend(str(tmp_path))
    named = [
        ("layer.weight", nn.Parameter(torch.ones(2))),
        ("norm.weight", nn.Parameter(torch.ones(2))),
    ]
    settings = OptimizerSettings(
        name="named_optimizer:make", learning_rate=0.1, weight_decay=0.5, max_grad_norm=1e9
    )
    optimizer = GuardedOptimizer(named, settings)
    for _, parameter in named:
        parameter.grad = torch.zeros(2)
    optimizer.step(1.0)
    assert [parameter.tolist() for _, parameter in named] == [pytest.approx([0.95] * 2), [1.0] * 2]
    GuardedOptimizer(named, settings).load_state_dict(deepcopy(optimizer.state_dict()))


NAMED = """
import torch


def make(parameters, *, lr, weight_decay):
    groups = [
        {"params": [parameter], "weight_decay": 0.0 if "norm" in name else weight_decay}
        for name, parameter in parameters
    ]
    return torch.optim.AdamW(groups, lr=lr)
"""


def test_state_that_no_checkpoint_holds_is_refused_in_the_first_step() -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    with pytest.raises(InvalidConfig, match="Forgetful keeps a state 'object'"):
        _own(f"{OWN}:Forgetful", weight).step(1.0)


@pytest.mark.parametrize("other", [f"{OWN}:momentum", "adamw", "torch.optim:AdamW"])
def test_state_of_another_optimizer_is_refused_by_both_names(other: str) -> None:
    state = _own(f"{OWN}:Smooth").state_dict()
    with pytest.raises(InvalidConfig, match=f"{other}, by {OWN}:Smooth") as caught:
        _own(other).load_state_dict(state)
    assert caught.value.reason == "OPTIMIZER_MISMATCH"


def test_a_sharded_checkpoint_of_an_optimizer_of_ones_own_is_refused() -> None:
    with pytest.raises(ValidationError, match="set sharded_checkpoints = false"):
        TrainSection(optimizer="mine:make", sharded_checkpoints=True)
    with pytest.raises(ValidationError, match="did you mean 'adamw'"):
        TrainSection(optimizer="adamv")
