"""What is trained moves whole between devices, and training goes on where it was."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_services.trainer.learner import learner_state
from dialoop_services.trainer.learner.learner_state import move_training
from torch import nn


class Tied(nn.Module):
    """An embedding whose weight is the head's too, a matrix and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.matrix = nn.Linear(4, 4)
        self.matrices = [p for p in self.matrix.parameters() if p.ndim == 2]
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(4))

    def forward(self) -> torch.Tensor:
        hidden = self.matrix(self.embedding.weight) * self.scale
        loss: torch.Tensor = self.head(hidden).square().mean()
        return loss


def train(name: Literal["adamw", "muon"]) -> tuple[Tied, GuardedOptimizer]:
    torch.manual_seed(0)
    model = Tied()
    settings = OptimizerSettings(name=name, learning_rate=0.01)
    return model, GuardedOptimizer(list(model.parameters()), settings, matrices=model.matrices)


def take_step(model: Tied, optimizer: GuardedOptimizer) -> None:
    loss = model()
    loss.backward()
    optimizer.step(loss.item())


def test_all_is_moved_once_and_parameters_stay_the_same_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes: list[tuple[int, ...]] = []

    def as_if_there(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        assert device.type == "cuda"
        return tensor.clone()

    monkeypatch.setattr(learner_state, "place", as_if_there)
    names: tuple[Literal["adamw", "muon"], ...] = ("adamw", "muon")
    for name in names:
        model, optimizer = train(name)
        take_step(model, optimizer)
        before, old_scale = list(model.parameters()), model.scale
        shapes.clear()
        move_training(model, [optimizer], "cuda")
        assert sorted(shapes) == [(4,), (4,), (4, 4), (7, 4)], "the tied weight once"
        pairs = zip(before, model.parameters(), strict=True)
        assert all(old is new for old, new in pairs)
        assert model.head.weight is model.embedding.weight
        assert model.scale is not old_scale
        take_step(model, optimizer)


def test_moving_to_where_it_is_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(learner_state, "place")
    model, optimizer = train("adamw")
    move_training(model, [optimizer], "cpu")


def test_state_that_is_loaded_again_trains_on_bit_for_bit() -> None:
    stayed, moved = train("adamw"), train("adamw")
    for step in range(3):
        take_step(*stayed)
        take_step(*moved)
        if step == 1:  # what a move does to an optimiser
            for optimizer in moved[1].torch_optimizers:
                optimizer.load_state_dict(optimizer.state_dict())
    pairs = zip(stayed[0].parameters(), moved[0].parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)
